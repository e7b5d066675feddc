"""Reads and changes the table of conversations, with presets and settings."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ...errors import ConversationError, InputError, UnknownIdError
from .records import (
    MAX_TEXT,
    MAX_TITLE,
    MAX_TOOLS,
    SAMPLING_FIELDS,
    Conversation,
    Preset,
    new_id,
    title_of,
    valid_text,
)

_COLUMNS: Final = (
    "id, title, titled_by_user, folder, pinned, system, sampling, tools, allowed_tools, model, leaf, created, updated, "
    "deleted"
)
_FIELDS: Final = ("title", "folder", "pinned", "system", "sampling", "model", "tools", "allowed_tools")
"""Fields that users set."""
_MAX_SETTING: Final = 1_000_000


def list_conversations(database: sqlite3.Connection, *, deleted: bool) -> list[Conversation]:
    """Conversations, pinned ones first, then the latest; or the deleted ones, the latest deletion first."""
    where, order = ("IS NOT NULL", "deleted DESC") if deleted else ("IS NULL", "pinned DESC, updated DESC")
    rows = database.execute(
        f"SELECT {_COLUMNS} FROM conversation WHERE deleted {where} ORDER BY {order}, number DESC"  # noqa: S608
    )
    return [_conversation(row) for row in rows]


def list_folders(database: sqlite3.Connection) -> list[str]:
    """Folders of conversations that are not deleted."""
    return [
        row[0]
        for row in database.execute(
            "SELECT DISTINCT folder FROM conversation WHERE deleted IS NULL AND folder IS NOT NULL ORDER BY folder"
        )
    ]


def read_conversation(database: sqlite3.Connection, conversation_id: str, *, live: bool = False) -> Conversation:
    """The conversation with an id.

    Raises:
        ConversationError: there is none; or it is deleted, and `live` asks for one that is not.
    """
    row = database.execute(
        f"SELECT {_COLUMNS} FROM conversation WHERE id = ?",  # noqa: S608
        (conversation_id,),
    ).fetchone()
    if row is None:
        raise UnknownIdError("conversation", conversation_id, "it may have been deleted")
    if live and row[-1] is not None:
        raise ConversationError(f"the conversation {conversation_id!r} is deleted", "restore it first")
    return _conversation(row)


def create_conversation(database: sqlite3.Connection, fields: Mapping[str, Any]) -> Conversation:
    """Add a conversation; errors as for `change_conversation`."""
    values: dict[str, Any] = {"title": "", "pinned": False, "system": "", "sampling": "{}", **checked_fields(fields)}
    now = time.time()
    values |= {"id": new_id(), "titled_by_user": bool(values["title"]), "created": now, "updated": now}
    insert_row(database, "conversation", values)
    return read_conversation(database, values["id"])


def change_conversation(database: sqlite3.Connection, conversation_id: str, fields: Mapping[str, Any]) -> Conversation:
    """Set fields of a conversation. An empty title gives it back the one that it gets by itself.

    Raises:
        ConversationError: there is no such conversation, it is deleted, a field is unknown, or its value is not valid.
    """
    read_conversation(database, conversation_id, live=True)
    values = checked_fields(fields)
    if "title" in values:
        values["titled_by_user"] = bool(values["title"])
        values["title"] = values["title"] or _automatic_title(database, conversation_id)
    if values:
        assignments = ", ".join(f"{name} = ?" for name in values)
        database.execute(
            f"UPDATE conversation SET {assignments} WHERE id = ?",  # noqa: S608
            (*values.values(), conversation_id),
        )
    return read_conversation(database, conversation_id)


def mark_conversation(database: sqlite3.Connection, conversation_id: str, *, deleted: bool) -> Conversation:
    """Delete a conversation, which can be undone, or undo that.

    Raises:
        ConversationError: there is no such conversation.
    """
    if (read_conversation(database, conversation_id).deleted is not None) != deleted:
        database.execute(
            "UPDATE conversation SET deleted = ? WHERE id = ?", (time.time() if deleted else None, conversation_id)
        )
    return read_conversation(database, conversation_id)


def list_presets(database: sqlite3.Connection) -> list[Preset]:
    """All presets by name."""
    rows = database.execute("SELECT name, system, sampling FROM preset ORDER BY name")
    return [Preset(name, system, parsed(sampling, {})) for name, system, sampling in rows]


def put_preset(database: sqlite3.Connection, preset: Preset) -> None:
    """Add a preset, or replace that of the same name.

    Raises:
        ConversationError: a field is not valid.
    """
    if not preset.name.strip():
        raise ConversationError("the preset has no name", "give it one")
    values = (
        checked_line(preset.name, "the name of a preset"),
        _text(preset.system, "system"),
        _sampling(preset.sampling),
    )
    database.execute("INSERT OR REPLACE INTO preset (name, system, sampling) VALUES (?, ?, ?)", values)


def remove_preset(database: sqlite3.Connection, name: str) -> None:
    """Remove a preset.

    Raises:
        ConversationError: there is none of that name.
    """
    if not database.execute("DELETE FROM preset WHERE name = ?", (valid_text(name),)).rowcount:
        raise UnknownIdError("preset", name)


def read_setting(database: sqlite3.Connection, name: str, default: Any) -> Any:
    """A JSON value, or the default."""
    row = database.execute("SELECT value FROM setting WHERE name = ?", (name,)).fetchone()
    return default if row is None else parsed(row[0], default)


def put_setting(database: sqlite3.Connection, name: str, value: Any) -> None:
    """Set a JSON value.

    Raises:
        ConversationError: it is too long, or not a JSON value.
    """
    encoded = as_json(value, f"the setting {name}")
    if len(encoded) > _MAX_SETTING:
        raise ConversationError(f"the setting {name} has {len(encoded)} characters", f"at most {_MAX_SETTING} are kept")
    database.execute("INSERT OR REPLACE INTO setting (name, value) VALUES (?, ?)", (name, encoded))


def insert_row(database: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> None:
    """Insert one row; names are of the program, values of users."""
    names, marks = ", ".join(values), ", ".join("?" * len(values))
    database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))  # noqa: S608


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
        ConversationError: a field is unknown, or its value is not valid.
    """
    if unknown := sorted(set(fields) - set(_FIELDS)):
        raise ConversationError(f"a conversation has no field {unknown[0]!r} to set", f"fields: {', '.join(_FIELDS)}")
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "sampling":
            values[name] = _sampling(value)
        elif name == "pinned":
            if not isinstance(value, bool):
                raise ConversationError(f"pinned is {value!r}", "it must be true or false")
            values[name] = value
        elif name in {"tools", "allowed_tools"}:
            values[name] = _tools(value, name)
        elif name in {"folder", "model"}:
            values[name] = None if value is None else checked_line(value, name) or None
        else:
            values[name] = checked_line(value, name) if name == "title" else _text(value, name)
    return values


def checked_line(value: Any, name: str) -> str:
    """A text of one line, as it is stored.

    Raises:
        ConversationError: it is not text, or too long.
    """
    line = " ".join(_text(value, name).split())
    if len(line) > MAX_TITLE:
        raise ConversationError(f"{name} has {len(line)} characters", f"at most {MAX_TITLE} are kept")
    return line


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ConversationError(f"{name} is {type(value).__name__}", "it must be text")
    if len(value) > MAX_TEXT:
        raise ConversationError(f"{name} has {len(value)} characters", f"at most {MAX_TEXT} are kept")
    return valid_text(value)


def _sampling(value: Any) -> str:
    """Sampling options as JSON text; those that are None are left out."""
    if not isinstance(value, Mapping):
        raise ConversationError(f"sampling is {type(value).__name__}", "it must be an object of options")
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


def _tools(value: Any, name: str) -> str:
    """Ids of tools as JSON text."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConversationError(f"{name} is {type(value).__name__}", "it must be a list of ids of tools")
    ids = list(dict.fromkeys(checked_line(each, name) for each in value))
    if len(ids) > MAX_TOOLS:
        raise ConversationError(f"{name} has {len(ids)} tools", f"at most {MAX_TOOLS} are offered to a model")
    return as_json(ids, name)


def _automatic_title(database: sqlite3.Connection, conversation_id: str) -> str:
    row = database.execute(
        "SELECT content FROM message WHERE conversation = ? AND role = 'user' AND deleted IS NULL ORDER BY number",
        (conversation_id,),
    ).fetchone()
    return "" if row is None else title_of(row[0])


def _conversation(row: tuple[Any, ...]) -> Conversation:
    ident, title, titled, folder, pinned, system, sampling, tools, allowed, *rest = row
    conversation = Conversation(ident, title, bool(titled), folder, bool(pinned), system, parsed(sampling, {}), *rest)
    if not tools:
        return conversation
    return replace(conversation, tools=tuple(parsed(tools, ())), allowed_tools=tuple(parsed(allowed, ())))
