"""The parts of an answer, and what a piece of it adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from .calls import ToolCallDelta, WrittenCall, new_call_id


@dataclass(frozen=True)
class AnswerParts:
    """What a piece of an answer adds to its parts."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    unparsed: bool = False
    """Whether some of the text began like a call and is not one."""


class PartsCollector:
    """Collects the parts that one piece of an answer adds.

    Args:
        max_calls: largest number of calls, after which others are left out; None for any number.
    """

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._unparsed = False
        self._count = 0
        """Number of calls of the answer so far."""

    def add_text(self, text: str) -> None:
        """Add text that users see."""
        self._texts.append(text)

    def add_reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._reasoning.append(text)

    def add_calls(self, calls: Sequence[WrittenCall]) -> None:
        """Add whole calls."""
        left = None if self._max_calls is None else max(self._max_calls - self._count, 0)
        for call in calls[:left]:
            self._calls.append(ToolCallDelta(self._count, call.id or new_call_id(), call.name, call.arguments))
            self._count += 1

    def add_unparsed(self) -> None:
        """Say that some of the text began like a call."""
        self._unparsed = True

    def take(self) -> AnswerParts:
        """The parts that were added since this was last called."""
        parts = AnswerParts("".join(self._texts), "".join(self._reasoning), tuple(self._calls), unparsed=self._unparsed)
        self._texts, self._reasoning, self._calls, self._unparsed = [], [], [], False
        return parts


class _State(Protocol):
    """Reads what is held, as far as it can; `ended` if nothing follows. It may choose the state after it."""

    def __call__(self, *, ended: bool) -> None: ...


class AnswerParser:
    """Takes an answer apart while it is written: a machine whose states read the text that belongs to no part yet.

    Args:
        max_calls: largest number of calls, after which others are left out; None for any number.
    """

    _state: _State

    def __init__(self, max_calls: int | None) -> None:
        self._parts: Final = PartsCollector(max_calls)
        self._held = ""
        """Text that was read and belongs to no part yet."""

    def push(self, text: str) -> AnswerParts:
        """Read a piece of the answer."""
        self._held += text
        self._run(ended=False)
        return self._parts.take()

    def finish(self) -> AnswerParts:
        """Read its end: what was held back until now."""
        self._run(ended=True)
        return self._parts.take()

    def _run(self, *, ended: bool) -> None:
        """Read what is held until nothing more can be said of it."""
        while True:
            state, before = self._state, self._held
            state(ended=ended)
            if state == self._state and before == self._held:
                break


def beginning_at_end(text: str, sign: str) -> int:
    """Length of the longest end of `text` that is a beginning of `sign`, and not all of it."""
    return next((n for n in range(min(len(text), len(sign) - 1), 0, -1) if text.endswith(sign[:n])), 0)
