"""Makes the calls of an answer, each after the user has agreed to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from ....errors import CancelledError
from ....runtime.tools.function_tools import DECLINED
from ...conversations.answering import AnswerWriter
from ...conversations.records import CallRound, CallState, StoredCall
from ...conversations.store import ConversationStore
from ..live_answer import Decision, LiveAnswer
from .tool_servers import OfferedTool, ToolServers


class CallMaker:
    """Makes the calls that an answer ended with.

    Args:
        store: the conversations, which know what is allowed.
        servers: the servers that have the tools.
        offered: the tools that the answer may call.
    """

    def __init__(self, store: ConversationStore, servers: ToolServers, offered: Sequence[OfferedTool]) -> None:
        self._store: Final = store
        self._servers: Final = servers
        self._offered: Final = {each.name: each for each in offered}

    def make(self, live: LiveAnswer, writer: AnswerWriter) -> None:
        """Make the calls of the last round that have no results, one after another.

        Args:
            live: the answer, where the user decides.
            writer: keeps the calls and their results.

        Raises:
            CancelledError: the answer was cancelled; calls without results wait again.
            ConversationError: the conversation was deleted, or the file cannot be written.
        """
        live.show_rounds(writer.rounds)
        try:
            for call in writer.rounds[-1].calls:
                if not call.decided:
                    self._make(call, live, writer)
        except CancelledError:
            _keep(live, writer, [*writer.rounds[:-1], writer.rounds[-1].undecided()])
            raise

    def _make(self, call: StoredCall, live: LiveAnswer, writer: AnswerWriter) -> None:
        def show(state: CallState, result: str | None = None) -> None:
            changed = writer.rounds[-1].with_call(replace(call, state=state, result=result))
            _keep(live, writer, [*writer.rounds[:-1], changed])

        offered, values = self._offered.get(call.name), _values(call.arguments)
        problem = f"there is no tool {call.name} any more" if offered is None else offered.problem(values)
        if offered is None or problem:
            show(CallState.FAILED, f"error: {problem}")
            return
        allowed = self._store.conversation(live.conversation).allowed_tools
        if offered.tool.id not in allowed:
            decision = live.approvals.wait(call.id, live.cancellation)
            if decision is Decision.REFUSE:
                show(CallState.REFUSED, DECLINED)
                return
            if decision is Decision.ALWAYS:
                self._store.change(live.conversation, allowed_tools=[*allowed, offered.tool.id])
        live.cancellation.check()
        show(CallState.RUNNING)
        result = self._servers.call(offered.tool, values, live.cancellation)
        show(CallState.FAILED if result.failed else CallState.DONE, result.text)


def _values(arguments: str) -> dict[str, Any]:
    """The arguments by name; none if they are not an object."""
    try:
        values = json.loads(arguments)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _keep(live: LiveAnswer, writer: AnswerWriter, rounds: Sequence[CallRound]) -> None:
    """Write the rounds, and show them."""
    writer.begin_round(rounds)
    live.show_rounds(writer.rounds)
