"""Finds messages and titles that contain all words of a query."""

from __future__ import annotations

import sqlite3
from typing import Final

from .records import SearchHit, valid_text

_MOST_WORDS: Final = 16
_AROUND: Final = 40
"""Characters of a snippet before the first place."""
_SNIPPET: Final = 160


def search_messages(database: sqlite3.Connection, text: str, limit: int) -> list[SearchHit]:
    """Titles, then messages that contain every word of `text` somewhere, also inside words; the newest first.

    Deleted messages and conversations are not found. Upper and lower case are the same.
    """
    words = query_words(text)
    if not words or limit < 1:
        return []
    patterns = [f"%{_escaped(word)}%" for word in words]
    title_matches = " AND ".join(["title LIKE ? ESCAPE '\\'"] * len(words))
    titles = database.execute(
        f"SELECT id, title FROM conversation WHERE deleted IS NULL AND {title_matches} "  # noqa: S608
        "ORDER BY updated DESC LIMIT ?",
        (*patterns, limit),
    ).fetchall()
    hits = [SearchHit(ident, title, None, title) for ident, title in titles]
    matches = " AND ".join(["content LIKE ? ESCAPE '\\'"] * len(words))
    rows = database.execute(
        f"""
        SELECT message.conversation, title, message.id, content
        FROM message JOIN conversation ON conversation.id = message.conversation
        WHERE message.deleted IS NULL AND conversation.deleted IS NULL AND {matches}
        ORDER BY message.created DESC, message.number DESC LIMIT ?
        """,  # noqa: S608
        (*patterns, limit - len(hits)),
    )
    return hits + [
        SearchHit(conversation, title, message, snippet_of(content, words))
        for conversation, title, message, content in rows
    ]


def query_words(text: str) -> list[str]:
    """The words of a query, without repetition."""
    return list(dict.fromkeys(valid_text(text.replace("\0", " ")).split()))[:_MOST_WORDS]


def snippet_of(content: str, words: list[str]) -> str:
    """A piece of the text, on one line, around the first place with one of the words."""
    folded = content.lower()
    places = [place for word in words if (place := folded.find(word.lower())) >= 0]
    start = max(0, min(places, default=0) - _AROUND)
    piece = " ".join(content[start : start + _SNIPPET].split())
    return ("…" if start else "") + piece + ("…" if start + _SNIPPET < len(content) else "")


def _escaped(word: str) -> str:
    return word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
