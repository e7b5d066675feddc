"""Finds the model that a user names; some models on this machine have names beside their paths."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from ..errors import BundleError
from .atomic import restore_folder, write_atomically
from .bundle import GRAPH_NAME
from .file_system import locked
from .graph_files import find_graph
from .hub.downloaded_model import looks_like_hub_id, parse_hub_id, read_downloaded
from .hub.local_store import Store
from .json_file import parse_json_object
from .manifest import DeviceKind
from .regular_file import MAX_JSON_BYTES, read_regular
from .user_folders import data_folder, make_private_folder

_HINT: Final = "give an .onnx file or a model folder"
BUNDLED_MODEL: Final = "shell-helper"
_LIST_NAME: Final = "exports.json"
_MAX_LISTED: Final = 500
"""Folders in the list; beyond it those are dropped that were added first."""
_WAIT_S: Final = 5.0


def path_of_user(name: str | os.PathLike[str], hint: str) -> Path:
    """Return the path that a user names, which may begin with a home folder.

    Raises:
        BundleError: there is no such user.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise BundleError(f"{name} does not exist: {error}", hint) from error


def find_model(name: str | os.PathLike[str] | None, kind: DeviceKind = DeviceKind.CPU) -> Path:
    """Return the path of a model: the one named, or the bundled one for None.

    A path that exists takes precedence, also with a variant (`folder:q4`). Any other text of the form
    `org/name[:variant][@revision]` names a model on the Hugging Face Hub, which is downloaded if necessary. A word that
    is neither names the bundled model, or one that was exported. A `Path` is always a path. A folder that a killed
    export left under a hidden name gets its name back.

    Args:
        name: a path, a name on the hub or on this machine, or None.
        kind: kind of device that the model will run on; decides which variant is downloaded if the name has none.

    Raises:
        BundleError: the name is empty or in an unknown user's home, or this installation has no bundled model.
        EdgeError: the model cannot be downloaded; see `hub.fetch.fetch_model`.
    """
    if name is not None:
        if not os.fspath(name):
            raise BundleError("the model's name is empty", _HINT)
        path = path_of_user(name, _HINT)
        restore_folder(path)
        named, _, variant = os.fspath(name).rpartition(":")
        if named and variant:
            folder = Path(named).expanduser()
            restore_folder(folder)
            if folder.is_dir() and not os.path.lexists(name):
                return find_graph(folder, variant, kind)[0]
        if is_on_hub(name):
            from .hub.fetch import fetch_model  # noqa: PLC0415  most models are on disk

            return fetch_model(parse_hub_id(str(name)), kind).path
        if not isinstance(name, str) or os.path.lexists(path):
            return path
        if looks_like_hub_id(name):
            raise BundleError(f"{name} does not exist", f"{_HINT}; for a model on the hub: edge-run pull {name}")
        return named_models().get(name, path)
    folder = bundled_folder()
    if not folder.is_dir():
        raise BundleError("this installation has no bundled model", "name one: edge-run MODEL")
    return folder


def may_be_model(name: str) -> bool:
    """Return whether a name refers to the hub, or to something that is on this machine.

    Raises:
        BundleError: as for `find_model`.
    """
    return is_on_hub(name) or os.path.exists(find_model(name))


def model_name(folder: Path) -> str:
    """Return the name of a model folder for people: its id on the hub, or else the folder's own name."""
    downloaded = read_downloaded(folder)
    return folder.resolve().name if downloaded is None else downloaded.id


def is_on_hub(name: str | os.PathLike[str]) -> bool:
    """Return whether a name refers to the hub: it has the form of an id, and is not a path on disk.

    If its first part is an existing folder, it is taken for a mistyped path, which must not be sent to the hub, unless
    a model of that name was downloaded before (`edge-run pull` takes hub ids only).
    """
    if not isinstance(name, str) or not looks_like_hub_id(name) or os.path.lexists(name):
        return False
    return not os.path.isdir(os.path.dirname(name)) or bool(Store(parse_hub_id(name).repo).all_downloaded())


def bundled_folder() -> Path:
    """Return the folder of the model that comes with edge-run."""
    return Path(__file__).parent / "bundled" / BUNDLED_MODEL


def exports_folder() -> Path:
    """Return the folder of the models that the app exports, which may not exist."""
    return data_folder() / "models"


def record_export(folder: Path) -> None:
    """Add a folder to the list of exported models, unless the disk refuses: a model can be named by its path, too."""
    path = data_folder() / _LIST_NAME
    with suppress(OSError):
        make_private_folder(path.parent)
        with locked(path.with_suffix(".lock"), _WAIT_S):
            folders = dict.fromkeys(map(str, [*_listed_folders(), folder.resolve()]))
            content = json.dumps({"folders": list(folders)[-_MAX_LISTED:]}, indent=1).encode()
            write_atomically(path, content, private=True)


def exported_models() -> dict[str, Path]:
    """Return the folders of the exported models that are still there, by their names: the app's come first.

    A model is named after its folder. Of several folders of one name the first has it, and the others have their
    paths; none has the name of the bundled model.
    """
    of_app: list[Path] = []
    with suppress(OSError):  # the app has exported nothing yet
        # What was not written whole has a hidden name.
        of_app = sorted(each for each in exports_folder().iterdir() if not each.name.startswith("."))
    found: dict[str, Path] = {}
    for folder in dict.fromkeys([*of_app, *_listed_folders()]):
        if (folder / GRAPH_NAME).is_file():
            found[str(folder) if folder.name in {BUNDLED_MODEL, *found} else folder.name] = folder
    return found


def named_models() -> dict[str, Path]:
    """Return the folders of the models that have a name beside their path: the bundled one, and exported ones."""
    bundled = bundled_folder()
    return {**({BUNDLED_MODEL: bundled} if bundled.is_dir() else {}), **exported_models()}


def _listed_folders() -> list[Path]:
    """The folders in the list, in the order of their first exports; a damaged list is empty."""
    try:
        folders = parse_json_object(read_regular(data_folder() / _LIST_NAME, MAX_JSON_BYTES)).get("folders")
    except (OSError, ValueError):
        return []
    listed = folders if isinstance(folders, list) else []
    return [Path(each) for each in listed if isinstance(each, str) and os.path.isabs(each)]
