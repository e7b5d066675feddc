"""Builds a folder with edge-run and its own Python, which runs from anywhere, without network and installed Python.

Examples (packaging/README.md says more):

    python packaging/portable.py OUT --system windows-x64 --python-embed python-3.12.10-embed-amd64.zip
    python packaging/portable.py OUT --system linux-x64 --python cpython-3.12.11+...-install_only_stripped.tar.gz
    python packaging/portable.py OUT --python-here

Wheels are chosen and unpacked for the other system by uv, which evaluates environment markers for it; pip evaluates
them for the system that it runs on. The folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SYSTEMS: Final = {
    "windows-x64": "x86_64-pc-windows-msvc",
    "windows-arm64": "aarch64-pc-windows-msvc",
    "linux-x64": "x86_64-manylinux_2_28",
    "linux-arm64": "aarch64-manylinux_2_28",
    "macos-arm64": "aarch64-apple-darwin",
}
"""Names of uv for the systems. ONNX Runtime has no wheels for Macs with Intel's processors."""
MACOS: Final = "14.0"
"""The oldest macOS that the wheels of ONNX Runtime run on."""
PROGRAM: Final = "import sys; from edgerun.edge.cli.main import main; sys.exit(main())"
CPP_RUNTIME: Final = "msvc-runtime"
"""Brings the C++ library that ONNX Runtime needs on Windows; the embeddable Python has the one for C alone."""
UNUSED: Final = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages")
"""Folders of the standard library that edge-run does not use."""
SHOWN: Final = 12

CMD = f"""@echo off
"%~dp0python\\python.exe" -c "{PROGRAM}" %*
"""
APP_CMD = f"""@echo off
rem The minimized window is the app: closing it ends the app.
start "edge-run" /min "%~dp0python\\python.exe" -c "{PROGRAM}" app
"""
SHELL = f"""#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
# Builds of Python with a shared library look for it where they were installed.
[ ! -e "$here"/python/lib/libpython3.*.so.* ] || export LD_LIBRARY_PATH="$here/python/lib"
exec "$here/python/bin/python3" -I -c '{PROGRAM}' "$@"
"""
APP_SHELL = """#!/bin/sh
exec "$(dirname "$(readlink -f "$0")")/edge-run" app "$@"
"""
ADD_TO_MENU = """#!/bin/sh
# Adds the app to the desktop's menu; run it again when the folder has moved. To undo: remove the file that it names.
here=$(dirname "$(readlink -f "$0")")
menu="${XDG_DATA_HOME:-$HOME/.local/share}/applications"
mkdir -p "$menu"
cat >"$menu/edge-run.desktop.new" <<END
[Desktop Entry]
Type=Application
Name=edge-run
Comment=Chat with language models on this machine
Exec="$here/edge-run" app
Icon=$here/icon.svg
Terminal=true
Categories=Utility;
END
mv "$menu/edge-run.desktop.new" "$menu/edge-run.desktop"
echo "$menu/edge-run.desktop"
"""


def here() -> str:
    """The name of the system that this program runs on."""
    system = {"Windows": "windows", "Linux": "linux", "Darwin": "macos"}.get(platform.system(), platform.system())
    arm = platform.machine().lower() in {"arm64", "aarch64"}
    return f"{system}-{'arm64' if arm else 'x64'}"


def add_embedded_python(archive: Path, python: Path) -> Path:
    """Unpack the embeddable Python of python.org for Windows; returns the folder for packages.

    Raises:
        SystemExit: the archive is another one.
    """
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(python)  # noqa: S202  names of zip files are made safe
    paths = next(iter(python.glob("python3*._pth")), None)
    if paths is None:
        sys.exit(f"{archive} has no python3*._pth; give the embeddable package of python.org")
    # The file is the whole search path, so that no other Python's packages and variables are used.
    paths.write_text(f"{paths.stem}.zip\n.\nLib\\site-packages\n", encoding="utf-8")
    return python / "Lib" / "site-packages"


def add_standalone_python(archive: Path, python: Path) -> Path:
    """Unpack an `install_only` archive of python-build-standalone; returns the folder for packages.

    Raises:
        SystemExit: the archive is another one.
    """
    with tempfile.TemporaryDirectory(dir=python.parent) as unpacked, tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
        if not (Path(unpacked) / "python").is_dir():
            sys.exit(f"{archive} has no folder python; give an install_only archive of python-build-standalone")
        shutil.move(Path(unpacked) / "python", python)
    if (python / "python.exe").is_file():
        return python / "Lib" / "site-packages"
    library = next(python.glob("lib/python3.*"))
    for name in UNUSED:
        shutil.rmtree(library / name, ignore_errors=True)
    return library / "site-packages"


def add_running_python(python: Path) -> Path:
    """Copy the Python that runs this program, for this system alone; returns the folder for packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = python / "lib" / version
    ignored = shutil.ignore_patterns(*UNUSED, "config-*", "*.a")
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=ignored, symlinks=True)
    (python / "bin").mkdir()
    executable = Path(sys.base_prefix) / "bin" / version
    shutil.copy(executable if executable.exists() else sys.executable, python / "bin" / "python3")
    shared = Path(str(sysconfig.get_config_var("LIBDIR"))) / str(sysconfig.get_config_var("INSTSONAME"))
    if shared.is_file() and ".so" in shared.name:
        shutil.copy(shared, python / "lib" / shared.name)
    return library / "site-packages"


def python_version(python: Path, packages: Path) -> str:
    """The version of the unpacked Python, such as 3.12."""
    if packages.parent.name.startswith("python3."):
        return packages.parent.name.removeprefix("python")
    name = next(path.stem for path in python.glob("python3?*.dll"))
    return f"3.{name.removeprefix('python3')}"


def add_packages(packages: Path, requirement: str, system: str, version: str, options: Iterable[str]) -> None:
    """Install edge-run, which may be a folder with its source, and what it needs from wheels.

    Raises:
        SystemExit: uv refused, and has said why.
    """
    source = ["--no-binary", "edge-run"] if Path(requirement.partition("[")[0]).is_dir() else []
    requirements = [requirement, *([CPP_RUNTIME] if system.startswith("windows") else [])]
    target = ["--target", str(packages), "--python-platform", SYSTEMS[system], "--python-version", version]
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--only-binary", ":all:", "--link-mode", "copy"]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": MACOS}
    done = subprocess.run([*command, *source, *target, *options, *requirements], check=False, env=environment)
    if done.returncode != 0:
        sys.exit("the packages were not installed")
    for name in ("bin", "Scripts"):  # scripts that name this machine's Python
        shutil.rmtree(packages / name, ignore_errors=True)
    for library in packages.glob("*.dll"):  # Windows looks for them beside the program
        library.replace(packages.parent.parent / library.name)


def add_programs(folder: Path, system: str) -> None:
    """Write what people start."""
    programs = {"edge-run": SHELL, "edge-run-app": APP_SHELL, "add-to-menu.sh": ADD_TO_MENU}
    if system.startswith("windows"):
        programs = {"edge-run.cmd": CMD, "edge-run-app.cmd": APP_CMD}
    elif system.startswith("macos"):
        programs = {"edge-run": SHELL, "edge-run-app.command": APP_SHELL}
    for name, text in programs.items():
        path = folder / name
        path.write_text(text, encoding="utf-8", newline="\r\n" if name.endswith(".cmd") else "\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    for path in (ROOT / "edge" / "app" / "page" / "icon.svg", ROOT / "LICENSE", ROOT / "NOTICE"):
        shutil.copy(path, folder / path.name)


def compile_modules(folder: Path) -> None:
    """Compile all modules, for a start that does not; files that are moved or unpacked get other times."""
    options = ["-q", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    run = [str(folder / "python" / "bin" / "python3"), "-I", "-m", "compileall", *options, str(folder / "python")]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "python" / "lib")}
    subprocess.run(run, check=False, env=environment, stdout=subprocess.DEVNULL)


def report(folder: Path, *, runs: bool) -> None:
    """Write the list of all files, and print sizes and, where the folder runs here, how long the program starts."""
    sizes = {path: path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    lines = [f"{size:12} {path.relative_to(folder).as_posix()}" for path, size in sizes.items()]
    (folder / "files.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    parts: dict[str, int] = {}
    for path, size in sizes.items():
        names = path.relative_to(folder).parts
        place = names.index("site-packages") + 2 if "site-packages" in names else min(len(names), 3)
        parts["/".join(names[:place])] = parts.get("/".join(names[:place]), 0) + size
    for name, size in sorted(parts.items(), key=lambda part: -part[1])[:SHOWN]:
        print(f"{size / 1e6:8.1f} MB  {name}")
    print(f"{sum(sizes.values()) / 1e6:8.1f} MB  in {len(sizes)} files, listed in {folder / 'files.txt'}")
    if runs:
        for _ in range(2):  # the second start finds its files in the system's cache
            started = time.perf_counter()
            done = subprocess.run([folder / "edge-run", "--version"], capture_output=True, encoding="utf-8", check=True)
            print(f"{time.perf_counter() - started:8.2f} s   edge-run --version: {done.stdout.strip()}")


def main() -> None:
    """Build the folder that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="The folder, which must not exist.")
    parser.add_argument("--system", choices=SYSTEMS, default=here(), help="Where it will run.")
    python = parser.add_mutually_exclusive_group(required=True)
    python.add_argument("--python-embed", type=Path, help="python.org's embeddable package, for Windows.")
    python.add_argument("--python", type=Path, help="An install_only archive of python-build-standalone.")
    python.add_argument("--python-here", action="store_true", help="The running Python; for tests on this system.")
    parser.add_argument("--package", default=f"{ROOT}[app]", help="What is installed: a wheel, a folder or a name.")
    parser.add_argument("--uv", action="append", default=[], help="An option for uv, such as --uv=--offline.")
    given = parser.parse_args()
    out: Path = given.out.absolute()
    if out.exists():
        sys.exit(f"{out} exists; remove it, or give another folder")
    if given.python_here and given.system != here():
        sys.exit(f"the running Python is for {here()}, not for {given.system}; give --python or --python-embed")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder = Path(temporary) / out.name
        folder.mkdir()
        if given.python_here:
            packages = add_running_python(folder / "python")
        else:
            archive: Path = given.python_embed or given.python
            print(f"SHA-256 of {archive.name}: {hashlib.sha256(archive.read_bytes()).hexdigest()}")
            add = add_embedded_python if given.python_embed else add_standalone_python
            packages = add(archive, folder / "python")
        add_packages(packages, given.package, given.system, python_version(folder / "python", packages), given.uv)
        add_programs(folder, given.system)
        runs = given.system == here() and not given.system.startswith("windows")
        if runs:
            compile_modules(folder)
        folder.rename(out)
    report(out, runs=runs)


if __name__ == "__main__":
    main()
