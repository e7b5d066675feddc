"""What is asked in a measurement: conversations by category, from a file or from the set that ships with edge-run.

Prompt files are told apart by what is in them, not by their name:

* JSON lines with `turns`, a list of texts: Spec-Bench (`question_id`, `category`, `turns`), and our own set.
* JSON lines with `task_id` and `prompt`: HumanEval.
* JSON lines with `question`: GSM8K and its like; with `request`: what the bundled model is asked.
* Anything else is plain text: its paragraphs are the prompts if blank lines part it, else its lines.
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
"""The category of our own set that the bundled model was made for."""
OUR_PROMPTS: Final = Path(__file__).parent / "prompts.jsonl"
_TEXT: Final = "text"
_CHAT_CATEGORIES: Final = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
"""MT-Bench's; Spec-Bench counts them as one of its six categories, and so does its reader here."""


@dataclass(frozen=True)
class Exchange:
    """A user's turn and, in a recording, what a model answered."""

    prompt: str
    answer: str | None = None


@dataclass(frozen=True)
class Conversation:
    """Exchanges that build on each other, at least one."""

    category: str
    exchanges: tuple[Exchange, ...]


def read_prompts(path: Path) -> list[Conversation]:
    """The conversations of a prompt file.

    Raises:
        InputError: the file cannot be read, holds no prompt, or has a line that is not like its first.
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
        f"{path} holds no prompts: its first line has {', '.join(sorted(first)) or 'no fields'}",
        "give lines with turns, prompt, question or request, or plain text",
    )


def our_prompts(*, for_shell: bool) -> list[Conversation]:
    """The set that ships with edge-run: requests for the bundled model, or everything else."""
    return [each for each in read_prompts(OUR_PROMPTS) if (each.category == SHELL) == for_shell]


def chosen(conversations: Sequence[Conversation], limit: int | None) -> list[Conversation]:
    """The first `limit` conversations of every category, the categories in turn.

    A machine's speed drifts over minutes; taken in turn, every category meets the same drift.
    """
    by_category: dict[str, list[Conversation]] = {}
    for each in conversations:
        by_category.setdefault(each.category, []).append(each)
    rows = zip_longest(*(group[:limit] for group in by_category.values()))
    return [each for row in rows for each in row if each is not None]


def counts(conversations: Sequence[Conversation]) -> Mapping[str, int]:
    """Conversations by category, in the order of their first."""
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
    paragraphs = [part.strip() for part in text.replace("\r\n", "\n").split("\n\n") if part.strip()]
    prompts = paragraphs if len(paragraphs) > 1 else [line.strip() for line in text.splitlines() if line.strip()]
    if any("\0" in prompt for prompt in prompts):
        raise InputError(f"{path} is not text", "give JSON lines or plain text")
    return [Conversation(_TEXT, (Exchange(prompt),)) for prompt in prompts]
