"""Copies text to the clipboard: through a program of the system, and through the terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Final

from ....errors import InputError
from ..output import can_draw, set_clipboard

_PATIENCE_S: Final = 5.0
_PROGRAMS: Final = {"darwin": "pbcopy", "win32": "clip"}
_ENCODINGS: Final = {"clip": "utf-16"}
"""Encodings that programs read, where it is not UTF-8."""


def copy_to_clipboard(text: str) -> None:
    """Copy text with the system's program for that, and by asking the terminal, which reaches other machines too.

    Raises:
        InputError: neither is possible here.
    """
    by_program = any(_copied_by(command, text) for command in _programs())
    if can_draw():
        set_clipboard(text)
    elif not by_program:
        raise InputError("this terminal has no clipboard", "install xclip or wl-clipboard, or select the text")


def _copied_by(command: tuple[str, ...], text: str) -> bool:
    program = shutil.which(command[0])
    if program is None:
        return False
    data = text.encode(_ENCODINGS.get(command[0], "utf-8"), "replace")
    nowhere = subprocess.DEVNULL
    try:
        subprocess.run(  # noqa: S603
            [program, *command[1:]], input=data, stdout=nowhere, stderr=nowhere, timeout=_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _programs() -> list[tuple[str, ...]]:
    """Commands that copy their standard input on this system."""
    if (program := _PROGRAMS.get(sys.platform)) is not None:
        return [(program,)]
    found: list[tuple[str, ...]] = []
    if os.environ.get("WAYLAND_DISPLAY"):
        found.append(("wl-copy",))
    if os.environ.get("DISPLAY"):
        found += [("xclip", "-selection", "clipboard"), ("xsel", "--clipboard", "--input")]
    return found
