"""Processes that tests start, and their end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from support.prepared_python import PreparedProcess, is_prepared

EDGE_RUN = (sys.executable, "-c", "import sys; from edgerun.edge.cli.main import main; sys.exit(main())")
"""The command, as the installed script runs it."""


def ignoring_ctrl_c(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` as a POSIX shell without job control runs it in the background."""
    return ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is gone after the block, also when a test fails: it is killed if it still runs.

    Args:
        command: program and arguments; Python code (`-c`) finds the command's modules imported where that is possible.
        **options: those of `subprocess.Popen`.
    """
    start: Any = PreparedProcess if is_prepared(command, options) else subprocess.Popen
    with start(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def started_until(
    command: Sequence[str], take: Callable[[str], bool], patience_s: float, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process, and wait until it has written a line to standard error that says that it is ready.

    Args:
        command: program and arguments.
        take: called with each line, without its end, in a thread of its own until the process has ended; returns
            whether the process is ready.
        patience_s: longest time to wait.
        **options: those of `subprocess.Popen`.
    """
    with started(command, stderr=subprocess.PIPE, **options) as process:
        ready = threading.Event()

        def read() -> None:
            for line in process.stderr:
                if take(line.decode().rstrip("\r\n")):
                    ready.set()
            ready.set()

        reading = threading.Thread(target=read, daemon=True)
        reading.start()
        assert ready.wait(patience_s)
        try:
            yield process
        finally:
            process.kill()
            reading.join(patience_s)
