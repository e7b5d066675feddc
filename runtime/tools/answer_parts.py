"""The parts of an answer, what a piece of it adds to them, and the tags of reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from .calls import ToolCall, ToolCallDelta, new_call_id

AUTO: Final = "auto"
"""The format that the chat template is made for."""
NONE: Final = "none"
"""No format: calls are text."""


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

    def add_calls(self, calls: Sequence[ToolCall]) -> None:
        """Add whole calls; those without an identifier get one."""
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


class AnswerParser:
    """Takes an answer apart while it is written: a machine whose states read the text that belongs to no part yet.

    Args:
        max_calls: largest number of calls, after which others are left out; None for any number.
    """

    _state: Callable[..., None]
    """Reads what is held, as far as it can; with `ended=True`, nothing follows. It may choose the state after it."""

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


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around the part of an answer in which the model thinks."""

    opening: str
    closing: str


_REASONING: Final = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<|channel>thought\n", "<channel|>"),
)


def reasoning_tags(template: str) -> ReasoningTags | None:
    """The tags of the reasoning that a chat template knows; None if it knows none."""
    return next((tags for tags in _REASONING if tags.closing in template), None)


def in_reasoning(tags: ReasoningTags | None, prompt_end: str) -> bool:
    """Whether a prompt ends with the opening tag of reasoning."""
    return tags is not None and prompt_end.rstrip().endswith(tags.opening.rstrip())
