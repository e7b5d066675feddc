"""Writes conversations as JSON or Markdown, and reads such texts.

JSON has whole trees of messages. It is read strictly, all or nothing, with new ids. Markdown has one branch:

    # Title

    ## System

    ## User

    ![Name](data:image/png;base64,...)

    ## Assistant (model)

A line of a message that looks like one of the lower headings gets a backslash in front, which Markdown does not show,
and so does one that has backslashes there already.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ...errors import ConversationError
from .conversation_table import as_json, checked_fields, checked_line
from .message_table import (
    NO_QUESTION,
    MessageTable,
    checked_content,
    encoded_attachments,
    encoded_records,
    encoded_rounds,
)
from .records import (
    MAX_TITLE,
    Attachment,
    CallRound,
    ChangeKind,
    Conversation,
    Line,
    MessageState,
    Passage,
    Role,
    StoredMessage,
    Text,
    fenced,
    message_text,
    new_id,
    require_length,
    source_lines,
    valid_text,
)

_MAX_CHARACTERS: Final = 200_000_000
_Id = Annotated[str, Meta(min_length=1, max_length=100)]
_Count = Annotated[int, Meta(ge=0, le=2**53)]
_Measure = Annotated[float, Meta(ge=0)]
_Time = Annotated[float, Meta(ge=0, le=1e11)]
_FLAGS: Final = re.IGNORECASE | re.MULTILINE | re.ASCII
_HEADING: Final = re.compile(r"^## (System|User|Assistant)(?: \((.{1,200})\))?[ \t]*$", _FLAGS)
_LOOKS_LIKE_HEADING: Final = re.compile(r"^(?=\\*## (?:System|User|Assistant)\b)", _FLAGS)
_ESCAPED: Final = re.compile(r"^\\(?=\\*## (?:System|User|Assistant)\b)", _FLAGS)
_IMAGE: Final = re.compile(r"^!\[([^\]\n]*)\]\((data:image/[a-z]+;base64,[\w+/=]*)\)\n*", re.MULTILINE)
_NOT_IN_BRACKETS: Final = re.compile(r"[\[\]\n]")
_TITLE: Final = re.compile(r"^# (.+)$", re.MULTILINE)
_MAX_MARKDOWN: Final = 50_000_000


class _DraftCounts(msgspec.Struct, forbid_unknown_fields=True):
    drafted: _Count
    accepted: _Count


class _Stats(msgspec.Struct, forbid_unknown_fields=True):
    """What `stats_object` writes; the page calculates with it."""

    tokens: _Count | UnsetType = UNSET
    tokens_per_second: _Measure | UnsetType = UNSET
    first_token_s: _Measure | UnsetType = UNSET
    total_s: _Measure | UnsetType = UNSET
    prompt_tokens: _Count | UnsetType = UNSET
    reused_tokens: _Count | UnsetType = UNSET
    int8_prompt_tokens: _Count | UnsetType = UNSET
    tokens_per_pass: _Measure | UnsetType = UNSET
    drafted: _Count | UnsetType = UNSET
    accepted: _Count | UnsetType = UNSET
    drafters: dict[Line, _DraftCounts] | UnsetType = UNSET
    trimmed: list[_Id] | UnsetType = UNSET
    small_talk: bool | UnsetType = UNSET
    tools_ignored: bool | UnsetType = UNSET
    no_passage: bool | UnsetType = UNSET


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    id: _Id
    role: Role
    content: Text
    created: _Time
    parent: _Id | None = None
    attachments: list[Attachment] = []
    model: Line | None = None
    state: MessageState = MessageState.COMPLETE
    error: Text | None = None
    stats: _Stats | None = None
    tokens: list[Any] = []
    """What files may have, and is not kept."""
    rounds: list[CallRound] = []
    passages: list[Passage] = []


class ImportedConversation(msgspec.Struct, forbid_unknown_fields=True):
    """A conversation of a file that is read."""

    title: Line
    created: _Time
    updated: _Time
    messages: list[_Message]
    titled_by_user: bool = True
    folder: Line | None = None
    pinned: bool = False
    system: Text = ""
    sampling: dict[str, Any] = {}
    model: Line | None = None
    leaf: _Id | None = None
    tools: list[Line] = []


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal["edge-run conversations"]
    version: Literal[1]
    conversations: list[ImportedConversation]


def as_json_file(store: MessageTable, ids: Sequence[str]) -> str:
    """Conversations with all their branches as a JSON text.

    Raises:
        ConversationError: there is no such conversation.
    """

    def exported(record: Conversation | StoredMessage, *left_out: str) -> dict[str, Any]:
        """A record without ids that say nothing elsewhere, and without what is empty."""
        fields = msgspec.to_builtins(record).items()
        return {name: value for name, value in fields if name not in left_out and value not in (None, (), {})}

    conversations = [
        exported(store.conversation(conversation_id), "id", "deleted", "allowed_tools", "documents")
        | {"messages": [exported(each, "conversation", "has_tokens") for each in store.messages(conversation_id)]}
        for conversation_id in ids
    ]
    return json.dumps(
        {"format": "edge-run conversations", "version": 1, "conversations": conversations}, ensure_ascii=False
    )


def read_json(text: str) -> Sequence[ImportedConversation]:
    """The conversations of a JSON text.

    Raises:
        ConversationError: the text is not such a file, or something in it is not valid.
    """
    require_length(len(text), _MAX_CHARACTERS, "the file", done="read")
    hint = "import a file that edge-run exported"
    try:
        return msgspec.json.decode(valid_text(text).encode(), type=_File).conversations
    except msgspec.DecodeError as error:
        reason = str(error).removesuffix(".")
        what = "does not fit" if isinstance(error, msgspec.ValidationError) else "is not valid JSON"
        raise ConversationError(f"the file {what}: {reason}", hint) from error
    except RecursionError as error:
        raise ConversationError("the file is nested too deeply", hint) from error


def insert_conversation(store: MessageTable, conversation: ImportedConversation, where: str) -> Conversation:
    """Add a conversation with new ids.

    Raises:
        ConversationError: something in it is not valid; `where` says where it stands in the file.
    """
    fields = {
        name: getattr(conversation, name)
        for name in ("title", "folder", "pinned", "system", "sampling", "model", "tools")
    }
    values = checked_fields(fields) | {
        "id": new_id(),
        "titled_by_user": conversation.titled_by_user,
        "created": conversation.created,
        "updated": conversation.updated,
    }
    store.insert_row("conversation", values)
    ids: dict[str, str] = {}
    for index, message in enumerate(conversation.messages):
        path = f"{where}.messages[{index}]"
        if message.id in ids:
            raise ConversationError(f"{path}: two messages have the id {message.id!r}", "ids must differ")
        if message.parent is not None and message.parent not in ids:
            raise ConversationError(
                f"{path}: no message before it has the id {message.parent!r}", "a parent comes before its children"
            )
        ids[message.id] = _insert_message(store, values["id"], message, ids)
    if conversation.leaf is not None and conversation.leaf not in ids:
        raise ConversationError(f"{where}: leaf is {conversation.leaf!r}", "it must be the id of one of its messages")
    leaf = ids.get(conversation.leaf or "") or next(reversed(ids.values()), None)
    if leaf is not None:
        store.show(values["id"], store.newest_leaf(values["id"], leaf))
    store.note(ChangeKind.CONVERSATION, values["id"])
    return store.conversation(values["id"])


def _insert_message(store: MessageTable, conversation_id: str, message: _Message, ids: dict[str, str]) -> str:
    state = MessageState.INTERRUPTED if message.state is MessageState.WRITING else message.state
    if message.stats is not None and message.stats.trimmed is not UNSET:
        message.stats.trimmed = [ids[each] for each in message.stats.trimmed if each in ids]
    values: dict[str, Any] = {
        "id": new_id(),
        "conversation": conversation_id,
        "parent": None if message.parent is None else ids[message.parent],
        "role": message.role.value,
        "content": checked_content(message.content),
        "attachments": encoded_attachments(message.attachments),
        "created": message.created,
        "model": None if message.model is None else checked_line(message.model, "model"),
        "state": state.value,
        "error": message.error,
        "stats": None if message.stats is None else as_json(msgspec.to_builtins(message.stats), "stats"),
        "rounds": encoded_rounds([each.undecided() for each in message.rounds]),
        "passages": encoded_records(message.passages),
    }
    store.insert_row("message", values)
    return str(values["id"])


def as_markdown(conversation: Conversation, branch: Sequence[StoredMessage]) -> str:
    """A branch as Markdown: headings for the title and for who wrote each message."""
    parts = [f"# {conversation.title}"] if conversation.title else []
    if conversation.system:
        parts += ["## System", _escaped(conversation.system)]
    for message in branch:
        heading = f"## {message.role.value.capitalize()}"
        if message.model:
            # Without the folders of a path: such a text is given to others.
            heading += f" ({Path(message.model).name if Path(message.model).is_absolute() else message.model})"
        parts += [heading, *(_escaped(_shown_round(each)) for each in message.rounds)]
        if message.content or not message.rounds:
            images = [each for each in message.attachments if each.image is not None]
            parts += [f"![{_NOT_IN_BRACKETS.sub('_', each.name)}]({each.image})" for each in images]
            parts.append(_escaped(message_text(message)))
        if message.passages:
            parts.append(_escaped(f"Sources: {', '.join(source_lines(message.passages))}"))
    return "\n\n".join(parts) + "\n"


def _shown_round(round_of_calls: CallRound) -> str:
    """What an answer wrote and the calls that it made then, as Markdown."""
    parts = [round_of_calls.text.strip()] if round_of_calls.text.strip() else []
    for call in round_of_calls.calls:
        arguments = call.arguments
        with suppress(ValueError):
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False, indent=2)
        parts += [f"**Call of {call.name}** ({call.state.value})", fenced(arguments, "json")]
        if call.result is not None:
            parts += ["**Result**", fenced(call.result)]
    return "\n\n".join(parts)


def read_markdown(text: str, name: str) -> ImportedConversation:
    """Read a Markdown text with headings as `as_markdown` writes them.

    Args:
        text: the text.
        name: name of the file, which is the title if the text has none.

    Raises:
        ConversationError: the text has no message of a user, an answer that follows none, or is too long.
    """
    require_length(len(text), _MAX_MARKDOWN, name, done="read")
    text = valid_text(text).replace("\r\n", "\n").removeprefix("\ufeff")
    headings = list(_HEADING.finditer(text))
    starts = [*(heading.start() for heading in headings), len(text)]
    title = _TITLE.search(text, 0, starts[0])
    system, now = "", time.time()
    messages: list[_Message] = []
    for heading, end in zip(headings, starts[1:], strict=True):
        role, content = heading[1].lower(), _ESCAPED.sub("", text[heading.end() : end].strip("\n"))
        if role == "system":
            system = content
        else:
            number, parent = str(len(messages)), messages[-1].id if messages else None
            images = [Attachment(image[1], "", image[2]) for image in _IMAGE.finditer(content)]
            content = _IMAGE.sub("", content)
            messages.append(_Message(number, Role(role), content, now, parent, images, model=heading[2]))
    if not any(message.role is Role.USER for message in messages):
        raise ConversationError(
            f"{name} has no message of a user", "messages follow the headings '## User' and '## Assistant'"
        )
    for before, message in zip([None, *messages], messages, strict=False):
        if message.role is Role.ASSISTANT and (before is None or before.role is not Role.USER):
            raise ConversationError(NO_QUESTION, "give the user's message as its parent")
    shown = title[1] if title is not None else name.removesuffix(".md")
    return ImportedConversation(shown[:MAX_TITLE], now, now, messages, system=system)


def _escaped(text: str) -> str:
    return _LOOKS_LIKE_HEADING.sub(r"\\", text)
