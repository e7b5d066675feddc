"""Rounds of calls of tools, which an answer made before its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

from .reasoning_text import split_reasoning

NOT_MADE: Final = "error: this call was not made"
"""Result of a call that nobody has decided about, as the model reads it."""


class CallState(StrEnum):
    """How far a call is."""

    WAITING = "waiting"
    """The user has not decided yet."""
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """The tool reported an error, which is the result."""
    REFUSED = "refused"
    """The user did not want it."""


@dataclass(frozen=True)
class StoredCall:
    """A call of a tool."""

    id: str
    name: str
    """Name of the tool, as the model knows it."""
    arguments: str
    """A JSON object as text."""
    state: CallState = CallState.WAITING
    result: str | None = None
    """What the model reads; None while there is no result."""

    @property
    def decided(self) -> bool:
        """Whether it has a result."""
        return self.result is not None


@dataclass(frozen=True)
class CallRound:
    """What an answer wrote, and the calls that it ended with then."""

    text: str
    """Reasoning and text, as the content of a message has them."""
    calls: tuple[StoredCall, ...]

    @property
    def decided(self) -> bool:
        """Whether all calls have results."""
        return all(call.decided for call in self.calls)

    def with_call(self, call: StoredCall) -> CallRound:
        """The round with another state of one of its calls."""
        return replace(self, calls=tuple(call if each.id == call.id else each for each in self.calls))

    def undecided(self) -> CallRound:
        """The round with the calls that have no result waiting: a tool that was running has ended with its process."""
        calls = tuple(each if each.decided else replace(each, state=CallState.WAITING) for each in self.calls)
        return replace(self, calls=calls)

    def messages(self) -> list[dict[str, Any]]:
        """The round in the form of OpenAI's chat API: the answer, then the results of its calls."""
        reasoning, text = split_reasoning(self.text)
        answer: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            answer["reasoning_content"] = reasoning
        answer["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        results = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": call.result or NOT_MADE}
            for call in self.calls
        ]
        return [answer, *results]


def rounds_of(value: Any) -> tuple[CallRound, ...]:
    """The rounds of a JSON value that `rounds_object` made; none if it is damaged."""
    try:
        return tuple(
            CallRound(
                str(each["text"]),
                tuple(
                    StoredCall(
                        str(call["id"]),
                        str(call["name"]),
                        str(call["arguments"]),
                        CallState(call["state"]),
                        None if call["result"] is None else str(call["result"]),
                    )
                    for call in each["calls"]
                ),
            )
            for each in value or ()
        )
    except (KeyError, TypeError, ValueError):
        return ()


def rounds_object(rounds: Sequence[CallRound]) -> list[dict[str, Any]]:
    """Rounds as a JSON value."""
    return [asdict(each) for each in rounds]
