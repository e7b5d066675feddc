"""Prompts by category, from a file or from the set that comes with edge-run.

The format of a prompt file is recognized by its content, not by its name:

* JSON lines with `turns`, a list of texts: Spec-Bench (`question_id`, `category`, `turns`), and our own set.
* JSON lines with `task_id` and `prompt`: HumanEval.
* JSON lines with `question`: GSM8K and similar sets; with `request`: requests to the bundled model.
* Anything else is plain text: the prompts are its paragraphs if it has blank lines, else its lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from ...errors import InputError
from ...models.text_files import json_lines, read_text, text_of, turns_of

SHELL: Final = "shell"
"""Category of the prompts for the bundled model."""
_BUNDLED_PROMPTS: Final = Path(__file__).parent / "prompts.jsonl"
_TEXT: Final = "text"
_CHAT_CATEGORIES: Final = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
"""Categories of MT-Bench, which Spec-Bench counts as one of its six categories."""


@dataclass(frozen=True)
class Exchange:
    """The prompt of a user and, in a recording, the answer of a model."""

    prompt: str
    answer: str | None = None


@dataclass(frozen=True)
class Conversation:
    """One or more exchanges, each of which continues those before it."""

    category: str
    exchanges: tuple[Exchange, ...]


def read_prompts(path: Path) -> list[Conversation]:
    """Read the conversations of a prompt file.

    Raises:
        InputError: the file cannot be read, contains no prompt, or has a line of another format than its first.
    """
    text = read_text(path)
    if not text.lstrip().startswith("{"):
        return _plain(text, path)
    rows = json_lines(text, path)
    first = rows[0]
    if "turns" in first:
        return [_with_turns(row, path, number) for number, row in enumerate(rows, 1)]
    for field, category in (("prompt", "humaneval"), ("question", "questions"), ("request", SHELL)):
        if field in first:
            return [
                Conversation(category, (Exchange(text_of(row, field, path, number)),))
                for number, row in enumerate(rows, 1)
            ]
    raise InputError(
        f"{path} contains no prompts: its first line has {', '.join(sorted(first)) or 'no fields'}",
        "give lines with turns, prompt, question or request, or plain text",
    )


def bundled_prompts(*, for_shell: bool) -> list[Conversation]:
    """The prompts that come with edge-run: shell requests for the bundled model, or all others."""
    return [each for each in read_prompts(_BUNDLED_PROMPTS) if (each.category == SHELL) == for_shell]


def limit_per_category(conversations: Sequence[Conversation], limit: int | None) -> list[Conversation]:
    """The first `limit` conversations of every category, the categories alternating.

    The speed of a machine drifts over minutes; alternating spreads the drift over all categories.
    """
    by_category: dict[str, list[Conversation]] = {}
    for each in conversations:
        by_category.setdefault(each.category, []).append(each)
    rows = zip_longest(*(group[:limit] for group in by_category.values()))
    return [each for row in rows for each in row if each is not None]


def count_by_category(conversations: Sequence[Conversation]) -> Mapping[str, int]:
    """Number of conversations by category, in the order of their first conversation."""
    return Counter(each.category for each in conversations)


def _with_turns(row: Mapping[str, Any], path: Path, number: int) -> Conversation:
    category = text_of(row, "category", path, number) if "category" in row else "prompts"
    if "question_id" in row and category in _CHAT_CATEGORIES:
        category = "mt_bench"
    turns = turns_of(row, path, number)
    if isinstance(turns[0], dict):
        raise InputError(f"{path} is a recording", "give it with --replay")
    return Conversation(category, tuple(Exchange(text_of({"a turn": turn}, "a turn", path, number)) for turn in turns))


def _plain(text: str, path: Path) -> list[Conversation]:
    paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
    prompts = paragraphs if len(paragraphs) > 1 else [line.strip() for line in text.splitlines() if line.strip()]
    if any("\0" in prompt for prompt in prompts):
        raise InputError(f"{path} is not text", "give JSON lines or plain text")
    return [Conversation(_TEXT, (Exchange(prompt),)) for prompt in prompts]
