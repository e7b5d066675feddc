"""Downloads files of a hub repository, resuming and checking them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

from ...errors import HubError
from ..manifest import FileDigest
from ..progress import ProgressDisplay
from ..user_text import format_bytes
from . import client as hub_client
from .local_store import Listing, RepoFile, Store, library_folder, models_root

_MIN_FREE_BYTES: Final = 64 << 20
"""Bytes that a download leaves free on the disk."""
_MAX_EMPTY_ATTEMPTS: Final = 2
"""Consecutive attempts that may bring no bytes; the library retries by itself too."""
_WAITING_REPORT_S: Final = 0.25
"""Seconds between two reports about the download of another."""
DownloadProgress: TypeAlias = Callable[[str, int, int], None]
"""Receives the name of what is downloaded, the bytes that are here, and the bytes in total."""


class PartialDownloads:
    """Downloads files of a repository to its folder of partial files, from which model folders are assembled.

    Args:
        store: the repository's local store; its lock is held.
        listing: the repository at one commit.
        progress: receives the bytes that are here and the bytes in total.
    """

    def __init__(self, store: Store, listing: Listing, progress: Callable[[int, int], None]) -> None:
        self.listing: Final = listing
        self._store = store
        self._progress = progress
        self._done: dict[str, tuple[Path, FileDigest]] = {}
        self._received = 0
        self._total = 0

    def get(self, paths: Iterable[str]) -> dict[str, tuple[Path, FileDigest]]:
        """Download files that are not here yet; return path on disk and digest by path in the repository."""
        wanted = list(dict.fromkeys(paths))
        missing = [path for path in wanted if path not in self._done]
        self.check_room(missing)
        self._total += sum(self.listing.files[path].bytes for path in missing)
        for path in missing:
            file = self.listing.files[path]
            self._done[path] = self._store.partial(file), self._complete(file)
        return {path: self._done[path] for path in wanted}

    def check_room(self, paths: Iterable[str]) -> None:
        """Check that the disk has room for files that are not here yet.

        Raises:
            HubError: it has not.
        """
        files = [self.listing.files[path] for path in paths if path not in self._done]
        needed = sum(file.bytes - min(file.bytes, _size(self._store.partial(file))) for file in files)
        self._store.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._store.folder).free - _MIN_FREE_BYTES
        if needed > max(free, 0):
            room = f"{models_root()} has room for {format_bytes(free)}"
            what = f"{self.listing.repo} needs {format_bytes(needed)} more, but {room}"
            raise HubError(what, "make room, or set HF_HOME to a folder on another disk")

    def _complete(self, file: RepoFile) -> FileDigest:
        """Copy or download a file, with a new connection after each failure as long as attempts bring bytes."""
        partial = self._store.partial(file)
        if _size(partial) != file.bytes and not self._copied(file, partial):
            if hub_client.is_offline():
                raise HubError(
                    f"{file.path} of {self.listing.repo} is not downloaded, and edge-run is offline",
                    f"run edge-run pull {self.listing.repo} with a connection first",
                )
            self._count(_size(partial))
            empty_attempts = 0
            while True:
                before = _size(partial)
                self._count(0)  # what the receiver of progress raises ends the download between two attempts too
                try:
                    hub_client.download(self.listing, file, partial, self._count)
                    break
                except hub_client.ConnectionFailedError:
                    empty_attempts = 0 if _size(partial) > before else empty_attempts + 1
                    if empty_attempts == _MAX_EMPTY_ATTEMPTS:
                        raise
        else:
            self._count(file.bytes)
        return hub_client.check_download(self.listing, file, partial)

    def _copied(self, file: RepoFile, partial: Path) -> bool:
        """Copy the file from another commit or variant, or from the hub library's cache; return whether it was there.

        Files are not linked: see `local_store`.
        """
        candidates = [
            model.folder / name
            for model in self._store.all_downloaded()
            for name, digest in model.files.items()
            if file.sha256 is not None and digest == FileDigest(file.bytes, file.sha256)
        ]
        candidates.append(library_folder(self.listing.repo) / "snapshots" / self.listing.commit / file.path)
        for path in candidates:
            if _size(path) == file.bytes:
                partial.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, partial)
                return True
        return False

    def _count(self, count: int) -> None:
        self._received += count
        self._progress(self._received, self._total)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextmanager
def locked_for_download(
    store: Store, listing: Listing, progress: DownloadProgress | None
) -> Iterator[DownloadProgress]:
    """Lock a repository and yield what receives the progress; see `fetch_model`.

    While another thread or process downloads files of the repository, the progress is that of these files.
    """

    def waiting() -> None:
        files = [file for file in listing.files.values() if store.partial(file).is_file()]
        here = sum(_size(store.partial(file)) for file in files)
        report(listing.repo, here, sum(file.bytes for file in files))
        time.sleep(_WAITING_REPORT_S)

    with disk_errors_explained(), ProgressDisplay() as display:
        report = progress or display.show_bytes
        with store.locked(waiting):
            yield report


@contextmanager
def disk_errors_explained() -> Iterator[None]:
    """Convert errors of the disk to `HubError`."""
    try:
        yield
    except OSError as error:
        raise HubError(
            f"{error.filename or models_root()} cannot be written: {error.strerror or error}",
            "check the disk, or set HF_HOME to another folder",
        ) from error
