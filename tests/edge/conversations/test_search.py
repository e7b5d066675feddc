"""Searching conversations."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.edge.conversations.store import ConversationStore, query_words
from support.nightly import examples

TEXTS = (
    "How do I list files?",
    "Use `ls -la`, or find . -name '*.py' for Python files.",
    "Größe der Straße: ÜBER alles",
    "日本語のテキストを検索する",
    'He said "NOT (a OR b*)" and left 100% done_now',
    "x\0after the end",
    "emoji 😀😀 here",
)


@pytest.fixture
def filled(store: ConversationStore) -> ConversationStore:
    conversation = store.create(title="About files")
    for text in TEXTS:
        store.add_message(conversation.id, None, "user", text)
    return store


def found(store: ConversationStore, text: str) -> list[str]:
    """Contents of the messages that are found."""
    return [store.message(hit.message).content for hit in store.search(text) if hit.message is not None]


def test_messages_with_all_words_are_found_newest_first(filled: ConversationStore) -> None:
    for query, numbers in (
        ("files", [1, 0]),
        ("FILES python", [1]),
        ("ile", [1, 0]),
        ("ls", [1]),
        ("ls files", [1]),
        ("straße", [2]),
        ("über", [2]),
        ("検索", [3]),
        ("テキスト", [3]),
        ('"NOT', [4]),
        ("(a OR b*)", [4]),
        ("100%", [4]),
        ("done_now", [4]),
        ("doneXnow", []),
        ("after", [5]),
        ("x\0after", [5]),
        ("😀😀", [6]),
        ("a-z", []),
        ("", []),
        ("  \n ", []),
    ):
        assert found(filled, query) == [TEXTS[number] for number in numbers], query


def test_titles_are_found_first_and_snippets_show_the_first_place(filled: ConversationStore) -> None:
    (conversation,) = filled.conversations()
    hit = filled.search("about files")[0]
    assert (hit.conversation, hit.message, hit.snippet) == (conversation.id, None, "About files")
    assert len(filled.search("files", limit=2)) == 2
    assert filled.search("files", limit=0) == []
    filled.add_message(conversation.id, None, "user", "word " * 100 + "\nneedle\t" + "tail " * 100)
    (hit,) = filled.search("NEEDLE tail")
    assert hit.snippet.startswith("…")
    assert "word needle tail" in hit.snippet
    assert hit.snippet.endswith("…")
    assert len(hit.snippet) < 200


def test_a_snippet_has_no_marks_of_markdown(store: ConversationStore) -> None:
    conversation = store.create(title="t").id
    for text, query, snippet in (
        ("## Sizes\n\n- **large** files\n* [x] ~~old~~ ones\n> quoted", "files", "Sizes large files old ones quoted"),
        ("Run `du -sh *.py`:\n```bash\ndu -sh *.py\n```\n*Now* done", "run", "Run du -sh *.py: du -sh *.py Now done"),
        ("2 * 3 * 4 is snake_case, C# and -x", "snake", "2 * 3 * 4 is snake_case, C# and -x"),
        ("**bold** and `code`", "`code`", "**bold** and `code`"),
        ("**half bold", "half", "half bold"),
    ):
        store.add_message(conversation, None, "user", text)
        assert [hit.snippet for hit in store.search(query, limit=1)] == [snippet]


@given(query=st.text() | st.text("\"*()^:{}+-NEARORANDT '\\%_\0", max_size=30))
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_query_finds_the_text_that_contains_it(store: ConversationStore, query: str) -> None:
    conversation = store.create(title="\u2603")
    message = store.add_message(conversation.id, None, "user", f"a {query} b")
    hits = [hit.message for hit in store.search(query)]
    assert hits[:1] == ([message.id] if query_words(query) else [])
