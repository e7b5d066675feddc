"""Starting the app when its user logs in: which files do that on each system, writing and removing them.

Sources: systemd.unit(5) and systemd.service(5), launchd.plist(5); on Windows the folder "Startup" of the start menu.
"""

from __future__ import annotations

import os
import platform
import plistlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...errors import InputError
from ...models.atomic import write_atomically
from ...models.file_system import remove

_PROGRAM: Final = "import sys; from edgerun.edge.cli.main import main; sys.exit(main())"
_UNIT: Final = "[Unit]\nDescription=edge-run\n\n[Service]\nExecStart={}\n\n[Install]\nWantedBy=default.target\n"


def login_files() -> Mapping[Path, str | Path]:
    """The files that start the app in the background, with their text, or what they link to."""
    command = [sys.executable, "-I", "-c", _PROGRAM, "app", "--no-browser"]
    if platform.system() == "Windows":
        menu = Path(os.environ.get("APPDATA") or Path.home() / "AppData/Roaming") / "Microsoft/Windows/Start Menu"
        line = subprocess.list2cmdline(command).replace("%", "%%")
        return {menu / "Programs/Startup/edge-run.cmd": f'@chcp 65001 >nul\r\n@start "edge-run" /min {line}\r\n'}
    if platform.system() == "Darwin":
        agent = {"Label": "edge-run", "ProgramArguments": command, "RunAtLoad": True}
        return {Path.home() / "Library/LaunchAgents/edge-run.plist": plistlib.dumps(agent).decode()}
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user"
    words = (word.translate({ord(each): "\\" + each for each in '"\\'}) for word in command)
    line = " ".join(f'"{word}"' for word in words).replace("%", "%%").replace("$", "$$")
    unit = folder / "edge-run.service"
    return {unit: _UNIT.format(line), folder / "default.target.wants" / unit.name: unit}


def login_state() -> dict[str, Any]:
    """Whether the app starts at login, and the files that make it do so, which may not be there yet."""
    files = login_files()
    texts = {str(path): f"a link to {text}" if isinstance(text, Path) else text for path, text in files.items()}
    return {"enabled": all(path.exists() for path in files), "files": texts}


def change_login(enabled: bool) -> dict[str, Any]:
    """Write the files, or remove them and nothing else; returns what `login_state` returns.

    Raises:
        InputError: the system refuses.
    """
    try:
        for path, text in login_files().items():
            if enabled and isinstance(text, str):
                write_atomically(path, text.encode())
                continue
            remove(path)
            if enabled:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(text)
    except OSError as error:
        raise InputError(f"{error.filename} cannot be changed: {error.strerror}", "check its permissions") from error
    return login_state()
