"""The portable folder that packaging/portable.py builds, from local files: where it runs, and what it is made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("uv", reason="needs the dev extra")

BUILD = Path(__file__).parent.parent / "packaging" / "portable.py"
MAIN = """
import json, os, sys

def main():
    print(json.dumps({"arguments": sys.argv[1:], "path": sys.path}))
    return 3 if sys.argv[1:] != ["--version"] else 0
"""
"""A program instead of edge-run's, which says what runs it."""


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    """Write a wheel without dependencies."""
    info = f"{name}-1.dist-info"
    metadata = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files = {**files, **{f"{info}/{each}": text for each, text in metadata.items()}}
    path = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in {**files, f"{info}/RECORD": "".join(f"{each},,\n" for each in files)}.items():
            wheel.writestr(file, text)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    packages = ("edgerun", "edgerun/edge", "edgerun/edge/cli")
    files = {**{f"{package}/__init__.py": "" for package in packages}, "edgerun/edge/cli/main.py": MAIN}
    return write_wheel(tmp_path, "edge_run", files)


def build(out: Path, wheel: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Build a folder without network."""
    local = ["--package", str(wheel), "--uv=--no-index", f"--uv=--find-links={wheel.parent}", "--uv=--no-cache"]
    command = [sys.executable, str(BUILD), str(out), *local, *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", check=False)


def test_source_that_cannot_be_built_is_refused_by_a_line_of_its_own(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    done = build(tmp_path / "builds" / "out", tmp_path / "source", "--python-here")
    assert done.returncode == 1
    assert done.stderr.endswith("the packages were not installed\n")
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "builds").iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="copies a Python of a POSIX system")
def test_a_folder_runs_where_it_was_moved_to_without_installed_python(wheel: Path, tmp_path: Path) -> None:
    done = build(tmp_path / "out", wheel, "--python-here")
    assert done.returncode == 0, done.stderr
    assert "s   edge-run --version: " in done.stdout
    assert " edge-run\n" in (tmp_path / "out" / "files.txt").read_text(encoding="utf-8")
    assert build(tmp_path / "out", wheel, "--python-here").stderr.strip().endswith("give another folder")
    moved = (tmp_path / "out").rename(tmp_path / "moved to")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "edgerun.py").write_text("raise SystemExit('another package was used')", encoding="utf-8")
    environment = {"PATH": os.defpath, "PYTHONPATH": str(elsewhere), "PYTHONHOME": str(elsewhere)}
    command = [moved / "edge-run", "-p", "two words"]
    done = subprocess.run(command, env=environment, cwd=elsewhere, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 3, done.stderr
    said = json.loads(done.stdout)
    assert said["arguments"] == ["-p", "two words"]
    assert all(Path(path).is_relative_to(moved) for path in said["path"])


def test_a_folder_for_windows_has_its_own_search_path_and_libraries(wheel: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path, "msvc_runtime", {"msvcp140.dll": "a library"})
    archive = tmp_path / "python-3.12.0-embed-amd64.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for name in ("python.exe", "python3.dll", "python312.dll", "python312.zip"):
            packed.writestr(name, "")
        packed.writestr("python312._pth", "python312.zip\n.\n\n#import site\n")
    out = tmp_path / "out"
    arguments = ("--system", "windows-arm64", "--python-embed", str(archive))
    done = build(out, wheel, *arguments)
    assert done.returncode == 0, done.stderr
    paths = (out / "python" / "python312._pth").read_text(encoding="utf-8")
    assert paths == "python312.zip\n.\nLib\\site-packages\n"
    assert (out / "python" / "Lib" / "site-packages" / "edgerun" / "edge" / "cli" / "main.py").is_file()
    assert (out / "python" / "msvcp140.dll").read_text(encoding="utf-8") == "a library"
    program = (out / "edge-run.cmd").read_bytes()
    assert program.count(b"\r\n") == program.count(b"\n") > 1
    assert b'start "edge-run" /min "%~dp0python\\python.exe" -c ' in (out / "edge-run-app.cmd").read_bytes()


def test_an_archive_of_something_else_leaves_nothing_behind(wheel: Path, tmp_path: Path) -> None:
    done = build(tmp_path / "builds" / "out", wheel, "--system", "windows-x64", "--python-embed", str(wheel))
    assert done.returncode == 1
    assert done.stderr.endswith("has no python3*._pth; give the embeddable package of python.org\n")
    assert list((tmp_path / "builds").iterdir()) == []
