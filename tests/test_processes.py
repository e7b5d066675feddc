"""No test leaves a process behind, also not when it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import started

TESTS = Path(__file__).resolve().parent
STARTING = {"support/processes.py", "support/killed_process.py", "support/command_worker.py"}
"""Files that start processes by themselves, and kill them at the end of the same block."""


def start_and_fail(seen: list[subprocess.Popen[bytes]]) -> None:
    sleeping = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]
    with started(sleeping, stdout=subprocess.PIPE) as process:
        seen.append(process)
        assert process.stdout.readline()
        raise ZeroDivisionError


def test_a_process_is_killed_when_the_test_fails() -> None:
    seen: list[subprocess.Popen[bytes]] = []
    with pytest.raises(ZeroDivisionError):
        start_and_fail(seen)
    (process,) = seen
    assert process.returncode is not None
    assert process.stdout.closed


def test_tests_start_processes_that_end_with_them() -> None:
    found = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if "subprocess.Popen(" in path.read_text(encoding="utf-8")
    }
    assert found - {Path(__file__).name} <= STARTING
