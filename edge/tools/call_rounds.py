"""Calls of tools that an answer asks for: the user decides about each, and the model reads the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from msgspec import structs

from ...errors import CancelledError
from ...runtime.scheduling.request_run import Cancellation
from ...runtime.tools.calls import ToolCallDelta, joined_calls
from ...runtime.tools.function_tools import DECLINED, MAX_ROUNDS
from ..conversations.answering import MessageWriter
from ..conversations.conversation_table import parsed
from ..conversations.records import CallRound, CallState, MessageState, StoredCall, StoredMessage
from ..conversations.store import ConversationStore
from .mcp_connection import ServerTool
from .tool_servers import ToolServers

Decision: TypeAlias = Literal["run", "always", "refuse"]
"""What becomes of a call; `always` also makes later calls of the tool in the conversation."""


class CallingAnswer(ABC):
    """An answer that is being written, and may ask for calls.

    Args:
        store: keeps it.
        message: the message in the store, with what it begins with.
        tokens: stored tokens of what it begins with; None to keep none.
    """

    def __init__(
        self, store: ConversationStore, message: StoredMessage, tokens: Sequence[Mapping[str, Any]] | None
    ) -> None:
        self.message = message
        self.conversation: Final = message.conversation
        self.cancellation: Final = Cancellation()
        self.writer = MessageWriter(store, message.id, message.content, tokens, message.rounds)
        self.calls: list[ToolCallDelta] = []
        """The calls that its last text ended with."""
        self.state: MessageState | None = None
        """How its last text has ended; None while it is generated."""

    @abstractmethod
    def set_rounds(self, rounds: Sequence[CallRound]) -> None:
        """Keep calls of tools, and show them; the content begins anew behind them.

        Raises:
            ConversationError: the message was deleted, or the file cannot be written.
        """

    @abstractmethod
    def wait_for_decision(self, call: StoredCall) -> Decision:
        """Wait until the user has decided about a call.

        Raises:
            CancelledError: the answer was cancelled.
        """


@dataclass(frozen=True)
class ToolCaller:
    """Makes the calls of answers."""

    store: ConversationStore
    servers: ToolServers
    tools: Mapping[str, ServerTool]
    """The tools that are offered, by the names for the model."""

    def run(self, answer: CallingAnswer, generate: Callable[[], object]) -> None:
        """Generate an answer and make the calls that it asks for, until it asks for none.

        Args:
            answer: the answer; calls that it has already, without results, are made first.
            generate: generates its next text, and sets `calls` and `state`.

        Raises:
            CancelledError: it was cancelled; calls without results wait again.
            EdgeError: it cannot be generated, or kept.
        """
        for _ in range(MAX_ROUNDS):
            writer = answer.writer
            if writer.rounds and not writer.rounds[-1].decided and not writer.content:
                self._make_calls(answer)
            generate()
            calls = tuple(StoredCall(call.id, call.name, call.arguments) for call in joined_calls(answer.calls))
            if not calls:
                return
            writer = answer.writer
            answer.set_rounds([*writer.rounds, CallRound(writer.content.strip(), calls)])
            if answer.state is not MessageState.COMPLETE:
                return
        answer.state = MessageState.LENGTH

    def _make_calls(self, answer: CallingAnswer) -> None:
        """Make the calls of the last round that have no results, one after another."""
        try:
            for call in answer.writer.rounds[-1].calls:
                if call.result is None:
                    self._make(answer, call)
        except CancelledError:
            *before, last = answer.writer.rounds
            answer.set_rounds([*before, last.undecided()])
            raise

    def _make(self, answer: CallingAnswer, call: StoredCall) -> None:
        def show(state: CallState, result: str | None = None) -> None:
            *before, last = answer.writer.rounds
            changed = structs.replace(call, state=state, result=result)
            calls = tuple(changed if each.id == call.id else each for each in last.calls)
            answer.set_rounds([*before, structs.replace(last, calls=calls)])

        tool = self.tools.get(call.name)
        values = values if isinstance(values := parsed(call.arguments, {}), dict) else {}
        problem = f"there is no tool {call.name} any more" if tool is None else tool.problem(values)
        if tool is None or problem:
            show(CallState.FAILED, f"error: {problem}")
            return
        allowed = self.store.conversation(answer.conversation).allowed_tools
        if tool.id not in allowed:
            decision = answer.wait_for_decision(call)
            if decision == "refuse":
                show(CallState.REFUSED, DECLINED)
                return
            if decision == "always":
                self.store.change(answer.conversation, allowed_tools=[*allowed, tool.id])
        answer.cancellation.check()
        show(CallState.RUNNING)
        text, failed = self.servers.call(tool, values, answer.cancellation)
        show(CallState.FAILED if failed else CallState.DONE, text)
