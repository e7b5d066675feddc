"""Which process writes an answer, and whether it still runs."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from typing import Final, Self

import psutil

_TOLERANCE_S: Final = 0.5


@dataclass(frozen=True)
class Writer:
    """A store that is open in a process: process id, the time at which the process started, a random name."""

    process: int
    started: float
    name: str

    @classmethod
    def of_this_process(cls) -> Self:
        """A new writer in this process."""
        process = psutil.Process()
        return cls(process.pid, _started(process), secrets.token_hex(4))

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """The writer that `str` gave as text; None if it is something else."""
        try:
            process, started, name = (text or "").split(" ")
            return cls(int(process), float(started), name)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.process} {self.started:.3f} {self.name}"

    def is_running(self) -> bool:
        """Whether its process still runs: process ids are used again, so the time of the start is compared, too."""
        try:
            process = psutil.Process(self.process)
            return abs(_started(process) - self.started) < _TOLERANCE_S and process.status() != psutil.STATUS_ZOMBIE
        except psutil.AccessDenied:
            return True
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            return False


def _started(process: psutil.Process) -> float:
    """When a process started, in seconds, by a clock that nobody sets.

    Linux counts from the start of the system, and `create_time` adds the time of that start, which changes with the
    clock. Elsewhere the time of the start is recorded once.
    """
    started: float = process.create_time()
    return started - psutil.boot_time() if sys.platform == "linux" else started
