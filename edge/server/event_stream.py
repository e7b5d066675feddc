"""Server-sent events: what an answer worker makes, written as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.types import Send

from .answer_worker import AnswerWorker
from .error_objects import encode_json

DONE: Final = b"data: [DONE]\n\n"
_COMMENT: Final = b": the answer is being computed\n\n"
EVENT_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Some reverse proxies hold events back unless they are told not to.
    (b"x-accel-buffering", b"no"),
]


def event(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + encode_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """An event that is named by the `type` of its value, as those of the Responses API are."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value)


async def send_events(send: Send, worker: AnswerWorker[bytes], silence_s: float) -> None:
    """Send the events of an accepted answer; the response is left open for a last message.

    Args:
        send: sends messages of the response.
        worker: gives the events.
        silence_s: seconds without an event after which a comment is sent.

    Raises:
        BaseException: what the worker raised, after all of its events were sent.
    """
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
    while events := await _taken_or_comment(worker.take, silence_s):
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})


async def _taken_or_comment(take: Callable[[], Awaitable[list[bytes]]], silence_s: float) -> list[bytes]:
    try:
        async with asyncio.timeout(silence_s):
            return await take()
    except TimeoutError:
        return [_COMMENT]
