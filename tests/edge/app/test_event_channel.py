"""The queue of events of each window: in order, bounded, and ended."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from edgerun.edge.app.app_access import AppAccess
from edgerun.edge.app.app_context import MAX_BYTES, MAX_EVENTS, AppContext, EventChannel, EventListener
from edgerun.edge.app.app_service import AppService
from edgerun.edge.conversations.store import ConversationStore
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.edge.service.model_pool import ModelPool


def ran(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """The result of a coroutine, in another thread: in that of the tests a browser's event loop may run."""
    with start_blocking_portal() as portal:
        return portal.call(function, *arguments)


def events_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(part.removeprefix(b"data: ")) for part in data.split(b"\n\n") if part]


async def all_of(listener: EventListener) -> list[dict[str, Any]]:
    events = []
    while data := await listener.take():
        events += events_of(b"".join(data))
    return events


def test_events_of_other_threads_come_in_order() -> None:
    async def listen() -> list[dict[str, Any]]:
        channel = EventChannel()
        assert not channel.listening
        channel.publish("nobody listens")
        with channel.listen() as first, channel.listen() as second:
            assert channel.listening

            def publish() -> None:
                for number in range(1000):
                    channel.publish("count", number=number)
                channel.close()

            thread = threading.Thread(target=publish)
            thread.start()
            taken = [await all_of(first), await all_of(second)]
            thread.join()
        assert not channel.listening
        with channel.listen() as late:
            assert await late.take() == []
        assert taken[0] == taken[1]
        return taken[0]

    assert ran(listen) == [{"type": "count", "number": number} for number in range(1000)]


def test_the_last_event_of_a_conversation_is_its_latest_state(tiny_bundle: Path) -> None:
    titles: list[str] = []
    second_is_told = threading.Event()

    class SlowWindow(EventChannel):
        """A window that listens; the thread of the first change is slow to tell it."""

        listening = True

        def publish(self, kind: str, /, **fields: Any) -> None:
            title = fields["conversation"].title
            if title == "first":
                second.start()
                second_is_told.wait(0.5)
            titles.append(title)
            if title == "second":
                second_is_told.set()

    def open_model(*_: object) -> Any:
        raise AssertionError("no model is loaded")

    with ModelPool([str(tiny_bundle)], open_model) as pool, ConversationStore.in_memory() as store:
        conversation = store.create().id
        second = threading.Thread(target=store.change, args=(conversation,), kwargs={"title": "second"})
        service = AppService(AppContext(store, pool, SlowWindow(), ServerSettings()), AppAccess(b"secret", 1))
        store.change(conversation, title="first")
        second.join()
        assert titles == ["first", "second"]
        service.close()


def test_a_window_that_does_not_read_is_told_to_fetch_everything() -> None:
    async def listen(count: int, text: str) -> list[dict[str, Any]]:
        channel = EventChannel()
        with channel.listen() as listener:
            for number in range(count):
                channel.publish("count", number=number, text=text)
            return events_of(b"".join(await listener.take()))

    many = ran(listen, MAX_EVENTS + 3, "")
    assert [event["type"] for event in many] == ["reload", "count", "count"]
    large = ran(listen, 5, "x" * (MAX_BYTES // 4))
    assert [event["type"] for event in large] == ["reload", "count"]
