"""Files on their way from the Hugging Face Hub to a model folder: got, checked, and kept where a later try goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ...errors import HubError
from ..manifest import FileDigest
from . import client as hub_client
from .local_store import Listing, RepoFile, Store, hub_library_cache, in_bytes, models_root

_ROOM_LEFT: Final = 64 << 20
"""Bytes that a download leaves free on the disk."""
_BARREN_TRIES: Final = 2
"""How often in a row a connection may bring nothing; the library tries by itself too."""


class Parts:
    """Gathers files of a repository, each complete and checked, where they wait for their model folder."""

    def __init__(self, store: Store, listing: Listing, progress: Callable[[int, int], None]) -> None:
        self.listing: Final = listing
        self._store = store
        self._progress = progress
        self._done: dict[str, tuple[Path, FileDigest]] = {}
        self._here = 0
        self._todo = 0

    def get(self, paths: Iterable[str]) -> dict[str, tuple[Path, FileDigest]]:
        """Files by their path in the repository: where each lies now, and its digest."""
        wanted = list(dict.fromkeys(paths))
        missing = [path for path in wanted if path not in self._done]
        self.require_room(missing)
        self._todo += sum(self.listing.files[path].bytes for path in missing)
        for path in missing:
            file = self.listing.files[path]
            self._done[path] = self._store.partial(file), self._complete(file)
        return {path: self._done[path] for path in wanted}

    def require_room(self, paths: Iterable[str]) -> None:
        """Check that the disk takes what is still to come.

        Raises:
            HubError: it does not.
        """
        files = [self.listing.files[path] for path in paths if path not in self._done]
        needed = sum(file.bytes - min(file.bytes, _size(self._store.partial(file))) for file in files)
        self._store.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._store.folder).free - _ROOM_LEFT
        if needed > max(free, 0):
            what = (
                f"{self.listing.repo} takes {in_bytes(needed)} more, and {models_root()} has room for {in_bytes(free)}"
            )
            raise HubError(what, "make room, or set HF_HOME to a folder on another disk")

    def _complete(self, file: RepoFile) -> FileDigest:
        partial = self._store.partial(file)
        if _size(partial) != file.bytes and not self._copied(file, partial):
            if hub_client.is_offline():
                raise HubError(
                    f"{file.path} of {self.listing.repo} is not downloaded, and the hub may not be asked (offline)",
                    f"run edge-run pull {self.listing.repo} with a connection first",
                )
            self._came(_size(partial))
            self._download(file, partial)
        else:
            self._came(file.bytes)
        return hub_client.check_download(self.listing, file, partial)

    def _download(self, file: RepoFile, partial: Path) -> None:
        """Download a file, taking a connection that ends up again as long as that brings something."""
        barren = 0
        while True:
            before = _size(partial)
            try:
                hub_client.download(self.listing, file, partial, self._came)
            except hub_client.BrokenOffError:
                barren = 0 if _size(partial) > before else barren + 1
                if barren == _BARREN_TRIES:
                    raise
            else:
                return

    def _copied(self, file: RepoFile, partial: Path) -> bool:
        """Whether the file was on this disk: of another commit or variant, or in the hub library's cache.

        It is copied and not linked: see `hub_store`.
        """
        same = [
            model.folder / name
            for model in self._store.all_downloaded()
            for name, digest in model.files.items()
            if file.sha256 is not None and digest == FileDigest(file.bytes, file.sha256)
        ]
        cache = hub_library_cache() / f"models--{self.listing.repo.replace('/', '--')}"
        same.append(cache / "snapshots" / self.listing.commit / file.path)
        for path in same:
            if _size(path) == file.bytes:
                partial.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, partial)
                return True
        return False

    def _came(self, count: int) -> None:
        self._here += count
        self._progress(self._here, self._todo)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextmanager
def disk_told() -> Iterator[None]:
    """Turn the disk's refusals into one line."""
    try:
        yield
    except OSError as error:
        raise HubError(
            f"{error.filename or models_root()} cannot be written: {error.strerror or error}",
            "check the disk, or set HF_HOME to another folder",
        ) from error
