"""Downloads of the app, one at a time.

A download is the work of a queue's thread. Pausing and cancelling set a flag that the thread finds at its next report
of progress, so nothing is cut off in the middle of a write, and partial files stay whole. On a connection without data
that takes up to the hub library's timeout. The page need not wait for it: the download counts as paused at once, and a
paused one that is resumed, like any other, begins when the thread is free.

The list is kept in the store's settings: after a restart, what was unfinished is paused.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from ....errors import CancelledError, EdgeError, InputError
from ....models.hub.client import ConnectionFailedError, require_online
from ....models.hub.downloaded_model import HubId, parse_hub_id
from ....models.hub.fetch import fetch_model
from ....models.hub.local_store import Store, stores
from ..app_context import AppContext
from .work_queue import QueuedWork, WorkQueue, WorkState, outcome

_SETTING: Final = "downloads"
_MAX_DOWNLOADS: Final = 50
_REPORT_S: Final = 0.25
"""Least seconds between two events about the progress of a download."""
_RATE_S: Final = 8.0
"""Seconds over which the rate is averaged."""
_OFFLINE: Final = "edge-run cannot reach the hub"


@dataclass
class _Download(QueuedWork):
    """A download."""

    key: str
    id: HubId
    state: WorkState = WorkState.PAUSED
    received: int = 0
    total: int = 0
    error: str = ""
    model: str = ""
    """Id of the model that it became."""
    samples: deque[tuple[float, int]] = field(default_factory=deque)
    """Times and received bytes of the last seconds."""

    def as_object(self) -> dict[str, Any]:
        """The download as a JSON object; the rate is None where there is too little to say."""
        rate = None
        if self.state is WorkState.DOWNLOADING and len(self.samples) > 1:
            (begin, first), (end, last) = self.samples[0], self.samples[-1]
            rate = max(0.0, (last - first) / (end - begin)) if end > begin else None
        names = ("key", "state", "received", "total", "error", "model")
        return {
            **{name: getattr(self, name) for name in names},
            "id": str(self.id),
            "bytes_per_second": rate,
            "seconds_left": (self.total - self.received) / rate if rate else None,
        }


class DownloadQueue(WorkQueue[_Download]):
    """The downloads of the app.

    Args:
        context: the store, which keeps the list between runs, the windows, and the kind of device that models run on,
            which decides the variant where an id names none.
    """

    def __init__(self, context: AppContext) -> None:
        super().__init__("download", "download", context.events)
        self._store: Final = context.store
        self._kind: Final = context.pool.kind
        # What an earlier run left unfinished, and partial files of downloads by other commands.
        found = [_Download(**{**each, "id": parse_hub_id(each["id"])}) for each in self._store.setting(_SETTING, [])]
        known = {each.id.repo for each in found}
        found += [
            _Download(secrets.token_hex(8), HubId(store.repo), received=received)
            for store in stores()
            if store.repo not in known and (received := store.unfinished_bytes())
        ]
        self._items.update({each.key: each for each in found[:_MAX_DOWNLOADS]})
        self._current: _Download | None = None
        """The download that the thread works on, also while it is ending one that was paused or cancelled."""

    def add(self, id: str) -> dict[str, Any]:  # noqa: A002  the name of the field
        """Queue the download of a model; one that is in the list already is resumed.

        Args:
            id: `org/name[:variant][@revision]`.

        Raises:
            InputError: it is not an id, or too many downloads wait.
            OfflineError: edge-run is offline.
        """
        id_ = parse_hub_id(id.strip().removeprefix("https://huggingface.co/").strip("/"))
        require_online()
        with self._changed:
            known = next((each for each in self._items.values() if each.id == id_), None)
            if known is None:
                for key in [key for key, each in self._items.items() if each.state is WorkState.DONE]:
                    del self._items[key]
                if len(self._items) >= _MAX_DOWNLOADS:
                    raise InputError(f"{len(self._items)} downloads are in the list", "cancel some of them first")
                known = _Download(secrets.token_hex(8), id_)
                self._items[known.key] = known
            self._enqueue(known)
            return {"download": known.as_object()}

    def pause(self, key: str) -> dict[str, Any]:
        """Stop a download and keep its partial files.

        Raises:
            RefusedError: there is no such download.
        """
        with self._changed:
            download = self._of(key)
            if download.state in {WorkState.QUEUED, WorkState.DOWNLOADING}:
                self._set(download, WorkState.PAUSED)
            return {"download": download.as_object()}

    def resume(self, key: str) -> dict[str, Any]:
        """Continue a download that was paused or has failed.

        Raises:
            RefusedError: there is no such download.
        """
        with self._changed:
            download = self._of(key)
            self._enqueue(download)
            return {"download": download.as_object()}

    def cancel(self, key: str) -> dict[str, Any]:
        """Take a download off the list and remove its partial files; of one that is done only the entry.

        Raises:
            RefusedError: there is no such download.
            HubError: the disk refused to remove the files.
        """
        with self._changed:
            download = self._of(key)
            del self._items[key]
            self._save()
            kept = download is self._current or download.state is WorkState.DONE
        if not kept:
            self._remove_partial(download)
        with self._changed:
            return self._told(download, "removed")

    def close(self) -> None:
        """End the download in progress, which is paused when the app starts again."""
        if (thread := self._close()) is not None:
            thread.join(timeout=1.0)

    def _enqueue(self, download: _Download) -> None:
        if download.state in {WorkState.QUEUED, WorkState.DOWNLOADING}:
            return
        download.error = ""
        self._set(download, WorkState.QUEUED)
        self._wake()

    def _begin(self, work: _Download) -> None:
        self._current = work
        work.samples.clear()
        self._set(work, WorkState.DOWNLOADING)

    def _do(self, work: _Download) -> None:
        reported = 0.0

        def progress(_name: str, received: int, total: int) -> None:
            """Keep how far the download is, and tell the page now and then."""
            nonlocal reported
            now = time.monotonic()
            with self._changed:
                if self._closed or work.key not in self._items or work.state is not WorkState.DOWNLOADING:
                    raise CancelledError("the download was stopped")  # the code of the hub lets it through
                work.received, work.total = received, total
                work.samples.append((now, received))
                while now - work.samples[0][0] > _RATE_S:
                    work.samples.popleft()
                if now - reported >= _REPORT_S or received == total:
                    reported = now
                    self._told(work)

        def fetch() -> None:
            try:
                work.model = fetch_model(work.id, self._kind, newest=True, progress=progress).id
                work.received = work.total
            except ConnectionFailedError as failure:
                raise EdgeError(f"{_OFFLINE}: {failure.what}", "resume the download when it can") from failure

        state, error = outcome("the download", fetch)
        with self._changed:
            self._current = None
            removed = work.key not in self._items
            if state is not WorkState.CANCELLED:  # else it is paused, or was resumed after that and is next in line
                work.error = error
                self._set(work, state)
        if state is WorkState.DONE:
            self._events.publish("models")
        elif removed:
            self._remove_partial(work)

    def _remove_partial(self, download: _Download) -> None:
        """Remove partial files, unless another download of the repository may need them."""
        with self._changed:
            others = [each for each in self._items.values() if each.id.repo == download.id.repo]
        if not others:
            Store(download.id.repo).remove_unfinished()

    def _set(self, download: _Download, state: WorkState) -> None:
        """Change the state of a download that is still in the list, keep it, and tell the page; the lock is held."""
        if download.key not in self._items:
            return
        download.state = state
        self._save()
        self._told(download)

    def _save(self) -> None:
        kept = [
            {"key": each.key, "id": str(each.id), "received": each.received, "total": each.total}
            for each in self._items.values()
            if each.state is not WorkState.DONE
        ]
        self._store.set_setting(_SETTING, kept)
