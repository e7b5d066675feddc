"""Locks between threads and processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgerun.models.file_system import locked
from support.processes import started

HOLD = """
import sys, time
from pathlib import Path
from edgerun.models.file_system import locked
with locked(Path(sys.argv[1]), 5.0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_is_exclusive_and_released_after_the_block(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", 0.0):
        with pytest.raises(TimeoutError), locked(tmp_path / "lock", 0.01):
            pass
        with locked(tmp_path / "another", 0.0):
            pass
    with pytest.raises(KeyError), locked(tmp_path / "lock", 0.0):
        raise KeyError
    with locked(tmp_path / "lock", 0.0):
        pass
    with pytest.raises(FileNotFoundError), locked(tmp_path / "missing" / "lock", 0.0):
        pass


def test_a_waiting_process_gets_the_lock_when_it_is_released(tmp_path: Path) -> None:
    total = 0

    def count() -> None:
        nonlocal total
        for _ in range(20):
            with locked(tmp_path / "lock", 30.0):
                seen = total
                event.wait(0.0005)
                total = seen + 1

    event = threading.Event()
    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == 60


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with started([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline().strip() == b"held"
        with pytest.raises(TimeoutError), locked(path, 0.05):
            pass
    with locked(path, 5.0):
        pass
