"""Makes the calls of a message, each after the user has agreed to it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from msgspec.structs import replace

from ....errors import CancelledError
from ....runtime.tools.function_tools import DECLINED
from ...conversations.records import CallState, StoredCall
from ..app_context import AppContext
from ..message_generation import MessageGeneration
from .mcp_connection import ServerTool


def make_calls(context: AppContext, generation: MessageGeneration, offered: Mapping[str, ServerTool]) -> None:
    """Make the calls of the last round that have no results, one after another.

    Args:
        context: the store, which knows what is allowed, and the servers that have the tools.
        generation: the message, where the user decides, and which keeps the calls and their results.
        offered: the tools that the message may call, by their names for the model.

    Raises:
        CancelledError: the generation was cancelled; calls without results wait again.
        ConversationError: the conversation was deleted, or the file cannot be written.
    """
    try:
        for call in generation.writer.rounds[-1].calls:
            if call.result is None:
                _make(context, generation, call, offered.get(call.name))
    except CancelledError:
        *before, last = generation.writer.rounds
        generation.set_rounds([*before, last.undecided()])
        raise


def _make(context: AppContext, generation: MessageGeneration, call: StoredCall, tool: ServerTool | None) -> None:
    def show(state: CallState, result: str | None = None) -> None:
        *before, last = generation.writer.rounds
        changed = replace(call, state=state, result=result)
        calls = tuple(changed if each.id == call.id else each for each in last.calls)
        generation.set_rounds([*before, replace(last, calls=calls)])

    try:
        values = json.loads(call.arguments)
    except ValueError:
        values = {}
    values = values if isinstance(values, dict) else {}
    problem = f"there is no tool {call.name} any more" if tool is None else tool.problem(values)
    if tool is None or problem:
        show(CallState.FAILED, f"error: {problem}")
        return
    allowed = context.store.conversation(generation.conversation).allowed_tools
    if tool.id not in allowed:
        decision = generation.wait_for_decision(call.id)
        if decision == "refuse":
            show(CallState.REFUSED, DECLINED)
            return
        if decision == "always":
            context.store.change(generation.conversation, allowed_tools=[*allowed, tool.id])
    generation.cancellation.check()
    show(CallState.RUNNING)
    text, failed = context.tools.call(tool, values, generation.cancellation)
    show(CallState.FAILED if failed else CallState.DONE, text)
