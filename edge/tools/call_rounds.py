"""An answer that is written, and its calls of tools: the user decides about each, and the model reads the results."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from msgspec import structs

from ...errors import CancelledError
from ...runtime.result import Chunk
from ...runtime.scheduling.request_run import Cancellation
from ...runtime.tools.answer_parts import AnswerParts
from ...runtime.tools.calls import ToolCall
from ...runtime.tools.function_tools import DECLINED, MAX_ROUNDS
from ..conversations.conversation_table import parsed
from ..conversations.records import CallRound, CallState, MessageState, ReasoningText, StoredCall, StoredMessage
from ..conversations.store import ConversationStore
from ..service.token_objects import token_object
from .mcp_connection import ServerTool
from .tool_servers import ToolServers

CHECKPOINT_S: Final = 1.0
"""Least time between two checkpoints, in seconds: what a killed process loses of an answer."""
Decision: TypeAlias = Literal["run", "always", "refuse"]
"""What becomes of a call; `always` also makes later calls of the tool in the conversation."""


class CallingAnswer(ABC):
    """An answer that is written to the store, in checkpoints, and may ask for calls.

    Args:
        store: keeps it.
        message: the message in the store, in the state `writing` or one that goes on, with what it begins with.
        tokens: stored tokens of what it begins with; None to keep none.
    """

    def __init__(
        self, store: ConversationStore, message: StoredMessage, tokens: Sequence[Mapping[str, Any]] | None
    ) -> None:
        self.message = message
        self.conversation: Final = message.conversation
        self.cancellation: Final = Cancellation()
        self.content = message.content
        """Its text so far, behind the calls."""
        self.tokens = None if tokens is None else list(tokens)
        """Objects of the tokens of the content."""
        self.rounds = message.rounds
        """Its calls so far."""
        self.tools: Mapping[str, ServerTool] = {}
        """The tools that are offered, by the names for the model."""
        self.calls: list[ToolCall] = []
        """The calls that its last text ended with."""
        self.state: MessageState | None = None
        """How its last text has ended; None while it is generated."""
        self.stats: dict[str, Any] | None = None
        """What `stats_object` returned for it."""
        self._store: Final = store
        self._written = ReasoningText()
        self._due = time.monotonic() + CHECKPOINT_S

    def begin(self, parts: AnswerParts, tokens: Sequence[Mapping[str, Any]] | None) -> None:
        """Begin its next text with these parts, before the first chunk; an incomplete character is not among them.

        Args:
            parts: what the chunks continue.
            tokens: the tokens of the parts; None to keep no tokens.
        """
        self._written, self.calls, self.state = ReasoningText(), [], None
        self.content = self._written.push(parts.reasoning, parts.text)
        self.tokens = None if tokens is None else list(tokens)

    def add(self, chunk: Chunk) -> str:
        """Add a piece, and write a checkpoint if the last one is some time ago; returns what it adds to the content.

        Raises:
            ConversationError: the answer was deleted, or the file cannot be written.
        """
        text = self._written.push(chunk.reasoning, chunk.text)
        self.content += text
        self.calls += chunk.tool_calls
        if self.tokens is not None:
            self.tokens += map(token_object, chunk.logprobs)
        if time.monotonic() >= self._due:
            self._store.write_answer(self.message.id, self.content, self.tokens)
            self._due = time.monotonic() + CHECKPOINT_S
        return text

    def set_rounds(self, rounds: Sequence[CallRound]) -> None:
        """Keep calls of tools and their results, and show them; the content begins anew behind them.

        Raises:
            ConversationError: the answer was deleted, or the file cannot be written.
        """
        self.content, self.rounds = "", tuple(rounds)
        self.tokens = None if self.tokens is None else []
        self._store.write_answer(self.message.id, "", [], self.rounds)

    def finish(self, error: str | None = None) -> None:
        """Write the whole answer.

        Args:
            error: why it failed, in a sentence.

        Raises:
            ConversationError: the file cannot be written.
        """
        stats, tokens, state = self.stats, self.tokens or (), self.state or MessageState.INTERRUPTED
        if stats is not None and tokens:
            stats = {**stats, "tokens": len(tokens)}  # those that it began with, too
        self._store.finish_answer(self.message.id, self.content, state, tokens=tokens, stats=stats, error=error)

    @abstractmethod
    def wait_for_decision(self, call: StoredCall) -> Decision:
        """Wait until the user has decided about a call.

        Raises:
            CancelledError: the answer was cancelled.
        """

    def generate_with_calls(self, servers: ToolServers, generate: Callable[[], object]) -> None:
        """Generate the answer and make the calls that it asks for, until it asks for none.

        Args:
            servers: make the calls; those that the answer has already, without results, are made first.
            generate: generates its next text, and sets `state`.

        Raises:
            CancelledError: it was cancelled; calls without results wait again.
            EdgeError: it cannot be generated, or kept.
        """
        for _ in range(MAX_ROUNDS):
            if self.rounds and not self.rounds[-1].decided and not self.content:
                self._make_calls(servers)
            generate()
            calls = tuple(StoredCall(call.id, call.name, call.arguments) for call in self.calls)
            if not calls:
                return
            self.set_rounds([*self.rounds, CallRound(self.content.strip(), calls)])
            if self.state is not MessageState.COMPLETE:
                return
        self.state = MessageState.LENGTH

    def _make_calls(self, servers: ToolServers) -> None:
        """Make the calls of the last round that have no results, one after another."""
        try:
            for call in self.rounds[-1].calls:
                if call.result is None:
                    self._make(servers, call)
        except CancelledError:
            *before, last = self.rounds
            self.set_rounds([*before, last.undecided()])
            raise

    def _make(self, servers: ToolServers, call: StoredCall) -> None:
        def show(state: CallState, result: str | None = None) -> None:
            *before, last = self.rounds
            changed = structs.replace(call, state=state, result=result)
            calls = tuple(changed if each.id == call.id else each for each in last.calls)
            self.set_rounds([*before, structs.replace(last, calls=calls)])

        tool = self.tools.get(call.name)
        values = values if isinstance(values := parsed(call.arguments, {}), dict) else {}
        problem = f"there is no tool {call.name} any more" if tool is None else tool.problem(values)
        if tool is None or problem:
            show(CallState.FAILED, f"error: {problem}")
            return
        allowed = self._store.conversation(self.conversation).allowed_tools
        if tool.id not in allowed:
            decision = self.wait_for_decision(call)
            if decision == "refuse":
                show(CallState.REFUSED, DECLINED)
                return
            if decision == "always":
                self._store.change(self.conversation, allowed_tools=[*allowed, tool.id])
        self.cancellation.check()
        show(CallState.RUNNING)
        text, failed = servers.call(tool, values, self.cancellation)
        show(CallState.FAILED if failed else CallState.DONE, text)
