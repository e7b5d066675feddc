"""Copies what can be read of a damaged database of conversations."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from .schema import TABLES

_RECOVERED: Final = "recovered"
"""Id and title of the conversation of messages whose own cannot be read."""


def salvage(damaged: Path, target: sqlite3.Connection) -> tuple[int, int]:
    """Copy every row that can be read from a damaged database into an empty one.

    A table is read from its first row on and from its last one back, each until the damage. Messages whose
    conversation is lost come into one of their own; those whose parent is lost become first messages.

    Args:
        damaged: the file, which is not changed.
        target: a database with all tables, without rows.

    Returns:
        Numbers of conversations and messages.
    """
    target.execute("PRAGMA foreign_keys = off")
    target.execute("BEGIN IMMEDIATE")
    for table in TABLES:
        columns = {row[1] for row in target.execute(f"PRAGMA table_info({table})")}
        for row in _readable_rows(damaged, table):
            fields = {name: value for name, value in row.items() if name in columns}
            with suppress(sqlite3.IntegrityError):  # read from both ends, or damaged itself
                names, marks = ", ".join(fields), ", ".join("?" * len(fields))
                target.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(fields.values()))  # noqa: S608
    _repair_references(target)
    target.execute("COMMIT")
    target.execute("PRAGMA foreign_keys = on")
    conversations, messages = (
        target.execute(f"SELECT count(*) FROM {table} WHERE deleted IS NULL").fetchone()[0]  # noqa: S608
        for table in ("conversation", "message")
    )
    return conversations, messages


def _readable_rows(damaged: Path, table: str) -> Iterator[dict[str, Any]]:
    for direction in ("ASC", "DESC"):
        with suppress(sqlite3.Error, OSError), closing(_open_damaged(damaged)) as source:
            cursor = source.execute(f"SELECT * FROM {table} ORDER BY rowid {direction}")  # noqa: S608
            names = [column[0] for column in cursor.description]
            for row in cursor:
                yield dict(zip(names, row, strict=True))
            return


def _open_damaged(damaged: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{damaged.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    return connection


def _repair_references(target: sqlite3.Connection) -> None:
    missing = "conversation NOT IN (SELECT id FROM conversation)"
    if target.execute(f"SELECT 1 FROM message WHERE {missing} LIMIT 1").fetchone():  # noqa: S608
        target.execute(
            f"""
            INSERT OR IGNORE INTO conversation (id, title, titled_by_user, pinned, system, sampling, created, updated)
            SELECT '{_RECOVERED}', 'Recovered messages', 1, 0, '', '{{}}', min(created), max(created)
            FROM message WHERE {missing}
            """  # noqa: S608
        )
        target.execute(f"UPDATE message SET conversation = '{_RECOVERED}' WHERE {missing}")  # noqa: S608
    target.execute("UPDATE message SET parent = NULL WHERE parent NOT IN (SELECT id FROM message)")
    target.execute("DELETE FROM token_part WHERE message NOT IN (SELECT id FROM message)")
    target.execute(
        """
        UPDATE conversation SET leaf = (
            SELECT id FROM message
            WHERE message.conversation = conversation.id AND deleted IS NULL ORDER BY number DESC LIMIT 1
        )
        WHERE leaf IS NULL OR leaf NOT IN (SELECT id FROM message)
        """
    )
