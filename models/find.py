"""From what a user calls a model to where it lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ..edge.errors import BundleError
from .device_kind import DeviceKind
from .hub_id import looks_like_hub_id, parse_hub_id
from .hub_store import Store

BUNDLED_MODEL: Final = "shell-helper"
_HINT: Final = "give an .onnx file or a model folder"


def bundled_folder() -> Path:
    """The folder of the model that comes with edge-run."""
    return Path(__file__).parent / "bundled" / BUNDLED_MODEL


def find_model(name: str | os.PathLike[str] | None, kind: DeviceKind = DeviceKind.CPU) -> Path:
    """The path of a model: the one named, or the bundled one for None.

    What exists on disk wins; a text `org/name[:variant][@revision]` that does not is a model of the Hugging Face Hub,
    which is downloaded if it was not before. A `Path` is always a path.

    Args:
        name: a path, a name on the hub, or None.
        kind: what the model is to run on; decides which variant is downloaded where the name leaves that open.

    Raises:
        BundleError: the name is empty or of an unknown user's home, or this installation carries no bundled model.
        EdgeError: the hub does not give the model; see `hub.fetch_model`.
    """
    if name is not None:
        if not os.fspath(name):
            raise BundleError("a model of no name does not exist", _HINT)
        try:
            path = Path(name).expanduser()
        except RuntimeError as error:
            raise BundleError(f"{name} does not exist: {error}", _HINT) from error
        if is_on_hub(name):
            from .hub import fetch_model  # noqa: PLC0415  the usual model lies on disk

            return fetch_model(parse_hub_id(str(name)), kind).path
        if isinstance(name, str) and looks_like_hub_id(name) and not path.exists():
            raise BundleError(f"{name} does not exist", f"{_HINT}; for a model on the hub: edge-run pull {name}")
        return path
    folder = bundled_folder()
    if not folder.is_dir():
        raise BundleError("this installation carries no model", "name one: edge-run MODEL")
    return folder


def is_on_hub(name: str | os.PathLike[str]) -> bool:
    """Whether a name means a model of the hub: it reads like one, and is no path on disk nor likely meant as one.

    In a folder that exists it is taken for a mistyped path, which is nobody else's business, unless a model of that
    name was downloaded (`edge-run pull` takes names of the hub alone).
    """
    if not isinstance(name, str) or not looks_like_hub_id(name) or os.path.lexists(name):
        return False
    return not os.path.isdir(os.path.dirname(name)) or bool(Store(parse_hub_id(name).repo).all_downloaded())
