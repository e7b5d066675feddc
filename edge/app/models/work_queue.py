"""Work of the app in the background: its states, how it ends, and a queue of it for one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final, Generic, TypeVar

from ....errors import CancelledError, EdgeError
from ...server.json_endpoint import not_found
from ..app_context import EventChannel

_log: Final = logging.getLogger(__name__)


class WorkState(StrEnum):
    """How far some work is."""

    QUEUED = "queued"
    LOADING = "loading"
    DOWNLOADING = "downloading"
    MEASURING = "measuring"
    CHOOSING = "choosing"
    """Plans of an export were measured, and one has to be chosen."""
    EXPORTING = "exporting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    FAILED = "failed"
    DONE = "done"


ENDED: Final = frozenset((WorkState.DONE, WorkState.FAILED, WorkState.CANCELLED))


def outcome(what: str, work: Callable[[], object]) -> tuple[WorkState, str]:
    """Do some work, and return how it ended and why it failed: the page must not wait for ever, whatever happens.

    Args:
        what: what the work is called, such as `the export`.
        work: does it.
    """
    try:
        work()
    except CancelledError:
        return WorkState.CANCELLED, ""
    except EdgeError as error:
        return WorkState.FAILED, str(error)
    except Exception as error:  # noqa: BLE001  what it is goes to the log
        _log.error("%s failed: %s", what, type(error).__name__, exc_info=error)
        return WorkState.FAILED, f"{what} failed: {type(error).__name__}"
    return WorkState.DONE, ""


class QueuedWork:
    """A piece of work; the lock of its queue guards it."""

    key: str
    state: WorkState

    def as_object(self) -> dict[str, Any]:
        """The work as a JSON object."""
        raise NotImplementedError


_Work = TypeVar("_Work", bound=QueuedWork)


class WorkQueue(Generic[_Work]):
    """Pieces of work, of which a thread does one at a time.

    Args:
        what: what a piece is called, such as `export`.
        field: name of a piece in events and responses.
        events: told of one that has changed, or one with a state of `removed`, and of a model that has arrived.
    """

    def __init__(self, what: str, field: str, events: EventChannel) -> None:
        self._what: Final = what
        self._field: Final = field
        self._events: Final = events
        self._changed: Final = threading.Condition()
        self._items: Final[dict[str, _Work]] = {}
        self._thread: threading.Thread | None = None
        self._closed = False

    def list(self) -> dict[str, Any]:
        """All work, in the order in which it was added."""
        with self._changed:
            return {f"{self._field}s": [each.as_object() for each in self._items.values()]}

    def _begin(self, work: _Work) -> None:
        """Set the state of a piece that is worked on from now on; the lock is held."""
        raise NotImplementedError

    def _do(self, work: _Work) -> None:
        """Do a piece of work to its end."""
        raise NotImplementedError

    def _close(self) -> threading.Thread | None:
        """Begin nothing more; returns the thread, which ends with the piece that it works on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return self._thread

    def _wake(self) -> None:
        """Let the thread look for work; the lock is held."""
        self._changed.notify_all()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name=f"edge-run {self._what}s", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        def next_work() -> _Work | None:
            return next((each for each in self._items.values() if each.state is WorkState.QUEUED), None)

        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or next_work() is not None)
                if self._closed or (work := next_work()) is None:
                    return
                self._begin(work)
            self._do(work)

    def _told(self, work: _Work, state: str | None = None) -> dict[str, Any]:
        """Tell the page of a piece, in its state or another; the lock is held."""
        shown = {self._field: {**work.as_object(), **({} if state is None else {"state": state})}}
        self._events.publish(self._what, **shown)
        return shown

    def _of(self, key: str) -> _Work:
        """The piece with a key; the lock is held.

        Raises:
            RefusedError: there is none.
        """
        if key not in self._items:
            raise not_found(f"this {self._what} is no longer in the list", "reload the page")
        return self._items[key]
