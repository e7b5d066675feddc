"""The models on this machine that have names: the bundled one, and those that this user exported."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from .atomic import write_atomically
from .bundle import GRAPH_NAME
from .data_folder import data_folder, make_private_folder
from .json_file import parse_json_object
from .lock import locked
from .regular_file import MAX_JSON_BYTES, read_regular

BUNDLED_MODEL: Final = "shell-helper"
_LIST_NAME: Final = "exports.json"
_MAX_LISTED: Final = 500
"""Folders in the list; beyond it those are dropped that were added first."""
_WAIT_S: Final = 5.0


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
    """Return the folders of the exported models that are still there, by their names: those of the app come first.

    A model's name is that of its folder. Of several folders of one name the first has it, and the others have their
    paths; none has that of the bundled model.
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
