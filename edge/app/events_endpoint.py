"""`GET /api/events`: what changes, as server-sent events, for one window."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from starlette.types import Receive, Scope, Send

from ..server.event_stream import EVENT_HEADERS
from .app_context import AppContext
from .event_channel import EventListener

_COMMENT: Final = b": the channel is open\n\n"


class EventsEndpoint:
    """An ASGI application that sends the events of a channel until the window goes away or the app ends."""

    def __init__(self, context: AppContext) -> None:
        self._context: Final = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events."""
        del scope
        with self._context.events.listen() as listener:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            # The window knows that it listens before it fetches what it shows.
            await send({"type": "http.response.body", "body": _COMMENT, "more_body": True})
            sending = asyncio.create_task(self._send(listener, send))
            watching = asyncio.create_task(_gone(receive))
            try:
                await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (sending, watching):
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, listener: EventListener, send: Send) -> None:
        while True:
            try:
                async with asyncio.timeout(self._context.settings.silence_s):
                    events = await listener.take()
            except TimeoutError:
                events = _COMMENT
            if not events:
                return
            await send({"type": "http.response.body", "body": events, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
