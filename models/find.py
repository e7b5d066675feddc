"""From what a user calls a model to where it lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ..edge.errors import BundleError

BUNDLED_MODEL: Final = "shell-helper"


def bundled_folder() -> Path:
    """The folder of the model that comes with edge-run."""
    return Path(__file__).parent / "bundled" / BUNDLED_MODEL


def find_model(name: str | os.PathLike[str] | None) -> Path:
    """The path of a model: the one named, or the bundled one for None.

    Raises:
        BundleError: the name is empty or of an unknown user's home, or this installation carries no bundled model.
    """
    if name is not None:
        if not os.fspath(name):
            raise BundleError("a model of no name does not exist", "give an .onnx file or a model folder")
        try:
            return Path(name).expanduser()
        except RuntimeError as error:
            raise BundleError(f"{name} does not exist: {error}", "give an .onnx file or a model folder") from error
    folder = bundled_folder()
    if not folder.is_dir():
        raise BundleError("this installation carries no model", "name one: edge-run MODEL")
    return folder
