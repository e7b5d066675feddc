"""What a chat template says of reasoning, and words for the choice of a format of calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

AUTO: Final = "auto"
"""The format that the chat template is made for."""
NONE: Final = "none"
"""No format: calls are text."""


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
