"""What all endpoints of the app share: events for the windows, and the settings of the page."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.types import Receive, Scope, Send

from ...runtime.scheduling.request_run import LoopQueue
from ..conversations.store import ConversationStore
from ..server.http_protocol import EVENT_HEADERS, event, next_events, watching_client
from ..server.server_settings import ServerSettings
from ..service.model_files import describe_model
from ..service.model_pool import ModelPool
from ..tools.tool_servers import ToolServers

MAX_EVENTS: Final = 4096
"""Largest number of events that wait for one window."""
MAX_BYTES: Final = 8 << 20
"""Largest size of the events that wait for one window."""
_COMMENT: Final = b": the channel is open\n\n"
_SILENCE_S: Final = 15.0
"""Seconds without an event after which a comment is sent, so that a window that is gone is noticed."""


class EventChannel:
    """Hands events to all windows that listen, in the order in which they were published.

    It is the ASGI application of `GET /api/events` too, which sends events until the window goes away or the channel is
    closed.
    """

    def __init__(self) -> None:
        self._lock: Final = threading.Lock()
        self._listeners: Final[set[EventListener]] = set()
        self._closed = False

    @property
    def listening(self) -> bool:
        """Whether any window listens; in any thread."""
        return bool(self._listeners)

    def publish(self, kind: str, /, **fields: Any) -> None:
        """Hand an event to all windows; in any thread.

        Args:
            kind: the `type` of the event.
            **fields: its further fields, as JSON can have them.
        """
        if not self._listeners:
            return
        encoded = event({"type": kind, **fields})
        with self._lock:
            for listener in self._listeners:
                listener.put(encoded)

    @contextmanager
    def listen(self) -> Iterator[EventListener]:
        """Listen within the block; on an event loop."""
        listener = EventListener()
        with self._lock:
            self._listeners.add(listener)
            if self._closed:
                listener.end()
        try:
            yield listener
        finally:
            with self._lock:
                self._listeners.discard(listener)

    def close(self) -> None:
        """End all listening; in any thread."""
        with self._lock:
            self._closed = True
            for listener in self._listeners:
                listener.end()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send events."""
        with self.listen() as listener:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            # The window knows that it listens before it fetches what it shows.
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            async with watching_client(receive, listener.end):
                while events := await next_events(listener, _SILENCE_S, _COMMENT):
                    await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class EventListener(LoopQueue[bytes]):
    """The events that wait for one window.

    A window that reads too slowly, or is suspended by its browser, loses its events and is told to fetch everything
    again.
    """

    def _add(self, item: bytes) -> None:
        if len(self._items) >= MAX_EVENTS or sum(map(len, self._items)) + len(item) > MAX_BYTES:
            self._items, item = [], event({"type": "reload"})
        self._items.append(item)


_DEFAULTS: Final[Mapping[str, Any]] = {
    "theme": "system",
    "font_size": 16,
    "enter_sends": True,
    "token_details": True,
    "show_statistics": True,
    "default_model": None,
}
SETTING_PREFIX: Final = "page."
"""What the names of these settings begin with in the store."""


class SettingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a change of settings; those that are left out stay as they are."""

    theme: Literal["system", "light", "dark"] | UnsetType = UNSET
    font_size: Annotated[int, Meta(ge=12, le=24)] | UnsetType = UNSET
    """In pixels."""
    enter_sends: bool | UnsetType = UNSET
    """Whether Enter sends a message; else Ctrl+Enter does."""
    token_details: bool | UnsetType = UNSET
    """Whether each token of an answer is kept with its probability, its alternatives and its origin."""
    show_statistics: bool | UnsetType = UNSET
    default_model: str | UnsetType | None = UNSET
    """The model of conversations that name none; None for the first one that is offered."""


def read_settings(store: ConversationStore) -> dict[str, Any]:
    """All settings, by name."""
    return {name: store.setting(SETTING_PREFIX + name, default) for name, default in _DEFAULTS.items()}


@dataclass(frozen=True)
class AppContext:
    """What all endpoints of the app share."""

    store: ConversationStore
    """Conversations and settings."""
    pool: ModelPool
    """The models."""
    events: EventChannel
    """Tells the windows what has changed."""
    settings: ServerSettings
    """Limits of requests."""
    tools: ToolServers = field(default_factory=ToolServers)
    """MCP servers, whose tools conversations can use."""
    load_options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `edgerun.load` with which a check in a process of its own opens a model as the pool does."""
    embedding_model: str | None = None
    """Which model finds passages of documents by their meaning; as for `passage_encoder`."""

    def default_model(self) -> str | None:
        """The model of conversations that name none; None where no model writes texts."""
        chosen = read_settings(self.store)["default_model"]
        described = ((each.id, describe_model(each, self.pool.kind)) for each in self.pool.offered.entries())
        offered = [name for name, files in described if "completion" in files["capabilities"]]
        return chosen if chosen in offered else next(iter(offered), None)
