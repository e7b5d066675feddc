"""Runs many commands of the command line in one process, which is watched for time and memory from outside."""

from __future__ import annotations

import io
import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import pytest

from edgerun.edge.cli.main import main
from edgerun.models.progress import LINE_PREFIX

needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="limits of time and memory as on Linux")

MAX_SECONDS: Final = 20.0
MAX_BYTES: Final = 2 << 30
_START_SECONDS: Final = 120.0
_CASES_PER_PROCESS: Final = 150
_SERVE: Final = "import sys; from support.command_worker import serve; serve(*map(int, sys.argv[1:]))"
_STREAMS = (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    arguments: tuple[str, ...]
    code: int | None
    """Exit code; None where the process hung or died."""
    out: str
    err: str
    trouble: str = ""
    """That the command took too long, or that its process died; empty if it returned."""

    @property
    def fault(self) -> str:
        """What is wrong with how the command ended; empty if nothing: exit code 0, 1 or 2 and one line of error."""
        lines = [line for line in self.err.splitlines() if not line.startswith(("edge-run: warning: ", LINE_PREFIX))]
        if self.trouble:
            return self.trouble
        if "Traceback" in self.err or "panicked" in self.err:
            return "a traceback"
        if "memory" in self.err.lower():
            return "too much memory"
        if self.code not in (0, 1, 2):
            return f"exit code {self.code}"
        if self.code and (len(lines) != 1 or not lines[0].startswith("edge-run: error: ")):
            return f"{len(lines)} lines of error"
        return ""

    def __str__(self) -> str:
        return f"{self.fault}: edge-run {' '.join(self.arguments)}\n{self.err[-3000:]}"


class CommandWorker:
    """A process that runs commands; a new one takes its place when it dies, hangs or has run many.

    Args:
        folder: working folder of the commands, with their cache.
        environment: variables besides those of this process.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "EDGERUN_CACHE": str(folder / "cache"),
            "HF_HOME": str(folder / "hugging-face"),
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._replies = -1
        self._cases = 0

    def __enter__(self) -> CommandWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def run(self, arguments: Sequence[str], standard_input: bytes = b"") -> Outcome:
        """Run one command."""
        if self._process is None or self._cases >= _CASES_PER_PROCESS:
            self._stop()
            self._start()
        self._cases += 1
        with tempfile.TemporaryDirectory() as place:
            files = [Path(place) / name for name in ("in", "out", "err")]
            files[0].write_bytes(standard_input)
            reply = self._ask({"arguments": list(arguments), "files": [str(file) for file in files]})
            # While the files are there: a process that misses them ends, whatever it did before.
            trouble = self._why_not() if reply is None else ""
            out, err = (_text(file) for file in files[1:])
        if reply is not None and reply["bytes"] > MAX_BYTES:
            trouble = f"{reply['bytes']} bytes of memory"
        return Outcome(tuple(arguments), None if reply is None else reply["code"], out, err, trouble)

    def end_process(self) -> None:
        """End the process from outside, as the system does when memory is short."""
        if self._process is not None:
            self._process.kill()

    def _start(self) -> None:
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(requests), str(replies), str(MAX_BYTES)],
            cwd=self._folder,
            env=self._environment,
            pass_fds=(requests, replies),
            stdin=subprocess.DEVNULL,
        )
        os.close(requests)
        os.close(replies)
        self._cases = 0
        if self._reply(_START_SECONDS) is None:
            raise TimeoutError("the process of the commands does not start")

    def _ask(self, request: Mapping[str, object]) -> dict[str, int] | None:
        """Send a request; None where no reply comes in time."""
        try:
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            return None
        return self._reply(MAX_SECONDS)

    def _reply(self, seconds: float) -> dict[str, int] | None:
        """Read a line of the process; None where none comes in that time."""
        answer = b""
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._replies], [], [], seconds)
            piece = os.read(self._replies, 1 << 16) if ready else b""
            if not piece:
                return None
            answer += piece
        reply: dict[str, int] = json.loads(answer)
        return reply

    def _why_not(self) -> str:
        """Why no reply came; the process is ended."""
        process = self._process
        if process is None:
            return "no process"
        try:
            code: int | None = process.wait(0.5)
        except subprocess.TimeoutExpired:
            code = None
        self._stop()
        return f"over {MAX_SECONDS:.0f} s" if code is None else f"the process ended with {code}"

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._requests)
            os.close(self._replies)
            self._process = None


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""


def _run(arguments: list[str], files: list[str]) -> int:
    """Run one command with the files as standard input, output and error; what it raises goes to the last."""
    for descriptor, (file, flags) in enumerate(zip(files, _STREAMS, strict=True)):
        opened = os.open(file, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    try:
        return main(arguments)
    except BaseException:  # noqa: BLE001  the parent decides what it means
        traceback.print_exc()
        return 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def serve(requests: int, replies: int, max_bytes: int) -> None:
    """Run the commands that come as lines of JSON, and reply with exit code and peak memory."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(requests, encoding="utf-8") as lines, os.fdopen(replies, "w", encoding="utf-8") as answers:
        print("{}", file=answers, flush=True)  # the imports are done
        for line in lines:
            request = json.loads(line)
            code = _run(request["arguments"], request["files"])
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            print(json.dumps({"code": code, "bytes": pages * resource.getpagesize()}), file=answers, flush=True)
