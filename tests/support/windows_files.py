"""Pytest plugin that refuses to remove or replace files in use, as Windows does.

EDGERUN_WINDOWS_FILES=1 in the environment switches it on (Linux only: it reads /proc/self). From then on, in the
process of the tests:

- A file that this process has open or mapped cannot be removed, renamed or replaced, under any of its names.
- A folder that holds such a file cannot be renamed.
- A folder cannot be replaced, also not an empty one.
- A file that is mapped cannot be truncated.
- No file gets a name that Windows does not allow.

Operations are watched through audit events, so every way to them is: os, pathlib, shutil and tempfile. What was refused
to code of the package is listed at the end of the run, since some callers ignore such errors.

Source: the file rules of Windows for handles opened without FILE_SHARE_DELETE, as Python and ONNX Runtime open files
(https://learn.microsoft.com/windows/win32/fileio/creating-and-opening-files).
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parent.parent.parent
ACCESS_DENIED, SHARING_VIOLATION, INVALID_NAME, MAPPED = 5, 32, 123, 1224
MESSAGES = {
    ACCESS_DENIED: "Access is denied",
    SHARING_VIOLATION: "The process cannot access the file because it is being used by another process",
    INVALID_NAME: "The filename, directory name, or volume label syntax is incorrect",
    MAPPED: "The requested operation cannot be performed on a file with a user-mapped section open",
}
FORBIDDEN_NAME = re.compile(r'[<>:"|?*\\\x00-\x1f]|[ .]$|^(con|prn|aux|nul|com[1-9]|lpt[1-9])(\.|$)', re.IGNORECASE)


class WindowsError(PermissionError):
    """What Windows answers: its code in `winerror`, as there."""

    def __init__(self, code: int, path: str) -> None:
        super().__init__(errno.EACCES, MESSAGES[code], path)
        self.winerror = code

    def __str__(self) -> str:
        return f"[WinError {self.winerror}] {self.strerror}: {self.filename!r}"


@dataclass(frozen=True)
class Held:
    """A file in use by this process, and where it lies."""

    device: int
    inode: int
    path: str
    mapped: bool


def files_in_use(marker: str = "/") -> Iterator[Held]:
    """Regular files that this process has open, and those mapped whose line in /proc/self/maps contains `marker`."""
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
            path = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor that listed the folder, or one that another thread closed
        if S_ISREG(status.st_mode):
            yield Held(status.st_dev, status.st_ino, path, mapped=False)
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        lines = file.read().splitlines()
    for line in lines:
        if marker in line:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith("/"):
                major, minor = (int(part, 16) for part in fields[3].split(":"))
                yield Held(os.makedev(major, minor), int(fields[4]), fields[5], mapped=True)


def uses_of(status: os.stat_result) -> list[Held]:
    """How this process uses a file."""
    same = (status.st_dev, status.st_ino)
    return [each for each in files_in_use(f" {status.st_ino} ") if (each.device, each.inode) == same]


class WindowsFileRules:
    """An audit hook with the rules of Windows, and a list of what it refused."""

    def __init__(self) -> None:
        self.refused: list[str] = []
        self._checking = False
        self._checks: dict[str, Callable[[tuple[Any, ...]], None]] = {
            "open": self._check_open,
            "os.mkdir": lambda args: self._check_name(place(args[0], args[2])),
            "os.remove": lambda args: self._check_unused(place(args[0], args[1])),
            "os.rename": self._check_rename,
            "os.truncate": lambda args: self._check_unmapped(args[0]),
        }

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        """Called for every audit event of this process."""
        check = self._checks.get(event)
        if check is None or self._checking:
            return
        self._checking = True  # looking for files in use opens files
        try:
            check(args)
        finally:
            self._checking = False

    def _refuse(self, code: int, path: str) -> None:
        frame: Any = sys._getframe()
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE) and not file.is_relative_to(PACKAGE / "tests"):
                where = f"{file.relative_to(PACKAGE).as_posix()}:{frame.f_lineno}"
                self.refused.append(f"{where}: {Path(path).name}: {MESSAGES[code]}")
                break
            frame = frame.f_back
        raise WindowsError(code, path)

    def _check_unused(self, path: str) -> None:
        try:
            status = os.lstat(path)
        except OSError:
            return  # the operation itself says that there is none
        if S_ISREG(status.st_mode):
            uses = uses_of(status)
            if uses:
                self._refuse(ACCESS_DENIED if any(use.mapped for use in uses) else SHARING_VIOLATION, path)

    def _check_unmapped(self, file: Any) -> None:
        try:
            status = os.stat(file)
        except OSError:
            return
        mapped = [use.path for use in uses_of(status) if use.mapped]
        if mapped:
            self._refuse(MAPPED, mapped[0])

    def _check_rename(self, args: tuple[Any, ...]) -> None:
        source, destination = place(args[0], args[2]), place(args[1], args[3])
        self._check_name(destination)
        if os.path.isdir(source) and not os.path.islink(source):
            prefix = os.path.join(os.path.realpath(source), "")
            if any(each.path.startswith(prefix) for each in files_in_use(prefix)):
                self._refuse(ACCESS_DENIED, source)
            if os.path.isdir(destination):
                self._refuse(ACCESS_DENIED, destination)
        self._check_unused(source)
        self._check_unused(destination)

    def _check_open(self, args: tuple[Any, ...]) -> None:
        path, _, flags = args
        if not isinstance(path, (str, bytes, os.PathLike)) or not isinstance(flags, int):
            return  # a descriptor that is open already
        name = os.fsdecode(path)
        if name.startswith(("/proc/", "/dev/", "/sys/")):
            return
        if flags & os.O_CREAT and not os.path.lexists(name):
            self._check_name(name)
        if flags & os.O_TRUNC:
            self._check_unmapped(name)

    def _check_name(self, path: str) -> None:
        if FORBIDDEN_NAME.search(os.path.basename(path.rstrip("/"))):
            self._refuse(INVALID_NAME, path)


def place(path: Any, folder: int) -> str:
    """The path of an audit event, whose second part is a folder's descriptor or -1."""
    name = os.fsdecode(path)
    return name if folder == -1 else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)


RULES = WindowsFileRules()
REFUSED = "refused by the file rules of Windows"


def pytest_configure(config: pytest.Config) -> None:
    """Switch the rules on, for good: an audit hook cannot be removed."""
    sys.addaudithook(RULES)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What was refused before a test is not that test's."""
    RULES.refused.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Refusals travel with the report of the test, also from another process of pytest-xdist."""
    item.user_properties.extend((REFUSED, what) for what in RULES.refused)
    RULES.refused.clear()
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what was refused to code of the package, by test."""
    found = {
        (report.nodeid, what)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, what in getattr(report, "user_properties", ())
        if name == REFUSED
    }
    if found:
        terminalreporter.section(REFUSED)
        for test, what in sorted(found):
            terminalreporter.write_line(f"{what}  ({test})")
