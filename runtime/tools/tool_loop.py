"""A loop in which a model calls Python functions until it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...errors import InputError
from .function_tools import FunctionTool

if TYPE_CHECKING:
    from ..engine import Engine, Prompt
    from ..options import GenerateOptions
    from ..result import Chunk, Reply
    from .calls import ToolCall

MAX_ROUNDS: Final = 8
"""Largest number of answers whose calls are made, where no other is asked for."""
DECLINED: Final = "error: this call was declined"
"""What the model reads in place of the result of a call that was not approved."""


@dataclass(frozen=True)
class ToolRun:
    """How a loop of calls ended."""

    reply: Reply
    """The last answer; it has calls where the limit of rounds was reached, or the loop was cancelled."""
    messages: tuple[Mapping[str, Any], ...]
    """The whole conversation, with calls, results and the last answer."""
    rounds: int
    """Number of answers whose calls were made."""


def run_tools(
    engine: Engine,
    prompt: Prompt,
    tools: Sequence[Callable[..., Any] | FunctionTool],
    options: GenerateOptions | None = None,
    *,
    max_rounds: int = MAX_ROUNDS,
    approve: Callable[[ToolCall], bool] | None = None,
    cancelled: Callable[[], bool] | None = None,
    on_chunk: Callable[[Chunk], None] | None = None,
    **changes: Any,
) -> ToolRun:
    """Answer a prompt; call the functions that the model asks for, and give it their results, until it asks for none.

    What a function raises is given to the model as its result, as are arguments that do not fit its type hints.

    Args:
        engine: the model.
        prompt: what a user says, or the messages of a conversation.
        tools: functions with type hints, or `FunctionTool`s.
        options: options of the answers.
        max_rounds: largest number of answers whose calls are made.
        approve: asked before every call; where it returns False, the model is told that the call was declined.
        cancelled: asked with every piece of an answer and before every call; True ends the loop.
        on_chunk: receives the pieces of all answers.
        changes: options by name.

    Raises:
        EdgeError: an answer cannot be generated.
        InputError: a function cannot be a tool, two have one name, or `max_rounds` is less than 1.
    """
    offered = [each if isinstance(each, FunctionTool) else FunctionTool.of(each) for each in tools]
    by_name = {tool.name: tool for tool in offered}
    if len(by_name) < len(offered):
        raise InputError("two tools have the same name", "give every tool a name of its own")
    if max_rounds < 1:
        raise InputError(f"max_rounds is {max_rounds}", "it must be 1 or more")
    stopped = cancelled or (lambda: False)
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    rounds = 0
    while True:
        reply = _answer(
            engine, messages, options, {**changes, "tools": [t.definition for t in offered]}, stopped, on_chunk
        )
        messages.append(reply.message)
        if not reply.tool_calls or rounds == max_rounds or stopped():
            return ToolRun(reply, tuple(messages), rounds)
        for call in reply.tool_calls:
            if stopped():
                return ToolRun(reply, tuple(messages), rounds)
            allowed = approve is None or approve(call)
            content = by_name[call.name].result(call.values) if allowed else DECLINED
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content})
        rounds += 1


def _answer(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    options: GenerateOptions | None,
    changes: Mapping[str, Any],
    stopped: Callable[[], bool],
    on_chunk: Callable[[Chunk], None] | None,
) -> Reply:
    """One answer of the loop."""
    from ..result import Reply  # noqa: PLC0415 -- result imports this package

    chunks = []
    stream = engine.stream(messages, options, **changes)
    for chunk in stream:
        chunks.append(chunk)
        if on_chunk is not None:
            on_chunk(chunk)
        if chunk.finish_reason is None and stopped():
            stream.cancel()
    return Reply.of(chunks)
