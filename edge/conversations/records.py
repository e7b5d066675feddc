"""Records of the store: conversations, messages, attachments, calls of tools, presets."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from ...errors import ConversationError
from ...models.user_text import on_one_line
from ...runtime.images.decoding import kept_image
from ...runtime.tools.calls import ToolCall, assistant_message

_Record = TypeVar("_Record")
NOT_MADE: Final = "error: this call was not made"
"""Result of a call that nobody has decided about, as the model reads it."""
_OPENING: Final = "<think>\n"
_CLOSING: Final = "\n</think>\n\n"
_WRITTEN: Final = re.compile(r"\s*<think(?:ing)?>(.*?)(?:</think(?:ing)?>\s*|\Z)", re.DOTALL)
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
MAX_IMAGES: Final = 40_000_000
"""Most characters of all images of a message together."""
MAX_ATTACHMENTS: Final = 32
"""Most attachments of one message."""
MAX_DOCUMENTS: Final = 32
"""Most folders and files that one conversation is answered from."""
MAX_TOOLS: Final = 128
"""Most tools of one conversation."""
_TITLE_LENGTH: Final = 60
NO_PASSAGE: Final = "no passage of the documents fits the question"
_BEFORE: Final = "Answer from these passages of documents where they help, and name those that you use by number.\n\n"
_UNSAFE: Final = re.compile(r"[^\w .,()-]+")
_MARKS: Final = "#>*-_` \t"
"""What Markdown begins lines with, and titles do not."""


Line: TypeAlias = Annotated[str, Meta(max_length=MAX_TITLE)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]


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


class StoredCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call of a tool."""

    id: Line
    name: Line
    """Name of the tool, as the model knows it."""
    arguments: Text
    """A JSON object as text."""
    state: CallState = CallState.WAITING
    result: Text | None = None
    """What the model reads; None while there is no result."""


class CallRound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer wrote, and the calls that it ended with then."""

    text: Text
    """Reasoning and text, as the content of a message has them."""
    calls: tuple[StoredCall, ...]

    @property
    def decided(self) -> bool:
        """Whether all calls have results."""
        return all(call.result is not None for call in self.calls)

    def undecided(self) -> CallRound:
        """The round with the calls that have no result waiting: a tool that was running has ended with its process."""
        calls = tuple(replace(each, state=CallState.WAITING) if each.result is None else each for each in self.calls)
        return replace(self, calls=calls)

    def messages(self) -> list[dict[str, Any]]:
        """The round in the form of OpenAI's chat API: the answer, then the results of its calls."""
        reasoning, text = split_reasoning(self.text)
        calls = [ToolCall(call.id, call.name, call.arguments) for call in self.calls]
        results = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": call.result or NOT_MADE}
            for call in self.calls
        ]
        return [assistant_message(text, reasoning, calls), *results]


def answer_of(messages: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[CallRound, ...]]:
    """The content of an answer, and its calls before that, from messages as templates read them, after the user's."""
    results = {each.get("tool_call_id"): parted(each["content"])[0] for each in messages if each["role"] == "tool"}
    content, rounds = "", []
    for each in messages:
        if each["role"] != Role.ASSISTANT:
            continue
        content = ReasoningText().push(each.get("reasoning_content", ""), parted(each["content"])[0])
        if "tool_calls" in each:
            calls = tuple(
                StoredCall(
                    call.get("id", ""),
                    call["function"]["name"],
                    json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    CallState.DONE,
                    results.get(call.get("id"), NOT_MADE),
                )
                for call in each["tool_calls"]
            )
            rounds.append(CallRound(content, calls))
            content = ""
    return content, tuple(rounds)


def records_of(kind: type[_Record], value: Any) -> tuple[_Record, ...]:
    """The records of a stored JSON value; none if it is damaged."""
    try:
        return msgspec.convert(value or (), tuple[kind, ...])  # type: ignore[valid-type]
    except msgspec.ValidationError:
        return ()


class ReasoningText:
    """Writes the parts of an answer as one text, whatever tags the model itself has for its reasoning."""

    def __init__(self) -> None:
        self._reasons = False

    def push(self, reasoning: str, text: str) -> str:
        """The text for the next parts of the answer."""
        written = ""
        if reasoning:
            written = reasoning if self._reasons else _OPENING + reasoning
            self._reasons = True
        if text:
            written += _CLOSING + text if self._reasons else text
            self._reasons = False
        return written


def split_reasoning(content: str) -> tuple[str, str]:
    """The reasoning that a kept answer begins with, and the rest of it."""
    found = _WRITTEN.match(content)
    return ("", content) if found is None else (found[1].strip(), content[found.end() :])


class Passage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a document, or a whole one, that an answer was given to read."""

    source: Text
    """The file: the name of the folder, and the path in it."""
    line: Annotated[int, Meta(ge=1, le=2**53)]
    """Number of its first line."""
    text: Text


def source_lines(passages: Sequence[Passage]) -> list[str]:
    """The sources of passages as they are listed under an answer: number, file, and the line where each begins."""
    return [f"[{number}] {on_one_line(each.source)}:{each.line}" for number, each in enumerate(passages, 1)]


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


class Attachment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A text file or an image that belongs to a message."""

    name: str
    text: str
    image: str | None = None
    """A `data:` URL; `text` is empty then."""


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
    documents: tuple[str, ...] = ()
    """Paths of the folders and files that it is answered from."""


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
    """Whether `ConversationStore.tokens` has the tokens of its content."""
    rounds: tuple[CallRound, ...] = ()
    """Calls of tools that an answer made before it wrote its content."""
    passages: tuple[Passage, ...] = ()
    """Parts of documents that an answer was given to read, by their numbers from 1; stored with the answer."""


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


class ChangeKind(StrEnum):
    """What a change was made to."""

    CONVERSATION = "conversation"
    CONVERSATION_DELETED = "conversation_deleted"
    MESSAGE = "message"
    MESSAGE_DELETED = "message_deleted"
    SETTINGS = "settings"


def message_text(message: StoredMessage) -> str:
    """The text of a message as the model reads it: its files, each in a fence with its name, then the content.

    Passages that were found for a message of the user come before them.
    """
    parts = [f"{each.name}\n{fenced(each.text)}" for each in message.attachments if each.image is None]
    text = "\n\n".join([*parts, message.content] if message.content or not parts else parts)
    return with_passages(text, message.passages) if message.role is Role.USER else text


def with_images(message: StoredMessage, text: str) -> str | list[dict[str, Any]]:
    """A message's text as a model reads it, after the images that belong to the message."""
    images = [{"type": "image", "image": each.image} for each in message.attachments if each.image is not None]
    return [*images, {"type": "text", "text": text}] if images else text


def parted(content: str | Sequence[Mapping[str, Any]]) -> tuple[str, list[Attachment]]:
    """The text of a checked message, and its images as they are kept with it."""
    parts: Sequence[Mapping[str, Any]] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    images = [each["image"] for each in parts if each["type"] == "image"]
    kept = [Attachment(f"image {number}", "", kept_image(each)) for number, each in enumerate(images, 1)]
    return "\n".join(each["text"] for each in parts if each["type"] == "text"), kept


def with_passages(question: str, passages: Sequence[Passage]) -> str:
    """A question as the model reads it: numbered passages with their sources before it."""
    return f"{_BEFORE}{passage_entries(passages)}{question}" if passages else question


def passage_entries(passages: Sequence[Passage]) -> str:
    """Passages as the model reads them, each in a fence below its source."""
    lines = source_lines(passages)
    return "".join(f"{line}\n{fenced(each.text)}\n\n" for line, each in zip(lines, passages, strict=True))


def require_length(
    size: int, most: int, what: str, have: str = "has", unit: str = "characters", done: str = "kept"
) -> None:
    """Raise if something is too long to be kept, or read.

    Raises:
        ConversationError: it is.
    """
    if size > most:
        raise ConversationError(f"{what} {have} {size} {unit}", f"at most {most} are {done}")


def new_id() -> str:
    """A new random id."""
    return secrets.token_hex(8)


def valid_text(text: str) -> str:
    """The text with halves of surrogate pairs replaced by U+FFFD: they have no UTF-8 form."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def title_of(text: str) -> str:
    """A title for a conversation that begins with `text`: its first line, cut at a word; empty if there is none."""
    lines = (" ".join(line.split()).strip(_MARKS) for line in text[: 4 * MAX_TITLE].splitlines())
    line = next(filter(None, lines), "")
    if len(line) <= _TITLE_LENGTH:
        return line
    cut = line[: _TITLE_LENGTH + 1].rpartition(" ")[0] or line[:_TITLE_LENGTH]
    return cut.rstrip(" ,;:.-") + "…"


def safe_file_name(name: str, default: str) -> str:
    """A file name of letters, digits and a few other characters, from a name that may be any text."""
    return _UNSAFE.sub("_", name)[-120:].strip(" .") or default


def fenced(text: str, language: str = "") -> str:
    """A text in a fence that is longer than any in it."""
    fence = "`" * max(len(run) + 1 for run in ["``", *re.findall("`+", text)])
    return f"{fence}{language}\n{text.removesuffix(chr(10))}\n{fence}"
