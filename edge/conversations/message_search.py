"""Finds messages and titles that contain all words of a query: the texts of all messages are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from .database import ConversationDatabase
from .records import SearchHit, valid_text

_MOST_WORDS: Final = 16
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
    condition = " AND ".join(["holds({}, ?)"] * len(words))
    titles = f"""
        SELECT id, title, NULL, title FROM conversation
        WHERE deleted IS NULL AND {condition.replace("{}", "title")} ORDER BY updated DESC LIMIT ?
    """  # noqa: S608
    messages = f"""
        SELECT message.conversation, title, message.id, message.content
        FROM message JOIN conversation ON conversation.id = message.conversation
        WHERE {condition.replace("{}", "message.content")}
            AND message.deleted IS NULL AND conversation.deleted IS NULL
        ORDER BY message.number DESC LIMIT ?
    """  # noqa: S608
    rows = database.read(
        lambda connection: [
            row for statement in (titles, messages) for row in connection.execute(statement, (*words, limit))
        ]
    )
    return [
        SearchHit(conversation, title, message, title if message is None else snippet_of(content, words))
        for conversation, title, message, content in rows[:limit]
    ]


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
