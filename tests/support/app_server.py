"""The chat app as a process, and a client that has been let in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from support.processes import EDGE_RUN, started_until

PATIENCE_S = 120.0
"""Limit of every wait, far above what it takes."""


@dataclass
class RunningApp:
    """An app that runs as a process."""

    process: subprocess.Popen[bytes]
    home: Path
    """Its folder of data."""
    url: str = ""
    """The address with the one-time token."""
    lines: list[str] = field(default_factory=list)
    """What it wrote to standard error, without line ends."""

    @property
    def base(self) -> str:
        """Its address without the token."""
        return self.url.partition("/open")[0]

    @property
    def port(self) -> int:
        return int(self.base.rpartition(":")[2])

    def client(self) -> httpx.Client:
        """A client without a session."""
        return httpx.Client(base_url=self.base, timeout=PATIENCE_S, trust_env=False)

    @contextmanager
    def entered(self) -> Iterator[httpx.Client]:
        """A client that has used the token of the address."""
        with self.client() as client:
            assert client.get(self.url).status_code == 303
            yield client

    def end(self) -> int:
        """End the app as Ctrl-C does, and return its exit code."""
        self.process.send_signal(signal.SIGINT if os.name != "nt" else signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@contextmanager
def running_app(home: Path, *arguments: str | Path, **environment: str) -> Iterator[RunningApp]:
    """Run `edge-run app --no-browser` with its data in `home`; without a port among the arguments, on a free one."""
    port = () if "--port" in arguments else ("--port", "0")
    command = [*EDGE_RUN, "app", "--no-browser", *map(str, arguments), *port]
    options: dict[str, Any] = {"env": {**os.environ, "EDGERUN_HOME": str(home), **environment}}
    lines: list[str] = []
    addresses: list[str] = []

    def take(line: str) -> bool:
        lines.append(line)
        # The socket is bound before this line is written, so a client that connects now is heard.
        addresses.extend(re.findall(r"edge-run: open (http://\S+)", line))
        return bool(addresses)

    with started_until(command, take, PATIENCE_S, **options) as process:
        assert addresses, lines
        yield RunningApp(process, home, addresses[0], lines)
