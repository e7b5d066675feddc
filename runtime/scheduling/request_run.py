"""One run of a request: its thread, its cancellation, and the items that it hands to whoever waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from contextvars import copy_context
from typing import Final, Generic, TypeVar

from ...errors import CancelledError
from .request_queue import QueuedStream

Item = TypeVar("Item")
_Stream = TypeVar("_Stream", bound=QueuedStream)


class Cancellation:
    """Whether a request was cancelled; `cancel` may be called from any thread, and wakes what waits for the request."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of Ctrl-C may cancel while this thread holds it
        self.cancelled = False
        """Whether `cancel` was called."""
        self._actions: dict[object, Callable[[], object]] = {}

    def cancel(self) -> None:
        """Cancel the request: the actions of `calling` run in this thread; calling it again does nothing."""
        with self._lock:
            first, self.cancelled = not self.cancelled, True
            actions = list(self._actions.values()) if first else []
        for action in actions:
            action()

    @contextmanager
    def calling(self, action: Callable[[], object]) -> Iterator[None]:
        """Call `action` if the request is cancelled within the block; at once if it is cancelled already.

        Args:
            action: takes no lock that the block holds when it begins; it may still run when the block has ended.
        """
        key = object()
        with self._lock:
            self._actions[key] = action
            cancelled = self.cancelled
        try:
            if cancelled:
                action()
            yield
        finally:
            with self._lock:
                self._actions.pop(key, None)

    @contextmanager
    def reading(self, stream: _Stream) -> Iterator[_Stream]:
        """Cancel `stream` with the request, after the current forward pass; close it when the block ends."""
        with closing(stream), self.calling(stream.cancel):
            yield stream

    def check(self) -> None:
        """Raise if the request was cancelled.

        Raises:
            CancelledError: it was.
        """
        if self.cancelled:
            raise CancelledError("the request was cancelled")


class LoopQueue(Generic[Item]):
    """Hands items of other threads to an event loop, on which it is made.

    Threads never wait for the event loop, which is woken once for all items that were added since it last looked.
    """

    def __init__(self) -> None:
        # Importing asyncio takes a tenth of the package's import time.
        import asyncio  # noqa: PLC0415

        self._loop: Final = asyncio.get_running_loop()
        self._changed: Final = asyncio.Event()
        self._lock: Final = threading.Lock()
        self._items: list[Item] = []
        self._ended = False
        self._error: BaseException | None = None

    def put(self, item: Item) -> bool:
        """Add an item; in any thread. Returns False if the loop is closed, and nobody takes items any more."""
        with self._lock:
            self._add(item)
            first = len(self._items) == 1
        # The event loop that was told of an earlier item takes this one along.
        if first:
            self._wake()
        return not self._loop.is_closed()

    def _add(self, item: Item) -> None:
        """Add an item; the lock is held."""
        self._items.append(item)

    def end(self, error: BaseException | None = None) -> None:
        """Let `take` return nothing, or raise an error, after the items that wait; in any thread."""
        self._error = error
        self._ended = True
        self._wake()

    async def take(self) -> list[Item]:
        """Wait for items and return all there are; none after the end.

        Raises:
            BaseException: the error of the end.
        """
        while True:
            # Read before the items: what is added before the end is found below.
            ended = self._ended
            with self._lock:
                items, self._items = self._items, []
            if items:
                return items
            if ended:
                # Not kept: the error's traceback holds this frame, and with it the queue and all that was read.
                error, self._error = self._error, None
                if error is None:
                    return []
                try:
                    raise error
                finally:
                    del error
            await self._changed.wait()
            self._changed.clear()

    def _wake(self) -> None:
        # The loop may have been closed meanwhile; then nobody waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)


class Run(Generic[Item]):
    """The work of one request in a thread of its own, which has the context variables of the caller.

    Args:
        work: called with this run in the thread. It hands items to `put`, and ends soon after a cancellation.
        name: name of the thread.
        sink: takes the items, and the end; None for work that makes none and raises nothing.
    """

    def __init__(self, work: Callable[[Run[Item]], object], name: str, sink: LoopQueue[Item] | None = None) -> None:
        self.cancellation: Final = Cancellation()
        """Ends the work after its current pass."""
        self._work: Final = work
        self._sink = sink
        self._thread: Final = threading.Thread(target=copy_context().run, args=(self.run,), name=name, daemon=True)
        self.ended = False
        """Whether the work is done."""

    def put(self, item: Item) -> None:
        """Hand over an item; in the thread."""
        if self._sink is not None and not self._sink.put(item):
            self.cancellation.cancel()

    def start(self) -> None:
        """Start the thread; returns at once."""
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread, at most this long; returns at once in the thread itself."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def run(self) -> None:
        """Do the work in the calling thread."""
        try:
            self._work(self)
        except BaseException as error:
            if not self._end(error):
                raise
        else:
            self._end()

    def _end(self, error: BaseException | None = None) -> bool:
        """Tell the sink; returns whether there is one."""
        # The sink is not kept: an error's traceback holds this run.
        sink, self._sink, self.ended = self._sink, None, True
        if sink is not None:
            sink.end(error)
        return sink is not None
