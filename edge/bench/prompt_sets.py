"""Prompts and recordings by category, from a file or from the set that comes with edge-run.

The format of a prompt file is recognized by its content, not by its name:

* JSON lines with `turns`, a list of texts: Spec-Bench (`question_id`, `category`, `turns`), and our own set.
* JSON lines with `task_id` and `prompt`: HumanEval.
* JSON lines with `question`: GSM8K and similar sets; with `request`: requests to the bundled model.
* Anything else is plain text: the prompts are its paragraphs if it has blank lines, else its lines.

Recordings have the answers of a model, for replay:

* JSON lines with `category` and `turns`, a list of `{"prompt", "response"}`.
* A chat history of aider, the code-editing assistant (`.aider.chat.history.md`). A line `# aider chat started at ...`
  begins a session. Lines that begin with `#### ` are the user's, and lines that begin with `> ` are notes of aider.
  Other lines are the assistant's answer if the next note says `Tokens: N sent, M received`, else the output of a
  command. Notes between two answers, such as a failed test, are the prompt of the second answer. `/clear` begins a new
  conversation. The history lacks the files that aider showed the model, so a replay understates how much of an answer
  can be copied from the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from ...errors import InputError
from ...models.user_text import json_lines, read_text, text_of, turns_of

SHELL: Final = "shell"
"""Category of the prompts for the bundled model."""
_BUNDLED_PROMPTS: Final = Path(__file__).parent / "prompts.jsonl"
_TEXT: Final = "text"
_CHAT_CATEGORIES: Final = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
"""Categories of MT-Bench, which Spec-Bench counts as one of its six categories."""
_SESSION: Final = re.compile(r"^# aider chat started at \d.*$", re.MULTILINE)
_USER: Final = "#### "
_NOTE: Final = "> "
_COUNTED: Final = "Tokens: "
"""Beginning of the note that follows an answer."""
_CATEGORY: Final = "code editing"


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
    for name, category in (("prompt", "humaneval"), ("question", "questions"), ("request", SHELL)):
        if name in first:
            return [
                Conversation(category, (Exchange(text_of(row, name, path, number)),))
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


def read_recording(path: Path) -> list[Conversation]:
    """Read the conversations of a recording; every exchange has an answer.

    Raises:
        InputError: the file cannot be read, contains no answer, or has a line of another format than its first.
    """
    text = read_text(path)
    if text.lstrip().startswith("{"):
        return [_with_answers(row, path, number) for number, row in enumerate(json_lines(text, path), 1)]
    if _SESSION.search(text):
        if conversations := list(_aider(text)):
            return conversations
        raise InputError(f"{path} contains no answer", "give a chat history in which a model answered")
    hint = "give JSON lines with turns of prompt and response, or a chat history of aider"
    raise InputError(f"{path} is not a recording", hint)


def _with_answers(row: Mapping[str, Any], path: Path, number: int) -> Conversation:
    turns = turns_of(row, path, number)
    if not all(isinstance(turn, dict) for turn in turns):
        raise InputError(f"{path}, row {number}: a turn without an answer", "give prompts alone with --prompts")
    exchanges = [
        Exchange(text_of(turn, "prompt", path, number), text_of(turn, "response", path, number)) for turn in turns
    ]
    return Conversation(text_of(row, "category", path, number) if "category" in row else "recorded", tuple(exchanges))


def _aider(text: str) -> Iterator[Conversation]:
    for session in _SESSION.split(text):
        exchanges: list[Exchange] = []
        prompt = ""
        blocks = [(speaker, [line for _, line in lines]) for speaker, lines in groupby(_spoken(session), itemgetter(0))]
        for (speaker, lines), (next_speaker, following) in zip(blocks, [*blocks[1:], ("", [])], strict=False):
            block = "\n".join(line for line in lines if speaker != _NOTE or not line.startswith(_COUNTED)).strip()
            if speaker == _USER and "/clear" in lines:
                if exchanges:
                    yield Conversation(_CATEGORY, tuple(exchanges))
                exchanges = []
                prompt = "\n".join(lines[lines.index("/clear") + 1 :]).strip()
            elif speaker == _USER:
                prompt = block
            elif speaker == _NOTE:
                # The user's prompt takes precedence over a note, and a note counts only after an answer.
                prompt = prompt or (block if exchanges else "")
            elif next_speaker == _NOTE and any(line.startswith(_COUNTED) for line in following[:3]):
                if prompt and block:
                    exchanges.append(Exchange(prompt, block))
                prompt = ""
        if exchanges:
            yield Conversation(_CATEGORY, tuple(exchanges))


def _spoken(session: str) -> Iterator[tuple[str, str]]:
    """The lines of a session with who speaks: `_USER`, `_NOTE`, or empty for the assistant and for commands."""
    speaker = _USER
    for line in session.split("\n"):
        if line.startswith(_USER):
            speaker, content = _USER, line[len(_USER) :].rstrip()
        elif line == ">" or line.startswith(_NOTE):
            speaker, content = _NOTE, line[2:].rstrip()
        elif not line.strip() and speaker:
            continue  # blank lines separate blocks
        else:
            speaker, content = "", line
        yield speaker, content
