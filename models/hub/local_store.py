"""Where models from the Hugging Face Hub lie on this machine, and what is known about them.

    HF_HOME/assets/edge-run/models/org--name/
        refs/main             the commit that a branch or tag stood at when it was last asked for
        partial/              files that are not yet whole, or not yet in their folder
        <commit>/files.json   every file of the repository at that commit
        <commit>/<graph>/     a model folder: one graph, its weights, tokenizer and configuration, and hub.json

A model folder holds plain files. The hub library's own cache would not do: there a model is a folder of links into a
folder of blobs, and those perhaps again links into a store for all models. ONNX Runtime 1.24.1 refuses weights behind
such links, later releases take them only if graph and weights end up in one folder, and the onnx package refuses links
of either kind, hard ones too (docs/decisions/0012-models-from-the-hub.md). The assets folder beside it is the one the
library gives to other programs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final
from urllib.parse import quote

from ...errors import BundleError, HubError
from ..atomic import folder_written_atomically, write_atomically
from ..bundle import remember_verified, verify_file
from ..json_file import is_whole, read_json_object
from ..lock import locked
from ..manifest import FileDigest

RECORD_NAME: Final = "hub.json"
MAIN: Final = "main"
_LISTING_NAME: Final = "files.json"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
CHECKPOINT: Final = "."
"""What stands for a whole checkpoint where one file would be named."""
_FORMAT: Final = 1
_LOCK_NAME: Final = "lock"
_LONGEST_DOWNLOAD_S: Final = 24 * 3600.0
_REMOVAL_WAIT_S: Final = 1.0


@dataclass(frozen=True)
class RepoFile:
    """A file of a repository."""

    path: str
    """POSIX, from the repository's root."""
    bytes: int
    sha256: str | None
    """Hexadecimal, of the content; None for small files, which the hub keeps in git itself."""
    git_oid: str | None
    """Git's SHA-1 of the file (for a large one: of the pointer to it)."""


@dataclass(frozen=True)
class Listing:
    """A repository at one commit."""

    repo: str
    commit: str
    files: Mapping[str, RepoFile]
    """By path."""
    decoders: Mapping[str, str] = field(default_factory=dict)
    """Where several graphs lie with a `genai_config.json`: which of them it names, by folder."""


@dataclass(frozen=True)
class Downloaded:
    """A model folder that came from the hub."""

    folder: Path
    repo: str
    commit: str
    variant: str
    """What `org/name:variant` calls it; empty if the repository has one graph only."""
    source: str
    """The file of the repository that the folder was made for: a graph, a GGUF file, or `CHECKPOINT`."""
    files: Mapping[str, FileDigest]
    """By path from the folder."""

    @property
    def path(self) -> Path:
        """What is opened: a GGUF file, else the folder."""
        return self.folder / PurePosixPath(self.source).name if self.source.endswith(".gguf") else self.folder

    @property
    def id(self) -> str:
        """What to call it by, as long as its branch stands where it stood."""
        return self.name(self.repo, self.variant if self.source != CHECKPOINT else "")

    @staticmethod
    def name(repo: str, variant: str) -> str:
        """A repository and a variant in one."""
        return f"{repo}:{variant}" if variant else repo

    @property
    def bytes(self) -> int:
        """Size of all its files."""
        return sum(digest.bytes for digest in self.files.values())

    @property
    def last_used(self) -> float:
        """When it was last opened, in seconds since 1970."""
        return (self.folder / RECORD_NAME).stat().st_mtime

    def verify(self) -> None:
        """Check that its files are as they came, and note that it is used; large files are hashed once.

        Raises:
            BundleError: one is missing or damaged.
        """
        try:
            for name, digest in self.files.items():
                verify_file(self.folder / name, digest)
        except BundleError as error:
            raise BundleError(error.what, f"download it again: edge-run pull {self.id}") from error
        try:
            os.utime(self.folder / RECORD_NAME)
        except OSError:  # a cache that may only be read
            return


def models_root() -> Path:
    """The folder of all models from the hub; it may not exist yet."""
    given = os.environ.get("HF_ASSETS_CACHE") or os.environ.get("HUGGINGFACE_ASSETS_CACHE")
    return (_place(given) if given else hugging_face_home() / "assets") / "edge-run" / "models"


def hub_library_cache() -> Path:
    """Where the hub library and the programs that use it keep their downloads."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return _place(given) if given else hugging_face_home() / "hub"


def hugging_face_home() -> Path:
    """`HF_HOME`, with the library's default."""
    given = os.environ.get("HF_HOME")
    return _place(given) if given else _place(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"


def _place(text: str) -> Path:
    return Path(os.path.expandvars(os.path.expanduser(text)))


def is_safe_path(path: str) -> bool:
    """Whether a repository's path stays inside the folder it is put in, on every system."""
    windows = PureWindowsPath(path)
    inside = not (windows.drive or windows.root or "\\" in path or ":" in path or "\0" in path)
    return bool(path) and inside and ".." not in windows.parts


class Store:
    """What is on disk of one repository."""

    def __init__(self, repo: str) -> None:
        self.repo: Final = repo
        self.folder: Final = models_root() / repo.replace("/", "--")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from downloading the same repository."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / _LOCK_NAME, _LONGEST_DOWNLOAD_S):
            yield

    def commit_of(self, revision: str | None) -> str | None:
        """The commit that a revision stood at when it was last asked for."""
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        try:
            commit = self._ref(revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return None
        return commit if _COMMIT.fullmatch(commit) else None

    def listing(self, commit: str) -> Listing | None:
        """The repository's files at a commit, if they were once asked for."""
        path = self.folder / commit / _LISTING_NAME
        if not path.is_file():
            return None
        try:
            data = read_json_object(path, BundleError, "")
            files = [RepoFile(name, each["bytes"], each["sha256"], each["git"]) for name, each in data["files"].items()]
            return replace(listing_of(self.repo, commit, files), decoders=dict(data["decoders"]))
        except (BundleError, LookupError, TypeError, ValueError, AttributeError):
            return None  # it can be asked for again

    def keep_listing(self, listing: Listing, revision: str | None) -> None:
        """Keep a listing, and that `revision` stands at its commit."""
        files = {
            file.path: {"bytes": file.bytes, "sha256": file.sha256, "git": file.git_oid}
            for file in listing.files.values()
        }
        data = {"format": _FORMAT, "id": self.repo, "decoders": dict(listing.decoders), "files": files}
        write_atomically(self.folder / listing.commit / _LISTING_NAME, json.dumps(data, indent=1).encode())
        if revision != listing.commit:
            write_atomically(self._ref(revision), listing.commit.encode())

    def partial(self, file: RepoFile) -> Path:
        """Where a file is put together: by its content's digest, so that a new commit goes on with it."""
        return self.folder / "partial" / (file.sha256 or file.git_oid or quote(file.path, safe=""))

    def downloaded(self, commit: str, source: str) -> Downloaded | None:
        """The model folder made for a file of the repository (or for `CHECKPOINT`) at a commit, if it is there."""
        return read_downloaded(self._model_folder(commit, source))

    def assemble(
        self, commit: str, source: str, variant: str, files: Mapping[str, tuple[Path, FileDigest]]
    ) -> Downloaded:
        """Move files, by their path in the model folder, from where they were put together to their model folder.

        Args:
            commit: of the repository.
            source: see `Downloaded`.
            variant: see `Downloaded`.
            files: each with what it was found to be.
        """
        folder = self._model_folder(commit, source)
        digests = {name: digest for name, (_, digest) in files.items()}
        record = {
            "format": _FORMAT,
            "id": self.repo,
            "commit": commit,
            "variant": variant,
            "source": source,
            "files": {name: vars(digest) for name, digest in digests.items()},
        }
        with folder_written_atomically(folder, lambda _: True) as staging:
            paths = [path for path, _ in files.values()]
            for name, (path, _) in files.items():
                (staging / name).parent.mkdir(parents=True, exist_ok=True)
                # A draft beside its model has the same tokenizer, which is downloaded once.
                put = shutil.copyfile if paths.count(path) > 1 else os.replace
                put(path, staging / name)
            (staging / RECORD_NAME).write_text(json.dumps(record, indent=1), encoding="utf-8")
        for name, (path, digest) in files.items():
            path.unlink(missing_ok=True)
            remember_verified(folder / name, digest)
        return Downloaded(folder, self.repo, commit, variant, source, digests)

    def all_downloaded(self) -> list[Downloaded]:
        """Every model folder of the repository."""
        folders = sorted(self.folder.glob(f"*/[!.]*/{RECORD_NAME}"))
        return [found for record in folders if (found := read_downloaded(record.parent)) is not None]

    def unfinished_bytes(self) -> int:
        """Size of what was downloaded in part."""
        return sum(path.stat().st_size for path in self.folder.glob("partial/*") if path.is_file())

    def remove(self, models: Iterable[Downloaded] | None = None) -> int:
        """Remove some model folders of the repository, or everything of it; returns the bytes freed.

        Nothing outside the repository's folder is touched; a link in it is removed, not what it leads to.

        Raises:
            HubError: the disk refused, or another process is downloading.
        """
        before = self._size()
        try:
            if self.folder.is_symlink():
                self.folder.unlink()
                return 0
            with locked(self.folder / _LOCK_NAME, _REMOVAL_WAIT_S):
                for path in [entry for entry in self.folder.iterdir() if models is None and entry.name != _LOCK_NAME]:
                    _remove(path)
                for model in models or ():
                    if self.folder.resolve() in model.folder.resolve().parents:
                        _remove(model.folder)
            if models is None:
                _remove(self.folder)
        except TimeoutError as error:
            raise HubError(f"{self.repo} is being downloaded by another process", "wait until it is done") from error
        except OSError as error:
            what = f"{error.filename or self.folder} cannot be removed: {error.strerror or error}"
            raise HubError(what, "check its permissions") from error
        return before - self._size()

    def _size(self) -> int:
        paths = self.folder.rglob("*") if self.folder.is_dir() else ()
        return sum(path.lstat().st_size for path in paths if path.is_file() and not path.is_symlink())

    def _ref(self, revision: str | None) -> Path:
        return self.folder / "refs" / quote(revision or MAIN, safe="")

    def _model_folder(self, commit: str, source: str) -> Path:
        name = "checkpoint" if source == CHECKPOINT else str(PurePosixPath(source).with_suffix("")).replace("/", "--")
        return self.folder / commit / name


def stores() -> list[Store]:
    """Every repository of which something is on disk."""
    folders = models_root().glob("*--*")
    return [Store(folder.name.replace("--", "/", 1)) for folder in sorted(folders) if folder.is_dir()]


def listing_of(repo: str, commit: str, files: Iterable[RepoFile]) -> Listing:
    """A listing without the files whose names or sizes cannot be."""
    return Listing(
        repo, commit, {file.path: file for file in files if is_safe_path(file.path) and is_whole(file.bytes, 0)}
    )


def read_downloaded(folder: Path) -> Downloaded | None:
    """What a model folder's record says, or None if there is no sound one."""
    path = folder / RECORD_NAME
    if not path.is_file():
        return None
    try:
        data: dict[str, Any] = read_json_object(path, BundleError, "")
        files = {name: FileDigest(each["bytes"], each["sha256"]) for name, each in data["files"].items()}
        repo, commit, variant, source = (data[name] for name in ("id", "commit", "variant", "source"))
    except (BundleError, LookupError, TypeError, AttributeError):
        return None
    if not all(isinstance(text, str) for text in (repo, commit, variant, source)) or not all(map(is_safe_path, files)):
        return None
    return Downloaded(folder, repo, commit, variant, source, files)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def in_bytes(count: int) -> str:
    """A number of bytes for people: 12 kB, 3.4 MB, 5.6 GB."""
    for linear, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {linear}" if count < 1000 * size else f"{count // size} {linear}"
    return f"{max(count, 0)} bytes"
