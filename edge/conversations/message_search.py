"""Finds messages and titles that contain all words of a query.

An index of SQLite's FTS5 says which messages have all groups of three characters of a word, also inside words and in
languages that do not separate them; their texts are then read to see whether the word is there. The index is not part
of the database's version, since some builds of Python have no FTS5: triggers note which messages changed, and a search
indexes these before it looks. Without FTS5 all texts are read.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from typing import Final

from .database import ConversationDatabase
from .records import SearchHit, valid_text

_MOST_WORDS: Final = 16
_GROUP: Final = 3
"""Characters that the index has together."""
_MOST_GROUPS: Final = 64
"""Groups of a query that the index is asked for; the texts are compared with the whole words in any case."""
_BATCH: Final = 500
"""Messages that are indexed in one transaction: other processes write between two."""
_INDEX: Final = "USING fts5 (content, tokenize = 'trigram', detail = none, columnsize = 0)"
_BEFORE: Final = 40
"""Characters of a snippet before the first place."""
_SNIPPET: Final = 160
_MARKS: Final = re.compile(
    r"^[ \t]*(?:`{3,}|~{3,}).*$"  # the fences of code
    r"|^[ \t]*(?:(?:#{1,6}|[-*+>])[ \t]+(?:\[[ xX]\][ \t]+)?)+"  # headings, lists, tasks and quotes
    r"|`+|\*\*+|~~"
    r"|(?<![\w*])\*(\w(?:[^*\n]*\w)?)\*(?![\w*])",  # emphasis: the asterisk of *.py is none
    re.MULTILINE,
)
"""Marks of Markdown, which snippets leave out; the first group is what stays."""


def search_messages(database: ConversationDatabase, text: str, limit: int) -> list[SearchHit]:
    """Titles, then messages that contain every word of `text` somewhere, also inside words; the newest first.

    Deleted messages and conversations are not found. Upper and lower case are the same.
    """
    words = query_words(text)
    if not words or limit < 1:
        return []
    groups = _groups(words)
    if groups and full_text_available():
        update_index(database)
        if (hits := database.read(lambda connection: _indexed_hits(connection, words, limit, groups))) is not None:
            return hits
        database.write(lambda connection: connection.execute("DROP TABLE IF EXISTS message_index"))
    return database.read(lambda connection: _hits(connection, words, limit, ""))


def update_index(database: ConversationDatabase) -> None:
    """Index the messages that have changed since the last time, if this build of Python has FTS5."""
    while full_text_available() and database.read(_is_behind):
        database.write(_index_changes)


@cache
def full_text_available() -> bool:
    """Whether this build of Python has FTS5 with an index of trigrams."""
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute(f"CREATE VIRTUAL TABLE probe {_INDEX}")
        except sqlite3.OperationalError:
            return False
    return True


def query_words(text: str) -> list[str]:
    """The words of a query, without repetition."""
    return list(dict.fromkeys(valid_text(text.replace("\0", " ")).split()))[:_MOST_WORDS]


def snippet_of(content: str, words: Sequence[str]) -> str:
    """A piece of the text around the first place with one of the words, on one line and without marks of Markdown.

    The marks stay where words of the query contain them.
    """
    folded = content.lower()
    places = [place for word in words if (place := folded.find(word.lower())) >= 0]
    start = max(0, min(places, default=0) - _BEFORE)
    end = start + 2 * _SNIPPET  # the marks take room too
    piece = content[start:end]
    plain = _MARKS.sub(r"\1", piece)
    if any(word.lower() in piece.lower() and word.lower() not in plain.lower() for word in words):
        plain = piece
    text = " ".join(plain.split())
    return ("…" if start else "") + text[:_SNIPPET] + ("…" if end < len(content) or len(text) > _SNIPPET else "")


def _has_index(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'message_index'").fetchone() is not None


def _is_behind(connection: sqlite3.Connection) -> bool:
    return not _has_index(connection) or connection.execute("SELECT 1 FROM unindexed LIMIT 1").fetchone() is not None


def _index_changes(connection: sqlite3.Connection) -> None:
    if not _has_index(connection):
        connection.execute(f"CREATE VIRTUAL TABLE message_index {_INDEX}")
        connection.execute("INSERT OR IGNORE INTO unindexed SELECT number FROM message")
    changed = connection.execute(
        "SELECT message, content, deleted FROM unindexed LEFT JOIN message ON number = message LIMIT ?", (_BATCH,)
    ).fetchall()
    numbers = [(number,) for number, *_ in changed]
    # The index ends a text at a NUL.
    texts = [
        (number, content.replace("\0", " "))
        for number, content, deleted in changed
        if content is not None and deleted is None
    ]
    connection.executemany("DELETE FROM message_index WHERE rowid = ?", numbers)
    connection.executemany("INSERT INTO message_index (rowid, content) VALUES (?, ?)", texts)
    connection.executemany("DELETE FROM unindexed WHERE message = ?", numbers)


def _groups(words: Sequence[str]) -> list[str]:
    """The groups of characters of the words, as the index is asked for them."""
    groups = dict.fromkeys(
        word[start : start + _GROUP] for word in words for start in range(max(0, len(word) - _GROUP + 1))
    )
    return ['"{}"'.format(group.replace('"', '""')) for group in groups][:_MOST_GROUPS]


def _indexed_hits(
    connection: sqlite3.Connection, words: Sequence[str], limit: int, groups: Sequence[str]
) -> list[SearchHit] | None:
    """What the index finds; None if it is damaged."""
    try:
        return _hits(connection, words, limit, " AND ".join(groups))
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_CORRUPT_VTAB:
            raise
        return None


def _hits(connection: sqlite3.Connection, words: Sequence[str], limit: int, query: str) -> list[SearchHit]:
    """Titles and messages with all words; the messages are those that a query of the index gives, or all."""
    condition = " AND ".join(["holds({}, ?)"] * len(words))
    titles = connection.execute(
        f"SELECT id, title FROM conversation WHERE deleted IS NULL AND {condition.replace('{}', 'title')} "  # noqa: S608
        "ORDER BY updated DESC LIMIT ?",
        (*words, limit),
    )
    hits = [SearchHit(conversation, title, None, title) for conversation, title in titles.fetchall()]
    source, match, arguments = "message", "", tuple[str, ...]()
    if query:
        source = "message_index JOIN message ON message.number = message_index.rowid"
        match, arguments = "message_index MATCH ? AND ", (query,)
    rows = connection.execute(
        f"""
        SELECT message.conversation, title, message.id, message.content
        FROM {source} JOIN conversation ON conversation.id = message.conversation
        WHERE {match} {condition.replace("{}", "message.content")}
            AND message.deleted IS NULL AND conversation.deleted IS NULL
        ORDER BY {"message_index.rowid" if query else "message.number"} DESC LIMIT ?
        """,  # noqa: S608
        (*arguments, *words, limit - len(hits)),
    )
    return hits + [
        SearchHit(conversation, title, message, snippet_of(content, words))
        for conversation, title, message, content in rows.fetchall()
    ]
