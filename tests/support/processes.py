"""Processes that tests start, and their end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

EDGE_RUN = (sys.executable, "-c", "import sys; from edgerun.edge.cli.main import main; sys.exit(main())")
"""The command, as the installed script runs it."""


def ignoring_ctrl_c(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` as a POSIX shell without job control runs it in the background."""
    return ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is gone after the block, also when a test fails: it is killed if it still runs.

    Args:
        command: program and arguments.
        **options: those of `subprocess.Popen`.
    """
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
