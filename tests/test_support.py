"""No test leaves a process behind, also not when it fails; and the plugin that refuses to remove files in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import started

CASES = """
import mmap, os, shutil
from pathlib import Path
import pytest

def refused(operation, *args):
    with pytest.raises(PermissionError, match="WinError"):
        operation(*args)

@pytest.mark.parametrize("operation", [os.unlink, os.remove, Path.unlink, lambda p: os.replace(p, f"{p}.new"),
    lambda p: Path(f"{p}.new").touch() or os.replace(f"{p}.new", p), lambda p: os.rename(p.parent, f"{p.parent}.new"),
    lambda p: shutil.rmtree(p.parent), lambda p: os.unlink(f"{p}.link")])
def test_a_file_in_use_stays(tmp_path, operation):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "file"
    path.write_bytes(b"text")
    os.link(path, f"{path}.link")
    with path.open("rb") as file:
        refused(operation, path)
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    refused(operation, path)
    refused(path.write_bytes, b"")
    refused(os.truncate, path, 1)
    mapping.close()
    path.write_bytes(b"more")
    os.rename(folder, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")

def test_a_folder_is_not_replaced(tmp_path):
    for name in ("one", "two"):
        tmp_path.joinpath(name).mkdir()
    refused(os.replace, tmp_path / "one", tmp_path / "two")

@pytest.mark.parametrize("name", ["a:b", "what?", "nul", "con.txt", "end."])
def test_a_name_that_windows_lacks(tmp_path, name):
    refused(tmp_path.joinpath(name).touch)
    refused(tmp_path.joinpath(name).mkdir)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_files_in_use_are_not_removed_or_replaced(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES, encoding="utf-8")
    support = Path(__file__).parent
    options = "-q -p support.windows_files -p no:cacheprovider"
    environment = {**os.environ, "PYTHONPATH": str(support), "PYTEST_ADDOPTS": options}
    command = [sys.executable, "-m", "pytest", str(tmp_path)]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8", check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


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
