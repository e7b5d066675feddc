"""Conversations, presets and settings in the store; transactions and the listener of all its tables."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import Any, Final, TypeVar, cast

from ...errors import ConversationError, InputError, UnknownIdError
from .database import ConversationDatabase
from .records import (
    MAX_DOCUMENTS,
    MAX_TEXT,
    MAX_TITLE,
    MAX_TOOLS,
    SAMPLING_FIELDS,
    ChangeKind,
    Conversation,
    Preset,
    new_id,
    require_length,
    title_of,
    valid_text,
)

_Method = TypeVar("_Method", bound=Callable[..., Any])

_COLUMNS: Final = ", ".join(each.name for each in fields(Conversation))
_FIRST: Final = (
    "SELECT content FROM message WHERE conversation = ? AND role = 'user' AND deleted IS NULL ORDER BY number"
)
"""The first message of the user, which titles the conversation."""
_MAX_SETTING: Final = 1_000_000


def reads(method: _Method) -> _Method:
    """Run a method in a transaction, in which all that it calls sees one state of the file."""

    @wraps(method)
    def call(table: ConversationTable, /, *args: Any, **kwargs: Any) -> Any:
        return table.database.read(lambda _: method(table, *args, **kwargs))

    return cast("_Method", call)


def writes(method: _Method) -> _Method:
    """Run a method as one change, all of it or nothing. When it is on the disk, the listener is told what it noted."""

    @wraps(method)
    def call(table: ConversationTable, /, *args: Any, **kwargs: Any) -> Any:
        if table.database.in_transaction:
            return method(table, *args, **kwargs)

        def change(_: sqlite3.Connection) -> tuple[Any, list[tuple[ChangeKind, str, str]]]:
            table.noted = []
            return method(table, *args, **kwargs), table.noted

        result, noted = table.database.write(change)
        for each in noted:
            table.listener(*each)
        return result

    return cast("_Method", call)


class ConversationTable:
    """Conversations, presets and settings.

    Args:
        database: the open database.
    """

    def __init__(self, database: ConversationDatabase) -> None:
        self.database: Final = database
        self.noted: list[tuple[ChangeKind, str, str]] = []
        """Changes that the listener is told of after the transaction."""
        self.listener: Callable[[ChangeKind, str, str], None] = lambda *_: None
        """Called after every change that this store makes, in the thread that makes it, with its kind and the ids of
        the conversation and the message, or empty texts."""

    def note(self, kind: ChangeKind, conversation_id: str = "", message_id: str = "") -> None:
        """Note what the transaction changes."""
        self.noted.append((kind, conversation_id, message_id))

    def sql(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Run a statement within the transaction of a method that reads or writes."""
        return self.database.read(lambda connection: connection.execute(statement, values))

    def insert_row(self, table: str, values: Mapping[str, Any]) -> None:
        """Insert one row; names are of the program, values of users."""
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        self.sql(f"INSERT INTO {table} ({names}) VALUES ({marks})", *values.values())  # noqa: S608

    @reads
    def conversations(self, deleted: bool = False) -> list[Conversation]:
        """Conversations, pinned ones first, then the latest; or the deleted ones, the latest deletion first."""
        where, order = ("IS NOT NULL", "deleted DESC") if deleted else ("IS NULL", "pinned DESC, updated DESC")
        rows = self.sql(
            f"SELECT {_COLUMNS} FROM conversation WHERE deleted {where} ORDER BY {order}, number DESC"  # noqa: S608
        )
        return [_conversation(row) for row in rows]

    @reads
    def folders(self) -> list[str]:
        """Names of the folders that have conversations."""
        rows = self.sql(
            "SELECT DISTINCT folder FROM conversation WHERE deleted IS NULL AND folder IS NOT NULL ORDER BY folder"
        )
        return [row[0] for row in rows]

    @reads
    def conversation(self, conversation_id: str) -> Conversation:
        """The conversation with an id, also a deleted one."""
        row = self.sql(f"SELECT {_COLUMNS} FROM conversation WHERE id = ?", conversation_id).fetchone()  # noqa: S608
        if row is None:
            raise UnknownIdError("conversation", conversation_id, "it may have been deleted")
        return _conversation(row)

    def live_conversation(self, conversation_id: str) -> Conversation:
        """The conversation with an id.

        Raises:
            ConversationError: there is none, or it is deleted.
        """
        conversation = self.conversation(conversation_id)
        if conversation.deleted is not None:
            raise ConversationError(f"the conversation {conversation_id!r} is deleted", "restore it first")
        return conversation

    @writes
    def create(self, /, **fields: Any) -> Conversation:
        """Add a conversation.

        Args:
            **fields: any of `title` (without one, the first message of the user gives it), `folder`, `pinned`,
                `system`, `sampling`, `model`, `tools`, `allowed_tools`, `documents`.
        """
        values: dict[str, Any] = {"title": "", "pinned": False, "system": "", "sampling": "{}"}
        values |= checked_fields(fields)
        now = time.time()
        values |= {"id": new_id(), "titled_by_user": bool(values["title"]), "created": now, "updated": now}
        self.insert_row("conversation", values)
        self.note(ChangeKind.CONVERSATION, values["id"])
        return self.conversation(values["id"])

    @writes
    def change(self, /, conversation_id: str, **fields: Any) -> Conversation:
        """Set fields as `create` takes them. An empty title gives a conversation back the one it gets by itself."""
        self.live_conversation(conversation_id)
        values = checked_fields(fields)
        if "title" in values:
            values["titled_by_user"] = bool(values["title"])
            if not values["title"] and (first := self.sql(_FIRST, conversation_id).fetchone()) is not None:
                values["title"] = title_of(first[0])
        if values:
            assignments = ", ".join(f"{name} = ?" for name in values)
            statement = f"UPDATE conversation SET {assignments} WHERE id = ?"  # noqa: S608
            self.sql(statement, *values.values(), conversation_id)
        self.note(ChangeKind.CONVERSATION, conversation_id)
        return self.conversation(conversation_id)

    @writes
    def delete(self, conversation_id: str) -> None:
        """Delete a conversation; `restore` undoes it for 30 days."""
        if self.conversation(conversation_id).deleted is None:
            self.sql("UPDATE conversation SET deleted = ? WHERE id = ?", time.time(), conversation_id)
        self.note(ChangeKind.CONVERSATION_DELETED, conversation_id)

    @writes
    def restore(self, conversation_id: str) -> Conversation:
        """Undo the deletion of a conversation."""
        self.sql("UPDATE conversation SET deleted = NULL WHERE id = ?", conversation_id)
        self.note(ChangeKind.CONVERSATION, conversation_id)
        return self.conversation(conversation_id)

    @reads
    def presets(self) -> list[Preset]:
        """All presets, by name."""
        rows = self.sql("SELECT name, system, sampling FROM preset ORDER BY name")
        return [Preset(name, system, parsed(sampling, {})) for name, system, sampling in rows]

    @writes
    def save_preset(self, preset: Preset) -> None:
        """Add a preset, or replace the one of its name."""
        if not preset.name.strip():
            raise ConversationError("the preset has no name", "give it one")
        self.sql(
            "INSERT OR REPLACE INTO preset (name, system, sampling) VALUES (?, ?, ?)",
            checked_line(preset.name, "the name of a preset"),
            _text(preset.system, "system"),
            _sampling(preset.sampling),
        )
        self.note(ChangeKind.SETTINGS)

    @writes
    def delete_preset(self, name: str) -> None:
        """Remove a preset."""
        if not self.sql("DELETE FROM preset WHERE name = ?", valid_text(name)).rowcount:
            raise UnknownIdError("preset", name)
        self.note(ChangeKind.SETTINGS)

    @reads
    def setting(self, name: str, default: Any = None) -> Any:
        """A setting, which is a JSON value; the default if it was never set."""
        row = self.sql("SELECT value FROM setting WHERE name = ?", name).fetchone()
        return default if row is None else parsed(row[0], default)

    @writes
    def set_setting(self, name: str, value: Any) -> None:
        """Set a JSON value."""
        encoded = as_json(value, f"the setting {name}")
        require_length(len(encoded), _MAX_SETTING, f"the setting {name}")
        self.sql("INSERT OR REPLACE INTO setting (name, value) VALUES (?, ?)", name, encoded)
        self.note(ChangeKind.SETTINGS)


def parsed(text: str | None, default: Any) -> Any:
    """The JSON value of a column; the default if there is none, or it is damaged."""
    if text is None:
        return default
    try:
        return json.loads(text)
    except ValueError:
        return default


def as_json(value: Any, name: str) -> str:
    """A value as JSON text.

    Raises:
        ConversationError: JSON has no such value.
    """
    try:
        return valid_text(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConversationError(f"{name} is not a JSON value: {error}") from error


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that users set, as columns.

    Raises:
        ConversationError: a value is not valid.
    """
    return {name: _CHECKS[name](value, name) for name, value in fields.items()}


def checked_line(value: str, name: str) -> str:
    """A text of one line, as it is stored.

    Raises:
        ConversationError: it is too long.
    """
    line = " ".join(_text(value, name).split())
    require_length(len(line), MAX_TITLE, name)
    return line


def _text(value: str, name: str) -> str:
    require_length(len(value), MAX_TEXT, name)
    return valid_text(value)


def _line_or_none(value: str | None, name: str) -> str | None:
    return None if value is None else checked_line(value, name) or None


def _sampling(value: Mapping[str, Any], _name: str = "sampling") -> str:
    """Sampling options as JSON text; those that are None are left out."""
    given = {name: each for name, each in value.items() if each is not None}
    if unknown := sorted(str(name) for name in given if name not in SAMPLING_FIELDS):
        raise ConversationError(f"sampling has no {unknown[0]!r}", f"it has {', '.join(SAMPLING_FIELDS)}")
    if not given:
        return "{}"
    # The runtime takes long to import, and listing conversations does not need it.
    from ...runtime.options import GenerateOptions  # noqa: PLC0415

    try:
        GenerateOptions(**given)
    except InputError as error:
        raise ConversationError(f"sampling: {error.what}", error.hint) from error
    return as_json(given, "sampling")


def _tools(value: Sequence[str], name: str) -> str:
    """Ids of tools as JSON text."""
    ids = list(dict.fromkeys(checked_line(each, name) for each in value))
    require_length(len(ids), MAX_TOOLS, name, unit="tools", done="offered to a model")
    return as_json(ids, name)


def _documents(value: Sequence[str], name: str) -> str:
    """Paths as JSON text."""
    paths = list(dict.fromkeys(_text(each, name) for each in value))
    require_length(len(paths), MAX_DOCUMENTS, name, have="have", unit="folders and files")
    return as_json(paths, name)


_CHECKS: Final[Mapping[str, Callable[[Any, str], Any]]] = {
    "title": checked_line,
    "folder": _line_or_none,
    "pinned": lambda value, _: value,
    "system": _text,
    "sampling": _sampling,
    "model": _line_or_none,
    "tools": _tools,
    "allowed_tools": _tools,
    "documents": _documents,
}
"""Checks of the fields that users set, which return their columns."""


def _conversation(row: tuple[Any, ...]) -> Conversation:
    """The conversation of a row of `_COLUMNS`."""
    stored = Conversation(*row)
    return replace(
        stored,
        titled_by_user=bool(stored.titled_by_user),
        pinned=bool(stored.pinned),
        sampling=parsed(row[6], {}),
        tools=tuple(parsed(row[-3], ())),
        allowed_tools=tuple(parsed(row[-2], ())),
        documents=tuple(parsed(row[-1], ())),
    )
