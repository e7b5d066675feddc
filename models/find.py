"""From what a user calls a model to where it lies."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from ..errors import BundleError
from .device_kind import DeviceKind
from .graph_files import find_graph
from .hub.local_store import Store
from .hub.model_id import looks_like_hub_id, parse_hub_id

BUNDLED_MODEL: Final = "shell-helper"
_HINT: Final = "give an .onnx file or a model folder"


def bundled_folder() -> Path:
    """The folder of the model that comes with edge-run."""
    return Path(__file__).parent / "bundled" / BUNDLED_MODEL


def find_model(name: str | os.PathLike[str] | None, kind: DeviceKind = DeviceKind.CPU) -> Path:
    """The path of a model: the one named, or the bundled one for None.

    What exists on disk wins, also with a variant behind it (`folder:q4`); a text `org/name[:variant][@revision]` that
    does not is a model of the Hugging Face Hub, which is downloaded if it was not before. A `Path` is always a path.

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
        if (variant := _variant_of_folder(name)) is not None:
            return find_graph(*variant, kind)[0]
        if is_on_hub(name):
            from .hub.fetch import fetch_model  # noqa: PLC0415  the usual model lies on disk

            return fetch_model(parse_hub_id(str(name)), kind).path
        if isinstance(name, str) and looks_like_hub_id(name) and not path.exists():
            raise BundleError(f"{name} does not exist", f"{_HINT}; for a model on the hub: edge-run pull {name}")
        return path
    folder = bundled_folder()
    if not folder.is_dir():
        raise BundleError("this installation carries no model", "name one: edge-run MODEL")
    return folder


def _variant_of_folder(name: str | os.PathLike[str]) -> tuple[Path, str] | None:
    """The folder and the variant in `folder:variant`; None for another name."""
    folder, colon, variant = os.fspath(name).rpartition(":")
    path = Path(folder).expanduser() if colon and folder and variant else None
    return (path, variant) if path is not None and path.is_dir() and not os.path.lexists(name) else None


def is_on_hub(name: str | os.PathLike[str]) -> bool:
    """Whether a name means a model of the hub: it reads like one, and is no path on disk nor likely meant as one.

    In a folder that exists it is taken for a mistyped path, which is nobody else's business, unless a model of that
    name was downloaded (`edge-run pull` takes names of the hub alone).
    """
    if not isinstance(name, str) or not looks_like_hub_id(name) or os.path.lexists(name):
        return False
    return not os.path.isdir(os.path.dirname(name)) or bool(Store(parse_hub_id(name).repo).all_downloaded())
