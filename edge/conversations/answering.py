"""Keeps an answer in the store while it is generated."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...runtime.decode import FinishReason
from ...runtime.options import GenerateOptions
from ...runtime.prefill import INT8_GRAPH
from ...runtime.result import Chunk, Stats
from ..service.token_objects import token_object
from .call_rounds import CallRound
from .records import MessageState, StoredMessage
from .store import ConversationStore

CHECKPOINT_S: Final = 1.0
"""Least time between two checkpoints, in seconds: what a killed process loses of an answer."""
_STATES: Final = {
    FinishReason.STOP: MessageState.COMPLETE,
    FinishReason.LENGTH: MessageState.LENGTH,
    FinishReason.CANCELLED: MessageState.STOPPED,
}


class AnswerWriter:
    """Writes the pieces of an answer to the store, in checkpoints.

    Args:
        store: the store.
        message_id: the answer, a message in the state `writing` or one that goes on.
        content: its text so far.
        tokens: its tokens so far; None to keep none.
        rounds: its calls of tools so far.
    """

    def __init__(
        self,
        store: ConversationStore,
        message_id: str,
        content: str = "",
        tokens: Sequence[Mapping[str, Any]] | None = (),
        rounds: Sequence[CallRound] = (),
    ) -> None:
        self.message_id: Final = message_id
        self.content = content
        self.tokens: list[Mapping[str, Any]] | None = None if tokens is None else list(tokens)
        self.rounds: tuple[CallRound, ...] = tuple(rounds)
        self._store: Final = store
        self._due = time.monotonic() + CHECKPOINT_S

    def add(self, chunk: Chunk, text: str | None = None) -> None:
        """Add a piece, and write a checkpoint if the last one is some time ago.

        Args:
            chunk: the piece.
            text: what it adds to the content; None for its text.

        Raises:
            ConversationError: the answer was deleted, or the file cannot be written.
        """
        self.content += chunk.text if text is None else text
        if self.tokens is not None:
            self.tokens += map(token_object, chunk.logprobs)
        if time.monotonic() >= self._due:
            self._store.write_answer(self.message_id, self.content, self.tokens)
            self._due = time.monotonic() + CHECKPOINT_S

    def begin_round(self, rounds: Sequence[CallRound]) -> None:
        """Keep calls of tools and their results; the content begins anew behind them.

        Raises:
            ConversationError: the answer was deleted, or the file cannot be written.
        """
        self.content, self.rounds = "", tuple(rounds)
        self.tokens = None if self.tokens is None else []
        self._store.write_answer(self.message_id, "", [], self.rounds)

    def finish(
        self, state: MessageState, stats: Mapping[str, Any] | None = None, error: str | None = None
    ) -> StoredMessage:
        """Write the whole answer.

        Args:
            state: how it ended.
            stats: what `stats_object` returns.
            error: why it failed, in a sentence.

        Raises:
            ConversationError: the file cannot be written.
        """
        tokens = self.tokens or ()
        if stats is not None and tokens:
            stats = {**stats, "tokens": len(tokens)}  # those that it began with, too
        return self._store.finish_answer(self.message_id, self.content, state, tokens=tokens, stats=stats, error=error)


def answer_state(reason: FinishReason) -> MessageState:
    """The state of an answer that ended for this reason."""
    return _STATES[reason]


def stats_object(stats: Stats, trimmed: Sequence[str] = ()) -> dict[str, Any]:
    """Statistics of an answer as they are kept with it. Times are in seconds.

    Args:
        stats: the statistics.
        trimmed: ids of the messages that were left out of its prompt.
    """
    return {
        "tokens": stats.text_tokens,
        "tokens_per_second": stats.decode_tokens_per_second,
        "first_token_s": stats.first_token_s,
        "total_s": stats.total_s,
        "prompt_tokens": stats.prompt_tokens,
        "reused_tokens": stats.reused_tokens,
        "int8_prompt_tokens": stats.prompt_readers.get(INT8_GRAPH, 0),
        "tokens_per_pass": stats.tokens_per_pass,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "drafters": {
            name: {"drafted": counts.drafted, "accepted": counts.accepted} for name, counts in stats.by_source.items()
        },
        "trimmed": list(trimmed),
    }


def generate_options(base: GenerateOptions, sampling: Mapping[str, Any]) -> GenerateOptions:
    """The options of an answer in a conversation: its sampling where it has one, else those given.

    Raises:
        InputError: an option is unknown, or its value is out of range.
    """
    return base.changed(sampling)
