"""Makes the calls of a message, each after the user has agreed to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from ....errors import CancelledError
from ....runtime.tools.function_tools import DECLINED
from ...conversations.records import CallState, StoredCall
from ..app_context import AppContext
from ..message_generation import Decision, MessageGeneration
from .tool_servers import OfferedTool


def make_calls(context: AppContext, generation: MessageGeneration, offered: Sequence[OfferedTool]) -> None:
    """Make the calls of the last round that have no results, one after another.

    Args:
        context: the store, which knows what is allowed, and the servers that have the tools.
        generation: the message, where the user decides, and which keeps the calls and their results.
        offered: the tools that the message may call.

    Raises:
        CancelledError: the generation was cancelled; calls without results wait again.
        ConversationError: the conversation was deleted, or the file cannot be written.
    """
    tools = {each.name: each for each in offered}
    try:
        for call in generation.writer.rounds[-1].calls:
            if not call.decided:
                _make(context, generation, call, tools.get(call.name))
    except CancelledError:
        *before, last = generation.writer.rounds
        generation.set_rounds([*before, last.undecided()])
        raise


def _make(context: AppContext, generation: MessageGeneration, call: StoredCall, offered: OfferedTool | None) -> None:
    def show(state: CallState, result: str | None = None) -> None:
        *before, last = generation.writer.rounds
        generation.set_rounds([*before, last.with_call(replace(call, state=state, result=result))])

    values = _values(call.arguments)
    problem = f"there is no tool {call.name} any more" if offered is None else offered.problem(values)
    if offered is None or problem:
        show(CallState.FAILED, f"error: {problem}")
        return
    allowed = context.store.conversation(generation.conversation).allowed_tools
    if offered.tool.id not in allowed:
        decision = generation.wait_for_decision(call.id)
        if decision is Decision.REFUSE:
            show(CallState.REFUSED, DECLINED)
            return
        if decision is Decision.ALWAYS:
            context.store.change(generation.conversation, allowed_tools=[*allowed, offered.tool.id])
    generation.cancellation.check()
    show(CallState.RUNNING)
    result = context.tools.call(offered.tool, values, generation.cancellation)
    show(CallState.FAILED if result.failed else CallState.DONE, result.text)


def _values(arguments: str) -> dict[str, Any]:
    """The arguments by name; none if they are not an object."""
    try:
        values = json.loads(arguments)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
