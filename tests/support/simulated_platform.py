"""A program that imports all modules of the package as on other platforms: `python simulated_platform.py darwin win32`.

Other packages are imported first, as they are on this system; then the package's modules are imported again with
another `sys.platform`, for Windows, which comes last, without the names that only POSIX systems have. Printed are the
modules that fail.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import types
from collections.abc import Sequence

from source_tree import name_of, sources

# https://docs.python.org/3/library: "Availability: Unix"
NOT_ON_WINDOWS = ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
ONLY_ON_WINDOWS = ("_winapi", "msvcrt", "winreg")
POSIX_NAMES = {
    os: "chown fchmod fchown fork geteuid getgid getloadavg getuid mkfifo O_DIRECTORY O_NOFOLLOW O_NONBLOCK "
    "openpty pread sched_getaffinity sched_setaffinity setsid statvfs sysconf uname waitid WNOHANG",
    signal: "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGWINCH alarm "
    "pthread_sigmask setitimer sigwait",
    socket: "AF_UNIX",
}


def importable(name: str) -> bool:
    """Whether a module is imported as on this system; what an extra of the package would bring may be missing."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "edgerun").partition(".")[0] == "edgerun":
            raise
        return False
    return True


def pretend(platform: str) -> None:
    """Change what this process says it runs on."""
    sys.platform = platform
    if platform != "win32":
        return
    for name in NOT_ON_WINDOWS:
        sys.modules[name] = None  # type: ignore[assignment]  # so that importing it fails
    for name in ONLY_ON_WINDOWS:
        sys.modules[name] = types.ModuleType(name)
    for module, names in POSIX_NAMES.items():
        for name in names.split():
            vars(module).pop(name, None)


def main(platforms: Sequence[str]) -> int:
    """Import everything here and as on each platform; return 1 if a module of the package failed."""
    modules = ("edgerun", "edgerun.errors", *(".".join(("edgerun", *name_of(path))) for path in sources()))
    names = [name for name in modules if importable(name)]
    failed = False
    for platform in platforms:
        for name in [name for name in sys.modules if name.partition(".")[0] == "edgerun"]:
            del sys.modules[name]
        pretend(platform)
        for name in names:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001  every failure is one to print
                failed = True
                print(f"{platform}: {name}: {type(error).__name__}: {error}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
