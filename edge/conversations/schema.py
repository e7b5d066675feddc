"""Tables of the database of conversations, the steps between versions, and copying out of a damaged file.

    conversation 1 --- n message 1 --- n token_part
    preset, setting

A message names its parent; several messages with one parent are alternatives. What is deleted has the time of its
deletion, and a message also the message with which it was deleted, so that undoing brings back exactly these.
`PRAGMA user_version` has the version. A step never changes once it has been released; what changes is a new step.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

APPLICATION_ID: Final = 0x65727563
"""`PRAGMA application_id` of a database of conversations."""

STEPS: Final[tuple[tuple[str, ...], ...]] = (
    (
        """
        CREATE TABLE conversation (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            title TEXT NOT NULL,
            titled_by_user INTEGER NOT NULL,
            folder TEXT,
            pinned INTEGER NOT NULL,
            system TEXT NOT NULL,
            sampling TEXT NOT NULL,
            model TEXT,
            leaf TEXT REFERENCES message (id) ON DELETE SET NULL,
            created REAL NOT NULL,
            updated REAL NOT NULL,
            deleted REAL
        )
        """,
        """
        CREATE TABLE message (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            conversation TEXT NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
            parent TEXT REFERENCES message (id) ON DELETE CASCADE,
            role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
            content TEXT NOT NULL,
            attachments TEXT,
            created REAL NOT NULL,
            model TEXT,
            state TEXT NOT NULL
                CHECK (state IN ('complete', 'writing', 'stopped', 'length', 'failed', 'interrupted')),
            error TEXT,
            stats TEXT,
            writer TEXT,
            deleted REAL,
            deleted_with TEXT
        )
        """,
        "CREATE INDEX conversation_updated ON conversation (updated)",
        "CREATE INDEX conversation_leaf ON conversation (leaf)",
        "CREATE INDEX message_conversation ON message (conversation)",
        "CREATE INDEX message_parent ON message (parent)",
        "CREATE INDEX message_writing ON message (writer) WHERE writer IS NOT NULL",
        "CREATE INDEX message_deleted ON message (deleted) WHERE deleted IS NOT NULL",
        """
        CREATE TABLE token_part (
            message TEXT NOT NULL REFERENCES message (id) ON DELETE CASCADE,
            start INTEGER NOT NULL,
            count INTEGER NOT NULL,
            tokens BLOB NOT NULL,
            PRIMARY KEY (message, start)
        )
        """,
        "CREATE TABLE preset (name TEXT PRIMARY KEY, system TEXT NOT NULL, sampling TEXT NOT NULL)",
        "CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    ),
    (),
    (
        "ALTER TABLE conversation ADD COLUMN tools TEXT",
        "ALTER TABLE conversation ADD COLUMN allowed_tools TEXT",
        "ALTER TABLE message ADD COLUMN rounds TEXT",
    ),
    (
        *(f"DROP TRIGGER IF EXISTS message_{what}" for what in ("added", "changed", "removed")),
        "DROP TABLE IF EXISTS unindexed",
    ),
    (
        "ALTER TABLE conversation ADD COLUMN documents TEXT",
        "ALTER TABLE message ADD COLUMN passages TEXT",
    ),
)
"""Statements that bring a database from each version to the next; the first step begins with an empty one.

Versions 2 and 3 had a full-text index and a list of the messages that it lacked; the fourth step removes both.
"""
VERSION: Final = len(STEPS)
"""Version of the tables that this program reads and writes."""
TABLES: Final = ("conversation", "message", "token_part", "preset", "setting")
"""Tables with what users wrote, in an order in which they can be filled."""
_RECOVERED: Final = "recovered"
"""Id and title of the conversation of messages whose own cannot be read."""


def version_of(database: sqlite3.Connection) -> int:
    """Version of the tables; 0 for an empty database."""
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def is_of_conversations(database: sqlite3.Connection) -> bool:
    """Whether the database is one of conversations, or has nothing in it."""
    if database.execute("PRAGMA application_id").fetchone()[0] == APPLICATION_ID:
        return True
    return version_of(database) == 0 and not database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]


def migrate(database: sqlite3.Connection) -> None:
    """Bring the tables to the newest version, each step in a transaction of its own."""
    while (version := version_of(database)) < VERSION:
        with database:  # which commits, or rolls back
            database.execute("BEGIN IMMEDIATE")
            # Another process may have made the step meanwhile.
            if version_of(database) == version:
                for statement in STEPS[version]:
                    database.execute(statement)
                with suppress(sqlite3.DatabaseError):  # there is none, or Python has no FTS5, which it belongs to
                    database.execute("DROP TABLE message_index")
                database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                database.execute(f"PRAGMA user_version = {version + 1}")


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
        address = f"{damaged.absolute().as_uri()}?mode=ro"
        with suppress(sqlite3.Error), closing(sqlite3.connect(address, uri=True, isolation_level=None)) as source:
            source.text_factory = lambda data: data.decode("utf-8", "replace")
            cursor = source.execute(f"SELECT * FROM {table} ORDER BY rowid {direction}")  # noqa: S608
            names = [column[0] for column in cursor.description]
            for row in cursor:
                yield dict(zip(names, row, strict=True))
            return


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
