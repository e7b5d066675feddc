"""Stores models from the Hugging Face Hub on this machine.

    HF_HOME/assets/edge-run/models/org--name/
        refs/main             the commit that a branch or tag referred to at the last request
        partial/              files that are incomplete, or not yet in their folder
        <commit>/files.json   every file of the repository at that commit; 12 digits of the commit
        <commit>/<graph>/     a model folder: one graph, its weights, tokenizer and configuration, and hub.json

Long names are shortened (`short_name`), because a path on Windows has at most 259 characters. A repository's folder
with a shortened name holds the id in a file.

A model folder holds plain files. In the hub library's cache a model is a folder of links to blobs, which may be links
to a store of all models. ONNX Runtime 1.24.1 refuses weights behind such links, later releases accept them only if
graph and weights end up in one folder, and the onnx package refuses symbolic and hard links
(docs/decisions/0012-models-from-the-hub.md and 0028-hub-store.md). The library offers its assets folder to other
programs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import quote

from ...errors import BundleError, HubError
from ..atomic import folder_written_atomically, write_atomically
from ..bundle import mark_verified
from ..file_system import locked, move, remove
from ..json_file import WholeNumber, read_json_object, record_from_json
from ..manifest import FileDigest
from ..regular_file import MAX_JSON_BYTES, read_regular
from .downloaded_model import CHECKPOINT, RECORD_NAME, DownloadedModel, is_safe_path, read_downloaded

MAIN: Final = "main"
_LISTING_NAME: Final = "files.json"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LOCK_NAME: Final = "lock"
_ID_NAME: Final = "id"
"""File with the id of the repository, where the folder's name is a shortened one."""
_REPO_CHARS: Final = 56
_COMMIT_CHARS: Final = 12
_MODEL_CHARS: Final = 32
_REF_CHARS: Final = 40
_PARTIAL_CHARS: Final = 64
_HASH_CHARS: Final = 12
_SHORTENED: Final = "~"
_MAX_DOWNLOAD_S: Final = 24 * 3600.0
_REMOVAL_WAIT_S: Final = 1.0


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository."""

    path: str
    """POSIX path relative to the repository's root."""
    bytes: WholeNumber
    sha256: str | None
    """SHA-256 of the content (hexadecimal); None for small files, which the hub stores in git."""
    git_oid: str | None
    """Git object id of the file, or for a large file of the pointer to it."""

    def __post_init__(self) -> None:
        digests = filter(None, (self.sha256, self.git_oid))
        if not is_safe_path(self.path) or not all(map(_DIGEST.fullmatch, digests)):
            raise ValueError("has an unsafe path, or a digest that is none")


@dataclass(frozen=True)
class Listing:
    """A repository at one commit."""

    repo: str
    commit: str
    files: Mapping[str, RepoFile]
    """File by path."""
    decoders: Mapping[str, str] = field(default_factory=dict)
    """File name of the decoder's graph by folder, where a `genai_config.json` has several graphs beside it."""


def models_root() -> Path:
    """Return the folder of all models from the hub, which may not exist."""
    given = os.environ.get("HF_ASSETS_CACHE") or os.environ.get("HUGGINGFACE_ASSETS_CACHE")
    return (_expanded(given) if given else hugging_face_home() / "assets") / "edge-run" / "models"


def library_folder(repo: str) -> Path:
    """Return the folder of a repository in the hub library's own cache, which may not exist."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return (_expanded(given) if given else hugging_face_home() / "hub") / f"models--{repo.replace('/', '--')}"


def hugging_face_home() -> Path:
    """Return `HF_HOME`, or the library's default."""
    given = os.environ.get("HF_HOME")
    return _expanded(given) if given else _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(text)))


class Store:
    """The files of one repository on this machine."""

    def __init__(self, repo: str) -> None:
        self.repo: Final = repo
        self.folder: Final = models_root() / short_name(repo.replace("/", "--"), _REPO_CHARS)

    @contextmanager
    def locked(self, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Lock the repository against others that download or remove it, in this process too.

        Args:
            waiting: called now and then while another holds the lock; what it raises ends the waiting.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / _LOCK_NAME, _MAX_DOWNLOAD_S, waiting=waiting):
            self._record_id()
            yield

    def commit_of(self, revision: str | None) -> str | None:
        """Return the commit that a revision referred to at the last request; None if it was not requested."""
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        try:
            commit = read_regular(self._ref(revision), MAX_JSON_BYTES).decode("ascii").strip()
        except (OSError, ValueError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def listing(self, commit: str) -> Listing | None:
        """Return the stored list of the repository's files at a commit; None if there is none."""
        with suppress(BundleError, ValueError):  # it can be requested again
            return record_from_json(Listing, read_json_object(self._listing_file(commit), BundleError, ""))
        return None

    def save_listing(self, listing: Listing, revision: str | None) -> None:
        """Store a listing, and that `revision` refers to its commit."""
        self._record_id()
        write_atomically(self._listing_file(listing.commit), json.dumps(asdict(listing), indent=1).encode())
        if revision != listing.commit:
            write_atomically(self._ref(revision), listing.commit.encode())

    def partial(self, file: RepoFile) -> Path:
        """Return the path of a partial file: named by its digest, so that a download for another commit resumes it."""
        name = file.sha256 or file.git_oid or short_name(quote(file.path, safe=""), _PARTIAL_CHARS)
        return self.folder / "partial" / name

    def downloaded(self, commit: str, source: str) -> DownloadedModel | None:
        """Return the model folder for a `source` of the repository at a commit, if it exists."""
        found = read_downloaded(self._model_folder(commit, source))
        return found if found is not None and (found.commit, found.source) == (commit, source) else None

    def assemble(
        self, commit: str, source: str, variant: str, files: Mapping[str, tuple[Path, FileDigest]]
    ) -> DownloadedModel:
        """Move complete files to a new model folder.

        Args:
            commit: commit of the repository.
            source: see `DownloadedModel`.
            variant: see `DownloadedModel`.
            files: present path and digest, by path in the model folder.
        """
        folder = self._model_folder(commit, source)
        digests = {name: digest for name, (_, digest) in files.items()}
        model = DownloadedModel(self.repo, commit, variant, source, digests, folder)
        with folder_written_atomically(folder, lambda _: True) as staging:
            paths = [path for path, _ in files.values()]
            for name, (path, _) in files.items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                # A draft inside its target's folder has the same tokenizer, which is downloaded once.
                place = shutil.copyfile if paths.count(path) > 1 else move
                place(path, staging / name)
            (staging / RECORD_NAME).write_text(json.dumps(model.record(), indent=1), encoding="utf-8")
        for name, (path, digest) in files.items():
            remove(path)
            mark_verified(folder / name, digest)
        return model

    def all_downloaded(self) -> list[DownloadedModel]:
        """List the model folders of the repository."""
        folders = sorted(self.folder.glob(f"*/[!.]*/{RECORD_NAME}"))
        return [found for record in folders if (found := read_downloaded(record.parent)) is not None]

    def unfinished_bytes(self) -> int:
        """Return the total size of partial files in bytes."""
        return sum(path.stat().st_size for path in self.folder.glob("partial/*") if path.is_file())

    def remove_unfinished(self) -> None:
        """Remove what downloads left unfinished, and everything else if no model is downloaded.

        Raises:
            HubError: as for `remove`.
        """
        if self.all_downloaded():
            with self._removing(), locked(self.folder / _LOCK_NAME, _REMOVAL_WAIT_S):
                remove(self.folder / "partial")
        elif self.folder.is_dir():
            self.remove()

    def remove(self, models: Iterable[DownloadedModel] | None = None) -> int:
        """Remove some model folders of the repository, or all its files; return the number of bytes freed.

        Nothing outside the repository's folder is removed; of a link only the link itself.

        Raises:
            HubError: the disk refused, or another process is downloading the repository.
        """
        before = self._size()
        with self._removing():
            if self.folder.is_symlink():
                self.folder.unlink()
                return 0
            with locked(self.folder / _LOCK_NAME, _REMOVAL_WAIT_S):
                for path in [entry for entry in self.folder.iterdir() if models is None and entry.name != _LOCK_NAME]:
                    remove(path)
                for model in models or ():
                    if self.folder.resolve() in model.folder.resolve().parents:
                        remove(model.folder)
            if models is None:
                remove(self.folder)
        return before - self._size()

    @contextmanager
    def _removing(self) -> Iterator[None]:
        """Convert errors of a removal to `HubError`."""
        try:
            yield
        except TimeoutError as error:
            raise HubError(f"{self.repo} is being downloaded by another process", "wait until it is done") from error
        except OSError as error:
            what = f"{error.filename or self.folder} cannot be removed: {error.strerror or error}"
            raise HubError(what, "check its permissions") from error

    def _size(self) -> int:
        paths = self.folder.rglob("*") if self.folder.is_dir() else ()
        return sum(path.lstat().st_size for path in paths if path.is_file() and not path.is_symlink())

    def _ref(self, revision: str | None) -> Path:
        return self.folder / "refs" / short_name(quote(revision or MAIN, safe=""), _REF_CHARS)

    def _listing_file(self, commit: str) -> Path:
        return self.folder / commit[:_COMMIT_CHARS] / _LISTING_NAME

    def _model_folder(self, commit: str, source: str) -> Path:
        name = "checkpoint" if source == CHECKPOINT else str(PurePosixPath(source).with_suffix("")).replace("/", "--")
        return self.folder / commit[:_COMMIT_CHARS] / short_name(name, _MODEL_CHARS)

    def _record_id(self) -> None:
        """Write the repository's id where the folder's name does not tell it."""
        record = self.folder / _ID_NAME
        if _SHORTENED in self.folder.name and not record.is_file():
            write_atomically(record, self.repo.encode())


def stores() -> list[Store]:
    """List the repositories that have files on this machine."""
    root = models_root()
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir()) if root.is_dir() else []
    return [Store(repo) for folder in folders if (repo := _repo_of(folder)) is not None]


def short_name(name: str, max_chars: int) -> str:
    """Shorten a name that is too long: its beginning, `~`, which no id contains, and 12 digits of its SHA-256."""
    if len(name) <= max_chars:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARS]
    return f"{name[: max_chars - _HASH_CHARS - 1]}{_SHORTENED}{digest}"


def _repo_of(folder: Path) -> str | None:
    """Id of the repository whose files a folder holds; None for another folder."""
    if _SHORTENED not in folder.name:
        return folder.name.replace("--", "/", 1) if "--" in folder.name else None
    try:
        repo = read_regular(folder / _ID_NAME, MAX_JSON_BYTES).decode("ascii")
    except (OSError, ValueError):
        return None
    return repo if short_name(repo.replace("/", "--"), _REPO_CHARS) == folder.name else None


def listing_of(repo: str, commit: str, files: Iterable[Mapping[str, Any]]) -> Listing:
    """Create a listing of files with the fields of `RepoFile`, without those that have unsafe or invalid values."""
    found = {}
    for each in files:
        with suppress(ValueError):
            found[each["path"]] = record_from_json(RepoFile, each)
    return Listing(repo, commit, found)
