"""One thread for each request that computes; the event loop takes what it has made.

The thread never waits for the client: what it makes is kept until the event loop has sent it. The text of an answer is
bounded by the context, so this is little memory, and a client that reads slowly does not slow decoding. The event loop
is woken once for all items that have been made since it last looked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Final, Generic, TypeVar

from ..service.cancellation import Cancellation

Item = TypeVar("Item")


class AnswerWorker(Generic[Item]):
    """Runs `work` in a thread. Methods say where they are called: on the event loop, or in the thread.

    The thread has the context variables of the caller.

    Args:
        work: called with this worker in the thread. It calls `accept` once nothing that it knows of prevents an answer,
            `push` for every item, and ends soon after `cancellation` was cancelled.
    """

    def __init__(self, work: Callable[[AnswerWorker[Item]], None]) -> None:
        self._work: Final = work
        self._loop: Final = asyncio.get_running_loop()
        self._lock: Final = threading.Lock()
        self._changed: Final = asyncio.Event()
        self._items: list[Item] = []
        self._accepted = self._ended = False
        self._error: BaseException | None = None
        self.cancellation: Final = Cancellation()
        """Ends the work after its current pass; for any thread."""
        self._thread: Final = threading.Thread(
            target=copy_context().run, args=(self._run,), name="edge-run-answer", daemon=True
        )

    def start(self) -> None:
        """Start the thread; on the event loop."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the thread has done its work; anywhere."""
        return self._ended

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, at most this long; anywhere but in the thread."""
        self._thread.join(timeout_s)

    def accept(self) -> None:
        """Say that the answer begins: errors from now on occur in its middle; in the thread."""
        self._accepted = True
        self._wake()

    def push(self, item: Item) -> None:
        """Hand over an item; in the thread."""
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
        # The event loop that was told of an earlier item takes this one along.
        if first:
            self._wake()

    async def accepted(self) -> None:
        """Wait until the answer begins; on the event loop.

        Raises:
            BaseException: what the work raised before.
        """
        while not self._accepted and not self._ended:
            await self._change()
        if not self._accepted and self._error is not None:
            raise self._error

    async def take(self) -> list[Item]:
        """Wait for items and return all there are; none after the end; on the event loop.

        Raises:
            BaseException: what the work raised, after all of its items were taken.
        """
        while True:
            # Read before the items: what is pushed before the end is found below.
            ended = self._ended
            with self._lock:
                items, self._items = self._items, []
            if items:
                return items
            if ended:
                if self._error is not None:
                    raise self._error
                return []
            await self._change()

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def _wake(self) -> None:
        # The loop may have been closed while the thread was computing; then nobody waits.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._changed.set)

    def _run(self) -> None:
        try:
            self._work(self)
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            self._error = error
        finally:
            self._ended = True
            self._wake()
