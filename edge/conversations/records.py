"""Records of the store: conversations, messages, attachments, presets."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from .call_rounds import CallRound

SAMPLING_FIELDS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "seed",
    "stop",
    "overflow",
)
"""Fields of `GenerateOptions` that a conversation or a preset may set."""
MAX_TITLE: Final = 200
"""Most characters of a title, or of the name of a folder or a preset."""
MAX_TEXT: Final = 4_000_000
"""Most characters of a message, of a system message, or of all attachments of a message together."""
MAX_ATTACHMENTS: Final = 32
"""Most attachments of one message."""
MAX_TOOLS: Final = 128
"""Most tools of one conversation."""
_TITLE_LENGTH: Final = 60
_ID_BYTES: Final = 8
_MARKS: Final = "#>*-_` \t"
"""What Markdown begins lines with, and titles do not."""


class MessageState(StrEnum):
    """How the writing of a message went."""

    COMPLETE = "complete"
    WRITING = "writing"
    """An answer that a running process is writing."""
    STOPPED = "stopped"
    """An answer that the user ended."""
    LENGTH = "length"
    """An answer that reached its largest number of tokens, or the end of the context."""
    FAILED = "failed"
    """An answer that an error ended, which `StoredMessage.error` describes."""
    INTERRUPTED = "interrupted"
    """An answer whose process ended before it was finished."""


class Role(StrEnum):
    """Who wrote a message. The system message is a field of the conversation."""

    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Attachment:
    """A text file that belongs to a message."""

    name: str
    text: str


@dataclass(frozen=True)
class Conversation:
    """A conversation without its messages. Times are seconds since 1970."""

    id: str
    title: str
    """Empty until the first message of the user, if the user gave none."""
    titled_by_user: bool
    folder: str | None
    pinned: bool
    system: str
    """System message; empty for none."""
    sampling: Mapping[str, Any]
    """Options of its answers, by the names in `SAMPLING_FIELDS`; those left out are the model's."""
    model: str | None
    leaf: str | None
    """Last message of the branch that is shown; None without messages."""
    created: float
    updated: float
    """When a message was last written."""
    deleted: float | None
    """When it was deleted; None if it was not."""
    tools: tuple[str, ...] = ()
    """Tools that its answers may call, by their ids: `server/tool`."""
    allowed_tools: tuple[str, ...] = ()
    """Those of them that are called without asking the user."""


@dataclass(frozen=True)
class StoredMessage:
    """A message in the tree of a conversation."""

    id: str
    conversation: str
    parent: str | None
    """The message before it; None for a first message."""
    role: Role
    content: str
    attachments: tuple[Attachment, ...] = ()
    created: float = 0.0
    model: str | None = None
    """The model that wrote it, or None."""
    state: MessageState = MessageState.COMPLETE
    error: str | None = None
    stats: Mapping[str, Any] | None = None
    """Statistics of an answer: a JSON object."""
    has_tokens: bool = False
    """Whether `ConversationStore.tokens` has its tokens: those of its content."""
    rounds: tuple[CallRound, ...] = ()
    """Calls of tools that an answer made before it wrote its content."""


@dataclass(frozen=True)
class Preset:
    """A system message and sampling options that have a name."""

    name: str
    system: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchHit:
    """A message, or the title of a conversation, that contains what was searched for."""

    conversation: str
    title: str
    message: str | None
    """The message; None where the title was found."""
    snippet: str
    """The words around the first place, on one line."""


@dataclass(frozen=True)
class ModelUsage:
    """What a model has done in the answers that are kept, also in deleted ones."""

    model: str | None
    answers: int
    read: int
    """Tokens of prompts, without those that were in the KV cache already."""
    generated: int


class ChangeKind(StrEnum):
    """What a change was made to."""

    CONVERSATION = "conversation"
    CONVERSATION_DELETED = "conversation_deleted"
    MESSAGE = "message"
    MESSAGE_DELETED = "message_deleted"
    PRESETS = "presets"
    SETTINGS = "settings"


@dataclass(frozen=True)
class Change:
    """A change that this process made to the store."""

    kind: ChangeKind
    conversation_id: str | None = None
    message_id: str | None = None


def as_object(record: Conversation | StoredMessage | Preset | SearchHit | ModelUsage) -> dict[str, Any]:
    """Return a record as a JSON object."""
    return asdict(record)


def message_text(message: StoredMessage) -> str:
    """The text of a message as the model reads it: its attachments, each in a fence with its name, then the content."""
    parts = [f"{each.name}\n{fenced(each.text)}" for each in message.attachments]
    return "\n\n".join([*parts, message.content] if message.content or not parts else parts)


def new_id() -> str:
    """A new random id."""
    return secrets.token_hex(_ID_BYTES)


def valid_text(text: str) -> str:
    """The text with halves of surrogate pairs replaced by U+FFFD: they have no UTF-8 form."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def title_of(text: str) -> str:
    """A title for a conversation that begins with `text`: its first line, cut at a word; empty if there is none."""
    lines = (" ".join(line.split()).strip(_MARKS) for line in text[: 4 * MAX_TITLE].splitlines())
    line = next(filter(None, lines), "")
    if len(line) <= _TITLE_LENGTH:
        return line
    cut = line[: _TITLE_LENGTH + 1].rpartition(" ")[0] or line[:_TITLE_LENGTH]
    return cut.rstrip(" ,;:.-") + "…"


def fenced(text: str, language: str = "") -> str:
    """A text in a fence that is longer than any in it."""
    longest, run = 0, 0
    for character in text:
        run = run + 1 if character == "`" else 0
        longest = max(longest, run)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.removesuffix(chr(10))}\n{fence}"
