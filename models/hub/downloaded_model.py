"""Ids of models on the Hugging Face Hub, and the record in a folder that was downloaded from there."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from ...errors import BundleError, InputError
from ..bundle import verify_file
from ..json_file import read_json_object, record_from_json
from ..manifest import FileDigest

RECORD_NAME: Final = "hub.json"
CHECKPOINT: Final = "."
"""The `source` of a whole checkpoint, in place of a file."""
_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_-])?"
_ID: Final = re.compile(rf"(?P<repo>{_PART}/{_PART})(?::(?P<variant>[^@]*))?(?:@(?P<revision>.*))?")
_LOOSE: Final = re.compile(r"[\w.-]+/[\w.-]+(?:[:@].*)?")
"""Text that is meant as an id and not as a path, whether it is valid or not."""
_WORD: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
_HINT: Final = "write org/name, org/name:variant or org/name:variant@revision"


@dataclass(frozen=True)
class DownloadedModel:
    """A model folder that was downloaded from the hub."""

    repo: str
    commit: str
    variant: str
    """The variant in `org/name:variant`; empty if the repository has only one graph."""
    source: str
    """The file of the repository that the folder is for: a graph or a GGUF file; or `CHECKPOINT`."""
    files: Mapping[str, FileDigest]
    """Digest by path relative to the folder."""
    folder: Path = field(default=Path())

    def __post_init__(self) -> None:
        if not all(map(is_safe_path, self.files)):
            raise ValueError("names a file outside its folder")

    @property
    def path(self) -> Path:
        """Path to open: a GGUF file, or the folder."""
        return self.folder / PurePosixPath(self.source).name if self.source.endswith(".gguf") else self.folder

    @property
    def id(self) -> str:
        """The id of the model, as long as its branch refers to the same commit."""
        return self.name(self.repo, self.variant if self.source != CHECKPOINT else "")

    @staticmethod
    def name(repo: str, variant: str) -> str:
        """Join a repository and a variant."""
        return f"{repo}:{variant}" if variant else repo

    @property
    def bytes(self) -> int:
        """Total size of the files in bytes."""
        return sum(digest.bytes for digest in self.files.values())

    @property
    def last_used(self) -> float:
        """Time at which it was last opened, in seconds since 1970."""
        return (self.folder / RECORD_NAME).stat().st_mtime

    def record(self) -> dict[str, Any]:
        """What the folder's record says of it, as JSON values."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    def verify(self) -> None:
        """Check that the files are unchanged, and record the time of use; large files are hashed once.

        Raises:
            BundleError: a file is missing or damaged.
        """
        try:
            for name, digest in self.files.items():
                verify_file(self.folder / name, digest)
        except BundleError as error:
            raise BundleError(error.what, f"download it again: edge-run pull {self.id}") from error
        with suppress(OSError):  # the cache is read-only
            os.utime(self.folder / RECORD_NAME)


def read_downloaded(folder: Path) -> DownloadedModel | None:
    """Read a model folder's record; None if it is missing or damaged."""
    with suppress(BundleError, ValueError, LookupError):
        return replace(
            record_from_json(DownloadedModel, read_json_object(folder / RECORD_NAME, BundleError, "")), folder=folder
        )
    return None


def is_safe_path(path: str) -> bool:
    """Return whether a path stays inside the folder that it is relative to, on every operating system."""
    windows = PureWindowsPath(path)
    inside = not (windows.drive or windows.root or "\\" in path or ":" in path or "\0" in path)
    return bool(path) and inside and ".." not in windows.parts


@dataclass(frozen=True)
class HubId:
    """Id of a model on the hub."""

    repo: str
    """`org/name`."""
    variant: str | None = None
    """A precision, a folder or a file of the repository; None for the one that suits the device best."""
    revision: str | None = None
    """A branch, tag or commit; None for the main branch."""

    def __str__(self) -> str:
        return self.repo + (f":{self.variant}" if self.variant else "") + (f"@{self.revision}" if self.revision else "")


def looks_like_hub_id(name: str) -> bool:
    """Return whether a name has the form of an id: two words around one slash, without the suffix of a model file."""
    repo = re.split("[:@]", name, maxsplit=1)[0]
    return _LOOSE.fullmatch(name) is not None and repo[0] not in ".~" and not repo.endswith((".onnx", ".gguf"))


def parse_hub_id(name: str) -> HubId:
    """Parse `org/name[:variant][@revision]`.

    Raises:
        InputError: the text is not a valid id.
    """
    match = _ID.fullmatch(name)
    if match is None or "--" in match["repo"] or ".." in match["repo"] or match["repo"].endswith(".git"):
        raise InputError(f"{name!r} is not an id of a model on the Hugging Face Hub", _HINT)
    for part in ("variant", "revision"):
        if match[part] is not None and not _WORD.fullmatch(match[part]):
            raise InputError(f"the {part} in {name!r} is not valid", _HINT)
    return HubId(match["repo"], match["variant"], match["revision"])
