"""Whether a report can be written under a name; known without what draws it."""

from __future__ import annotations

from pathlib import Path

from ...errors import InputError


def check_report_name(path: Path) -> None:
    """Check that a report of that name can be written.

    Raises:
        InputError: it ends in neither .html nor .png, or its folder does not exist.
    """
    if path.suffix.lower() not in (".html", ".htm", ".png"):
        raise InputError(f"a report cannot be written as {path.name}", "end its name in .html or .png")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InputError(f"a report cannot be written to {path}", "name a file in a folder that exists")
