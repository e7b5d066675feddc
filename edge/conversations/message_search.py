"""Finds messages and titles that contain all words of a query.

An index of SQLite's FTS5 finds words of three and more characters, also inside words and in languages that do not
separate them. It is not part of the database's version, since some builds of Python have no FTS5: triggers note which
messages changed, and a search indexes these before it looks. Without FTS5 all texts are read.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from typing import Final

from .database import ConversationDatabase
from .records import SearchHit, valid_text

_MOST_WORDS: Final = 16
_SHORTEST: Final = 3
"""Characters of the shortest words that the index finds."""
_BEFORE: Final = 40
"""Characters of a snippet before the first place."""
_SNIPPET: Final = 160


def search_messages(database: ConversationDatabase, text: str, limit: int) -> list[SearchHit]:
    """Titles, then messages that contain every word of `text` somewhere, also inside words; the newest first.

    Deleted messages and conversations are not found. Upper and lower case are the same.
    """
    words = query_words(text)
    if not words or limit < 1:
        return []
    if full_text_available() and any(len(word) >= _SHORTEST for word in words):
        update_index(database)
        if (hits := database.read(lambda connection: _indexed_hits(connection, words, limit))) is not None:
            return hits
        database.write(lambda connection: connection.execute("DROP TABLE IF EXISTS message_index"))
    return database.read(lambda connection: _hits(connection, words, limit, "", words))


def update_index(database: ConversationDatabase) -> None:
    """Index the messages that have changed since the last time, if this build of Python has FTS5."""
    if full_text_available() and database.read(_is_behind):
        database.write(_index_changes)


@cache
def full_text_available() -> bool:
    """Whether this build of Python has FTS5 with an index of trigrams."""
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute("CREATE VIRTUAL TABLE probe USING fts5 (content, tokenize = 'trigram')")
        except sqlite3.OperationalError:
            return False
    return True


def query_words(text: str) -> list[str]:
    """The words of a query, without repetition."""
    return list(dict.fromkeys(valid_text(text.replace("\0", " ")).split()))[:_MOST_WORDS]


def snippet_of(content: str, words: Sequence[str]) -> str:
    """A piece of the text, on one line, around the first place with one of the words."""
    folded = content.lower()
    places = [place for word in words if (place := folded.find(word.lower())) >= 0]
    start = max(0, min(places, default=0) - _BEFORE)
    piece = " ".join(content[start : start + _SNIPPET].split())
    return ("…" if start else "") + piece + ("…" if start + _SNIPPET < len(content) else "")


def _has_index(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'message_index'").fetchone() is not None


def _is_behind(connection: sqlite3.Connection) -> bool:
    return not _has_index(connection) or connection.execute("SELECT 1 FROM unindexed LIMIT 1").fetchone() is not None


def _index_changes(connection: sqlite3.Connection) -> None:
    if not _has_index(connection):
        connection.execute("CREATE VIRTUAL TABLE message_index USING fts5 (content, tokenize = 'trigram')")
        connection.execute("INSERT OR IGNORE INTO unindexed SELECT number FROM message")
    connection.execute("DELETE FROM message_index WHERE rowid IN (SELECT message FROM unindexed)")
    changed = connection.execute(
        "SELECT number, content FROM message JOIN unindexed ON message = number WHERE deleted IS NULL"
    )
    connection.executemany(
        "INSERT INTO message_index (rowid, content) VALUES (?, ?)",
        # The index ends a text at a NUL.
        ((number, content.replace("\0", " ")) for number, content in changed),
    )
    connection.execute("DELETE FROM unindexed")


def _indexed_hits(connection: sqlite3.Connection, words: Sequence[str], limit: int) -> list[SearchHit] | None:
    """What the index finds; None if it is damaged."""
    long = ['"{}"'.format(word.replace('"', '""')) for word in words if len(word) >= _SHORTEST]
    short = [word for word in words if len(word) < _SHORTEST]
    try:
        return _hits(connection, words, limit, " AND ".join(long), short)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_CORRUPT_VTAB:
            raise
        return None


def _hits(
    connection: sqlite3.Connection, words: Sequence[str], limit: int, query: str, unindexed: Sequence[str]
) -> list[SearchHit]:
    """Titles and messages with all words.

    Args:
        connection: the database.
        words: the words.
        limit: largest number of hits.
        query: what to ask the index; empty to read all messages.
        unindexed: words that are not part of that query.
    """
    condition = " AND ".join(["holds(title, ?)"] * len(words))
    titles = connection.execute(
        f"SELECT id, title FROM conversation WHERE deleted IS NULL AND {condition} "  # noqa: S608
        "ORDER BY updated DESC LIMIT ?",
        (*words, limit),
    )
    hits = [SearchHit(conversation, title, None, title) for conversation, title in titles.fetchall()]
    source = "message_index JOIN message ON message.number = message_index.rowid" if query else "message"
    conditions = ["message_index MATCH ?"] * bool(query) + ["holds(message.content, ?)"] * len(unindexed)
    rows = connection.execute(
        f"""
        SELECT message.conversation, title, message.id, message.content
        FROM {source} JOIN conversation ON conversation.id = message.conversation
        WHERE {" AND ".join(conditions)} AND message.deleted IS NULL AND conversation.deleted IS NULL
        ORDER BY {"message_index.rowid" if query else "message.number"} DESC LIMIT ?
        """,  # noqa: S608
        (*([query] if query else []), *unindexed, limit - len(hits)),
    )
    return hits + [
        SearchHit(conversation, title, message, snippet_of(content, words))
        for conversation, title, message, content in rows.fetchall()
    ]
