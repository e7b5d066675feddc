"""The parts of an answer, what a piece of it adds to them, and the tags of reasoning."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from .calls import ToolCall, new_call_id

AUTO: Final = "auto"
"""The format that the chat template is made for."""
NONE: Final = "none"
"""No format: calls are text."""


@dataclass(frozen=True)
class AnswerParts:
    """The parts of an answer, or what a piece of it adds to them."""

    text: str
    reasoning: str = field(default="", kw_only=True)
    """What the model thinks before it answers, which is not part of the text."""
    tool_calls: tuple[ToolCall, ...] = field(default=(), kw_only=True)
    """The calls of functions that the model asks for."""
    unparsed: bool = field(default=False, kw_only=True)
    """Whether some of the text begins like a call and is not one: it is not complete, or of no function that was
    offered."""


def joined_parts(pieces: Sequence[AnswerParts]) -> dict[str, Any]:
    """The fields of `AnswerParts` for all of an answer, given its pieces."""
    return {
        "text": "".join(each.text for each in pieces),
        "reasoning": "".join(each.reasoning for each in pieces),
        "tool_calls": tuple(call for each in pieces for call in each.tool_calls),
        "unparsed": any(each.unparsed for each in pieces),
    }


class AnswerParser(ABC):
    """Takes an answer apart while it is written.

    Args:
        max_calls: largest number of calls, after which others are left out; None for any number.
    """

    def __init__(self, max_calls: int | None) -> None:
        self._held = ""
        """Text that has arrived and belongs to no part yet."""
        self._ended = False
        """Whether no more text follows."""
        self._reading = self._read()
        self._text = self._reasoning = ""
        """What the latest piece adds to the text that users see, and to the reasoning."""
        self._calls: list[ToolCall] = []
        self._unparsed = False
        """Whether some of the text began like a call and is not one."""
        self._most_calls = math.inf if max_calls is None else max_calls
        self._count = 0
        """Number of calls of the answer so far."""

    def push(self, text: str) -> AnswerParts:
        """Read a piece of the answer."""
        self._held += text
        next(self._reading, None)
        parts = AnswerParts(
            self._text, reasoning=self._reasoning, tool_calls=tuple(self._calls), unparsed=self._unparsed
        )
        self._text, self._reasoning, self._calls, self._unparsed = "", "", [], False
        return parts

    def finish(self) -> AnswerParts:
        """Read its end: what was held back until now."""
        self._ended = True
        return self.push("")

    @abstractmethod
    def _read(self) -> Iterator[None]:
        """Read what is held, and yield whenever more text is needed; end with the answer."""

    def _add_calls(self, calls: Sequence[ToolCall]) -> None:
        """Add whole calls, as many as there may be; those without an identifier get one."""
        for call in calls:
            if self._count < self._most_calls:
                self._calls.append(replace(call, id=call.id or new_call_id(), index=self._count))
                self._count += 1


class ReasoningTags(NamedTuple):
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
