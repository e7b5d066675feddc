"""Writes the branch of a conversation as Markdown, and reads such texts.

    # Title

    ## System

    ## User

    ## Assistant (model)

A line of a message that looks like one of the lower headings gets a backslash in front, which Markdown does not show,
and so does one that has backslashes there already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...errors import ConversationError
from .call_rounds import CallRound
from .records import MAX_TITLE, Conversation, Role, StoredMessage, fenced, message_text

_FLAGS: Final = re.IGNORECASE | re.MULTILINE | re.ASCII
_HEADING: Final = re.compile(r"^## (System|User|Assistant)(?: \((.{1,200})\))?[ \t]*$", _FLAGS)
_LOOKS_LIKE_HEADING: Final = re.compile(r"^(?=\\*## (?:System|User|Assistant)\b)", _FLAGS)
_ESCAPED: Final = re.compile(r"^\\(?=\\*## (?:System|User|Assistant)\b)", _FLAGS)
_TITLE: Final = re.compile(r"^# (.+)$", re.MULTILINE)
_MAX_CHARACTERS: Final = 50_000_000


@dataclass(frozen=True)
class MarkdownMessage:
    """A message of a Markdown text."""

    role: Role
    content: str
    model: str | None


@dataclass(frozen=True)
class MarkdownConversation:
    """What a Markdown text says."""

    title: str
    system: str
    messages: tuple[MarkdownMessage, ...]


def as_markdown(conversation: Conversation, branch: Sequence[StoredMessage]) -> str:
    """A branch as Markdown: headings for the title and for who wrote each message."""
    parts = [f"# {conversation.title}"] if conversation.title else []
    if conversation.system:
        parts += ["## System", _escaped(conversation.system)]
    for message in branch:
        heading = f"## {message.role.value.capitalize()}"
        if message.model:
            heading += f" ({_shown_model(message.model)})"
        parts += [heading, *(_escaped(_shown_round(each)) for each in message.rounds)]
        if message.content or not message.rounds:
            parts.append(_escaped(message_text(message)))
    return "\n\n".join(parts) + "\n"


def _shown_round(round_of_calls: CallRound) -> str:
    """What an answer wrote and the calls that it made then, as Markdown."""
    parts = [round_of_calls.text.strip()] if round_of_calls.text.strip() else []
    for call in round_of_calls.calls:
        parts += [f"**Call of {call.name}** ({call.state.value})", fenced(_pretty(call.arguments), "json")]
        if call.result is not None:
            parts += ["**Result**", fenced(call.result)]
    return "\n\n".join(parts)


def _pretty(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, indent=2)
    except ValueError:
        return arguments


def _shown_model(model: str) -> str:
    """The name of a model, without the folders of a path: such a text is given to others."""
    return Path(model).name if Path(model).is_absolute() else model


def read_markdown(text: str, name: str) -> MarkdownConversation:
    """Read a Markdown text with headings as `as_markdown` writes them.

    Args:
        text: the text.
        name: name of the file, which is the title if the text has none.

    Raises:
        ConversationError: the text has no message of a user, or is too long.
    """
    if len(text) > _MAX_CHARACTERS:
        raise ConversationError(f"{name} has {len(text)} characters", f"at most {_MAX_CHARACTERS} are read")
    text = text.replace("\r\n", "\n").removeprefix("\ufeff")
    headings = list(_HEADING.finditer(text))
    starts = [*(heading.start() for heading in headings), len(text)]
    title = _TITLE.search(text, 0, starts[0])
    system = ""
    messages: list[MarkdownMessage] = []
    for heading, end in zip(headings, starts[1:], strict=True):
        role, content = heading[1].lower(), _ESCAPED.sub("", text[heading.end() : end].strip("\n"))
        if role == "system":
            system = content
        else:
            messages.append(MarkdownMessage(Role(role), content, heading[2]))
    if not any(message.role is Role.USER for message in messages):
        raise ConversationError(
            f"{name} has no message of a user", "messages follow the headings '## User' and '## Assistant'"
        )
    name = title[1] if title is not None else name.removesuffix(".md")
    return MarkdownConversation(name[:MAX_TITLE], system, tuple(messages))


def _escaped(text: str) -> str:
    return _LOOKS_LIKE_HEADING.sub(r"\\", text)
