"""A message that is being generated: its text so far, and what the windows have been told of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from ...errors import EdgeError
from ...runtime.result import Chunk
from ...runtime.scheduling.request_run import Run
from ...runtime.tools.answer_parts import AnswerParts
from ..conversations.records import CallRound, MessageState, StoredCall, StoredMessage
from ..conversations.store import ConversationStore
from ..tools.call_rounds import CallingAnswer, Decision
from .app_context import EventChannel

_PROGRESS_S: Final = 0.1
"""Least time between two events of progress of one stage, in seconds."""
_PUBLISH_S: Final = 1 / 30
"""Least time between two pieces of text for the windows, in seconds."""


class MessageGeneration(CallingAnswer):
    """A message that this process generates; its run writes it, and any thread may ask for it, or cancel it.

    Args:
        store: keeps it.
        events: the windows, which get its text in numbered pieces.
        message: the message in the store, with what it begins with.
        tokens: stored tokens of what it begins with; none if they are not known.
        run: the run that generates it.
    """

    def __init__(
        self,
        store: ConversationStore,
        events: EventChannel,
        message: StoredMessage,
        tokens: Sequence[Mapping[str, Any]],
        run: Run[None],
    ) -> None:
        super().__init__(store, message, tokens)
        self.id: Final = message.id
        self.run: Final = run
        self.state_if_cancelled = MessageState.STOPPED
        self.ended = False
        """Whether `finish` has begun: no further text comes, but the store may not have the end yet."""
        self._events: Final = events
        self._lock: Final = threading.Condition()
        """Guards all that follows, and the order of the events of this message."""
        self._decisions: Final[dict[str, Decision]] = {}
        self._published = len(message.content)
        """Number of characters of the content that the windows have."""
        self._sequence = 0
        self._tokens = 0
        self._started = self._published_at = time.monotonic()
        self._first_token: float | None = None
        self._stage: dict[str, Any] = {}
        self._stage_at = 0.0

    def begin(self, parts: AnswerParts, tokens: Sequence[Mapping[str, Any]] | None) -> None:
        """Begin its next text, and tell the windows where that is not what they have."""
        with self._lock:
            known = self.content[: self._published]
            super().begin(parts, tokens)
            self._published = len(self.content)
            if self.content != known:
                self._events.publish("message", message=self._as_known(self.message))

    def add(self, chunk: Chunk) -> str:
        """Add a piece, and tell the windows now and then."""
        text = super().add(chunk)
        now = time.monotonic()
        with self._lock:
            if self._first_token is None:
                self._first_token = now
            self._tokens, self._stage = chunk.completion_tokens, {}
            if now - self._published_at >= _PUBLISH_S:
                self._publish_pending()
        return text

    def set_rounds(self, rounds: Sequence[CallRound]) -> None:
        """Keep calls of tools, and tell the windows of them."""
        super().set_rounds(rounds)
        with self._lock:
            self._published, self._stage = 0, {}
            self._tokens, self._first_token = 0, None  # what it writes next has a rate of its own
            self._events.publish("message", message=self._as_known(self.message))

    def finish(self, error: str | None = None) -> None:
        """Keep the whole message, and tell the windows of its end.

        Args:
            error: why it failed, in a sentence.
        """
        with self._lock:
            self.ended = True
            self._publish_pending()
        try:
            super().finish(error)
        except EdgeError as problem:
            # The disk is full, for example: the windows have the text, and are told that it is not kept.
            message = replace(self.message, content=self.content, rounds=self.rounds)
            message = replace(message, state=MessageState.FAILED, error=str(problem))
            self._events.publish("message", message=message)

    def progress(self, stage: str, fraction: float | None) -> None:
        """Tell the windows what the message waits for; a `Progress`, and None where nobody knows how far it is."""
        now = time.monotonic()
        with self._lock:
            if stage == self._stage.get("stage") and fraction != 1 and now - self._stage_at < _PROGRESS_S:
                return
            self._stage, self._stage_at = {"stage": stage, "fraction": fraction}, now
            self._events.publish("progress", conversation=self.conversation, message=self.id, **self._stage)

    @contextmanager
    def snapshot(self, message: StoredMessage) -> Iterator[tuple[StoredMessage, dict[str, Any]]]:
        """The message as the windows know it, and how far that is; no further piece is published in the block."""
        with self._lock:
            progress = {"message": self.id, "sequence": self._sequence, "rate": self._rate(), **self._stage}
            yield self._as_known(message), progress

    def decide(self, call_id: str, decision: Decision) -> None:
        """Decide about a call of a tool; the first decision holds."""
        with self._lock:
            self._decisions.setdefault(call_id, decision)
            self._lock.notify_all()

    def wait_for_decision(self, call: StoredCall) -> Decision:
        """Wait until a window has decided about a call."""
        with self.cancellation.calling(self._wake), self._lock:
            while (decision := self._decisions.get(call.id)) is None:
                self.cancellation.check()
                self._lock.wait()
        return decision

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _publish_pending(self) -> None:
        """Tell the windows what has been added; the lock is held."""
        if text := self.content[self._published :]:
            self._sequence += 1
            self._published_at = time.monotonic()
            self._published += len(text)
            fields = {"conversation": self.conversation, "message": self.id, "sequence": self._sequence}
            self._events.publish("delta", **fields, text=text, rate=self._rate())

    def _as_known(self, message: StoredMessage) -> StoredMessage:
        return replace(message, content=self.content[: self._published], rounds=self.rounds)

    def _rate(self) -> dict[str, Any]:
        first = self._first_token
        seconds = 0.0 if first is None else time.monotonic() - first
        return {
            "tokens": self._tokens,
            "tokens_per_second": (self._tokens - 1) / seconds if seconds > 0 and self._tokens > 1 else 0.0,
            "first_token_s": None if first is None else first - self._started,
        }
