"""An answer that is being generated: its text so far, and what the windows have been told of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final

from ...runtime.scheduling.request_run import Cancellation
from ...runtime.tools.calls import ToolCallDelta
from ..conversations.answering import AnswerWriter
from ..conversations.records import CallRound, MessageState, ReasoningText, StoredMessage, as_object
from .event_channel import EventChannel

_PROGRESS_S: Final = 0.1
"""Least time between two events of progress of one stage, in seconds."""


class Decision(StrEnum):
    """What becomes of a call."""

    RUN = "run"
    ALWAYS = "always"
    """It is made, and so are later ones of this tool in the conversation."""
    REFUSE = "refuse"


class CallApprovals:
    """Hands decisions from the windows to the thread that waits for them."""

    def __init__(self) -> None:
        self._changed: Final = threading.Condition()
        self._decisions: Final[dict[str, Decision]] = {}

    def decide(self, call_id: str, decision: Decision) -> None:
        """Decide about a call; the first decision holds."""
        with self._changed:
            self._decisions.setdefault(call_id, decision)
            self._changed.notify_all()

    def wait(self, call_id: str, cancellation: Cancellation) -> Decision:
        """Wait until somebody has decided about a call.

        Raises:
            CancelledError: the answer was cancelled.
        """
        with cancellation.calling(self._wake), self._changed:
            while (decision := self._decisions.get(call_id)) is None:
                cancellation.check()
                self._changed.wait()
        return decision

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class LiveAnswer:
    """An answer that is being generated in this process, what the store has of it, and what the windows know.

    Args:
        message: the answer in the store.
        events: the windows, which get its text in numbered pieces.
        writer: keeps it in the store.
        index: which one of the answers to a message it is.
    """

    def __init__(self, message: StoredMessage, events: EventChannel, writer: AnswerWriter, index: int) -> None:
        self.index: Final = index
        self.writer = writer
        self.written = ReasoningText()
        """Makes one text of its reasoning and the rest."""
        self.calls: list[ToolCallDelta] = []
        self.state: MessageState | None = None
        """How it has ended; None while it is generated."""
        self.stats: dict[str, Any] | None = None
        self.message: Final = message
        self.id: Final = message.id
        self.conversation: Final = message.conversation
        self.cancellation: Final = Cancellation()
        self.state_if_cancelled = MessageState.STOPPED
        """State of the answer if it is cancelled."""
        self.ended: Final = threading.Event()
        self.approvals: Final = CallApprovals()
        """What the user has decided about its calls of tools."""
        self._events: Final = events
        self._lock: Final = threading.Lock()
        """Guards all that follows, and the order of the events of this answer."""
        self._published = message.content
        self._rounds = message.rounds
        self._pending = ""
        self._sequence = 0
        self._tokens = 0
        self._started = time.monotonic()
        self._first_token: float | None = None
        self._stage: dict[str, Any] = {}
        self._stage_at = 0.0

    def begin(self, content: str) -> None:
        """Say what the answer begins with, before its first piece.

        That may differ from what is stored: where an answer goes on in the middle of a character, it is left out.
        """
        with self._lock:
            if content != self._published:
                self._published = content
                self._publish_message()

    def show_rounds(self, rounds: Sequence[CallRound]) -> None:
        """Say which calls of tools it has made; its content begins anew behind them."""
        with self._lock:
            self._rounds, self._published, self._pending, self._stage = tuple(rounds), "", "", {}
            self._tokens, self._first_token = 0, None  # what it writes next has a rate of its own
            self._publish_message()

    def _publish_message(self) -> None:
        """Tell the windows all of it; the lock is held."""
        self._events.publish("message", message=self._as_known(self.message))

    def _as_known(self, message: StoredMessage) -> dict[str, Any]:
        return as_object(replace(message, content=self._published, rounds=self._rounds))

    def add(self, text: str, tokens: int) -> bool:
        """Add a piece; returns whether there is something to publish now, and was not before.

        Args:
            text: what it adds to the content.
            tokens: number of tokens of the answer so far.
        """
        with self._lock:
            if self._first_token is None:
                self._first_token = time.monotonic()
            self._tokens = tokens
            first = not self._pending
            self._pending += text
            self._stage = {}
            return first and bool(text)

    def publish(self) -> None:
        """Tell the windows what has been added."""
        with self._lock:
            if not self._pending:
                return
            self._sequence += 1
            text, self._pending = self._pending, ""
            self._published += text
            self._events.publish(
                "delta",
                conversation=self.conversation,
                message=self.id,
                sequence=self._sequence,
                text=text,
                rate=self._rate(),
            )

    def progress(self, stage: str, fraction: float | None) -> None:
        """Tell the windows what the answer waits for; a `Progress`, and None where nobody knows how far it is."""
        now = time.monotonic()
        with self._lock:
            if stage == self._stage.get("stage") and fraction != 1 and now - self._stage_at < _PROGRESS_S:
                return
            self._stage, self._stage_at = {"stage": stage, "fraction": fraction}, now
            self._events.publish("progress", conversation=self.conversation, message=self.id, **self._stage)

    @contextmanager
    def snapshot(self, message: StoredMessage) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The message as the windows know it, and how far that is; no further piece is published in the block."""
        with self._lock:
            yield (
                self._as_known(message),
                {"message": self.id, "sequence": self._sequence, "rate": self._rate(), **self._stage},
            )

    def _rate(self) -> dict[str, Any]:
        first, now = self._first_token, time.monotonic()
        seconds = 0.0 if first is None else now - first
        return {
            "tokens": self._tokens,
            "tokens_per_second": (self._tokens - 1) / seconds if seconds > 0 and self._tokens > 1 else 0.0,
            "first_token_s": None if first is None else first - self._started,
        }
