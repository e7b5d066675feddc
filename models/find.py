"""From what a user calls a model to where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..edge.errors import BundleError

BUNDLED_MODEL: Final = "shell-helper"


def bundled_folder() -> Path:
    """The folder of the model that comes with edge-run."""
    return Path(__file__).parent / "bundled" / BUNDLED_MODEL


def find_model(name: Path | None) -> Path:
    """The path of a model: the one named, or the bundled one for None.

    Raises:
        BundleError: this installation carries no bundled model.
    """
    if name is not None:
        return name.expanduser()
    folder = bundled_folder()
    if not folder.is_dir():
        raise BundleError("this installation carries no model", "name one: edge-run MODEL")
    return folder
