"""Downloads from the hub for the app: one at a time, with pause, resume and cancel.

A download is the work of the queue's thread. Pausing and cancelling set a flag that the thread finds at its next report
of progress, so nothing is cut off in the middle of a write, and partial files stay whole. On a connection without data
that takes up to the hub library's timeout. The page need not wait for it: the download counts as paused at once, a
paused one that is resumed meanwhile simply goes on, and other downloads begin when the thread is free.

The list is kept in the store's settings: after a restart, what was unfinished is paused.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ....errors import EdgeError, InputError
from ....models.graph_variant import DeviceKind
from ....models.hub.client import ConnectionFailedError, require_online
from ....models.hub.downloaded_model import HubId, parse_hub_id
from ....models.hub.fetch import fetch_model
from ....models.hub.local_store import Store, stores
from ..api_endpoint import not_found
from .model_catalog import SettingsStore

_log: Final = logging.getLogger(__name__)
_SETTING: Final = "downloads"
_MAX_DOWNLOADS: Final = 50
_REPORT_S: Final = 0.25
"""Least seconds between two events about the progress of a download."""
_RATE_S: Final = 8.0
"""Seconds over which the rate is averaged."""
_OFFLINE: Final = "edge-run cannot reach the hub"


class DownloadState(StrEnum):
    """How far a download is."""

    QUEUED = "queued"
    DOWNLOADING = "downloading"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"


class _StoppedError(Exception):
    """Ends a download that was paused or cancelled; the hub's code lets it through."""


@dataclass
class _Download:
    """A download; the queue's lock guards it."""

    key: str
    id: HubId
    state: DownloadState = DownloadState.PAUSED
    received: int = 0
    total: int = 0
    error: str = ""
    model: str = ""
    """Id of the model that it became."""
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    """Times and received bytes of the last seconds."""

    def rate(self) -> float | None:
        """Bytes per second over the last seconds; None where there is too little to say."""
        if self.state is not DownloadState.DOWNLOADING or len(self.samples) < 2:
            return None
        (begin, first), (end, last) = self.samples[0], self.samples[-1]
        return max(0.0, (last - first) / (end - begin)) if end > begin else None

    def as_object(self) -> dict[str, Any]:
        """The download as a JSON object."""
        rate = self.rate()
        left = None if not rate else (self.total - self.received) / rate
        return {
            "key": self.key,
            "id": str(self.id),
            "state": self.state.value,
            "received": self.received,
            "total": self.total,
            "bytes_per_second": rate,
            "seconds_left": left,
            "error": self.error,
            "model": self.model,
        }


class DownloadQueue:
    """The downloads of the app.

    Args:
        store: keeps the list between runs.
        kind: kind of device that models run on; decides the variant where an id names none.
        publish: called with the JSON object of a download that has changed, or one with a state of `removed`.
        finished: called when a model has arrived.
    """

    def __init__(
        self,
        store: SettingsStore,
        kind: DeviceKind,
        publish: Callable[[dict[str, Any]], None],
        finished: Callable[[], None],
    ) -> None:
        self._store: Final = store
        self._kind: Final = kind
        self._publish: Final = publish
        self._finished: Final = finished
        self._changed: Final = threading.Condition()
        self._downloads: Final[dict[str, _Download]] = {each.key: each for each in self._restored()}
        self._current: _Download | None = None
        """The download that the thread works on, also while it is ending one that was paused or cancelled."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def objects(self) -> list[dict[str, Any]]:
        """All downloads as JSON objects, in the order in which they were added."""
        with self._changed:
            return [each.as_object() for each in self._downloads.values()]

    def add(self, name: str) -> dict[str, Any]:
        """Queue the download of a model; one that is in the list already is resumed.

        Args:
            name: `org/name[:variant][@revision]`.

        Raises:
            InputError: it is not an id, or too many downloads wait.
            OfflineError: edge-run is offline.
        """
        id_ = parse_hub_id(name.strip().removeprefix("https://huggingface.co/").strip("/"))
        require_online()
        with self._changed:
            known = next((each for each in self._downloads.values() if each.id == id_), None)
            if known is None:
                self._forget_ended()
                if len(self._downloads) >= _MAX_DOWNLOADS:
                    raise InputError(f"{len(self._downloads)} downloads are in the list", "cancel some of them first")
                known = _Download(secrets.token_hex(8), id_)
                self._downloads[known.key] = known
            self._enqueue(known)
            return known.as_object()

    def pause(self, key: str) -> dict[str, Any]:
        """Stop a download and keep its partial files.

        Raises:
            RefusedError: there is no such download.
        """
        with self._changed:
            download = self._of(key)
            if download.state in {DownloadState.QUEUED, DownloadState.DOWNLOADING}:
                self._set(download, DownloadState.PAUSED)
            return download.as_object()

    def resume(self, key: str) -> dict[str, Any]:
        """Continue a download that was paused or has failed.

        Raises:
            RefusedError: there is no such download.
        """
        with self._changed:
            download = self._of(key)
            self._enqueue(download)
            return download.as_object()

    def cancel(self, key: str) -> dict[str, Any]:
        """Take a download off the list and remove its partial files; of one that is done only the entry.

        Raises:
            RefusedError: there is no such download.
            HubError: the disk refused to remove the files.
        """
        with self._changed:
            download = self._of(key)
            del self._downloads[key]
            self._save()
            running = download is self._current
            removed = {**download.as_object(), "state": "removed"}
            done = download.state is DownloadState.DONE
        if not running and not done:
            self._remove_partial(download)
        self._publish(removed)
        return removed

    def close(self) -> None:
        """End the download in progress, which is paused when the app starts again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=1.0)

    def _enqueue(self, download: _Download) -> None:
        if download.state in {DownloadState.QUEUED, DownloadState.DOWNLOADING}:
            return
        download.error = ""
        # The thread may not have noticed that it was paused; then it goes on.
        running = download is self._current
        self._set(download, DownloadState.DOWNLOADING if running else DownloadState.QUEUED)
        self._start()

    def _start(self) -> None:
        self._changed.notify_all()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="edge-run downloads", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                while (download := self._next()) is None and not self._closed:
                    self._changed.wait()
                if download is None or self._closed:
                    return
                self._current = download
                download.samples.clear()
                self._set(download, DownloadState.DOWNLOADING)
            self._download(download)

    def _next(self) -> _Download | None:
        waiting = (each for each in self._downloads.values() if each.state is DownloadState.QUEUED)
        return next(waiting, None)

    def _download(self, download: _Download) -> None:
        reported = 0.0

        def progress(_name: str, received: int, total: int) -> None:
            nonlocal reported
            now = time.monotonic()
            with self._changed:
                self._check_wanted(download)
                download.received, download.total = received, total
                download.samples.append((now, received))
                while now - download.samples[0][0] > _RATE_S:
                    download.samples.popleft()
                due = now - reported >= _REPORT_S or received == total
                shown = download.as_object()
            if due:
                reported = now
                self._publish(shown)

        try:
            found = fetch_model(download.id, self._kind, newest=True, progress=progress)
        except _StoppedError:
            outcome, error = DownloadState.PAUSED, ""
        except ConnectionFailedError as failure:
            outcome, error = DownloadState.FAILED, f"{_OFFLINE}: {failure.what}; resume the download when it can"
        except EdgeError as failure:
            outcome, error = DownloadState.FAILED, str(failure)
        except Exception as failure:  # noqa: BLE001  the thread must go on, and the page must not wait for ever
            _log.error("a download failed: %s", type(failure).__name__, exc_info=failure)
            outcome, error = DownloadState.FAILED, f"the download failed: {type(failure).__name__}"
        else:
            outcome, error = DownloadState.DONE, ""
            download.model, download.received = found.id, download.total
        with self._changed:
            self._current = None
            cancelled = download.key not in self._downloads
            if outcome is not DownloadState.PAUSED or download.state is DownloadState.DOWNLOADING:
                # Resumed after it had noticed the pause: once more.
                outcome = DownloadState.QUEUED if outcome is DownloadState.PAUSED else outcome
                download.error = error
                self._set(download, outcome)
        if cancelled and outcome is not DownloadState.DONE:
            self._remove_partial(download)
        if outcome is DownloadState.DONE:
            self._finished()

    def _check_wanted(self, download: _Download) -> None:
        if self._closed or download.key not in self._downloads or download.state is DownloadState.PAUSED:
            raise _StoppedError

    def _remove_partial(self, download: _Download) -> None:
        """Remove partial files, unless another download of the repository may need them."""
        with self._changed:
            others = [each for each in self._downloads.values() if each.id.repo == download.id.repo]
        if not others:
            Store(download.id.repo).remove_unfinished()

    def _of(self, key: str) -> _Download:
        if key not in self._downloads:
            raise not_found("this download is no longer in the list", "reload the page")
        return self._downloads[key]

    def _set(self, download: _Download, state: DownloadState) -> None:
        """Change the state of a download that is still in the list, keep it, and tell the page; the lock is held."""
        if download.key not in self._downloads:
            return
        download.state = state
        self._save()
        self._publish(download.as_object())

    def _forget_ended(self) -> None:
        for key in [key for key, each in self._downloads.items() if each.state is DownloadState.DONE]:
            del self._downloads[key]

    def _save(self) -> None:
        kept = [
            {"key": each.key, "id": str(each.id), "received": each.received, "total": each.total}
            for each in self._downloads.values()
            if each.state is not DownloadState.DONE
        ]
        self._store.set_setting(_SETTING, kept)

    def _restored(self) -> list[_Download]:
        """What an earlier run left unfinished, and partial files of downloads by other commands."""
        found: list[_Download] = []
        stored = self._store.setting(_SETTING, [])
        for each in stored if isinstance(stored, list) else []:
            try:
                found.append(_restored_download(each))
            except (EdgeError, LookupError, TypeError, ValueError):
                continue  # of another version
        known = {each.id.repo for each in found}
        for store in stores():
            if store.repo not in known and (received := store.unfinished_bytes()):
                key = secrets.token_hex(8)
                found.append(_Download(key, HubId(store.repo), received=received))
        return found[:_MAX_DOWNLOADS]


def _restored_download(stored: Mapping[str, Any]) -> _Download:
    id_ = parse_hub_id(str(stored["id"]))
    received, total = int(stored["received"]), int(stored["total"])
    return _Download(str(stored["key"]), id_, received=received, total=total)
