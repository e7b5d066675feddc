"""The store of conversations, used as the app and the terminal chat use it."""

from __future__ import annotations

import dataclasses
import os
import stat
from functools import partial
from pathlib import Path

import pytest

from edgerun.edge.conversations.records import Attachment, MessageState, Preset, message_text, title_of
from edgerun.edge.conversations.store import ConversationStore
from edgerun.errors import ConversationError
from edgerun.models.user_folders import data_folder


def test_the_use_of_each_model_is_counted_also_in_deleted_answers(store: ConversationStore) -> None:
    assert store.usage() == []
    conversation = store.create().id
    question = store.add_message(conversation, None, "user", "q").id
    for model, stats in (
        ("a", {"prompt_tokens": 10, "reused_tokens": 4, "tokens": 3}),
        ("b", {"prompt_tokens": 7, "tokens": 20}),
        ("a", {"prompt_tokens": 5, "reused_tokens": 5, "tokens": 1}),
        ("a", None),
    ):
        answer = store.add_message(conversation, question, "assistant", "", model=model, state=MessageState.WRITING)
        store.finish_answer(answer.id, "x", MessageState.COMPLETE, stats=stats)
    store.delete(conversation)
    assert store.usage() == [
        {"model": "b", "answers": 1, "read": 7, "generated": 20},
        {"model": "a", "answers": 2, "read": 6, "generated": 4},
    ]


def test_a_conversation_is_there_after_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "conversations.sqlite3"
    with ConversationStore(path, pytest.fail) as store:
        conversation = store.create(system="Be brief.", sampling={"temperature": 0.5}, folder="work", model="m")
        question = store.add_message(
            conversation.id, None, "user", "What is this?", attachments=[Attachment("a.py", "print(1)\n")]
        )
        answer = store.add_message(conversation.id, question.id, "assistant", "", model="m", state=MessageState.WRITING)
        store.write_answer(answer.id, "A", [{"id": 1}])
        store.write_answer(answer.id, "A program", [{"id": 1}, {"id": 2}])
        finished = store.finish_answer(answer.id, "A program.", MessageState.COMPLETE, stats={"tokens": 3})
    with ConversationStore(path, pytest.fail) as store:
        (found,) = store.conversations()
        expected = dataclasses.replace(conversation, title="What is this?", leaf=answer.id, updated=found.updated)
        assert found == expected
        assert store.messages(found.id) == [question, finished]
        assert finished.content == "A program."
        assert finished.stats == {"tokens": 3}
        assert finished.has_tokens
        assert store.tokens(answer.id) == [{"id": 1}, {"id": 2}]
        assert message_text(question) == "a.py\n```\nprint(1)\n```\n\nWhat is this?"
        rewritten = store.rewrite(answer.id, "b")
        assert (rewritten.content, rewritten.has_tokens, store.tokens(answer.id)) == ("b", False, [])
        store.close()
        store.close()
        with pytest.raises(ConversationError, match="the conversations are closed"):
            store.conversations()


def test_titles(store: ConversationStore) -> None:
    conversation = store.create()
    message = store.add_message(conversation.id, None, "user", "\n\n## " + "word " * 20 + "\nsecond line")
    automatic = store.conversation(conversation.id).title
    assert automatic == ("word " * 12).strip() + "…"
    assert store.change(conversation.id, title="  Mine\n ").title == "Mine"
    store.add_message(conversation.id, message.id, "user", "another")
    assert store.conversation(conversation.id).title == "Mine"
    assert store.change(conversation.id, title="").title == automatic
    assert title_of("x" * 300) == "x" * 60 + "…"
    assert title_of(" \n\t\n") == ""


def test_the_latest_conversation_comes_first(store: ConversationStore) -> None:
    first, second = (store.create(title=title) for title in ("first", "second"))
    store.add_message(first.id, None, "user", "x")
    assert [each.id for each in store.conversations()] == [first.id, second.id]


def test_fields_that_are_refused(store: ConversationStore) -> None:
    conversation = store.create(title="kept")
    refused: tuple[tuple[dict[str, object], str], ...] = (
        ({"title": "x" * 300}, "title has 300 characters; at most 200 are kept"),
        ({"tools": [f"clock/{number}" for number in range(129)]}, "tools has 129 tools; at most 128 are offered"),
        ({"sampling": {"top": 1}}, "sampling has no 'top'; it has temperature"),
        ({"sampling": {"temperature": -1}}, "sampling: temperature"),
    )
    for fields, said in refused:
        for attempt in (partial(store.create, **fields), partial(store.change, conversation.id, **fields)):
            with pytest.raises(ConversationError) as caught:
                attempt()
            assert str(caught.value).startswith(said)
    assert store.conversations() == [conversation]


def test_what_is_unknown_or_deleted_is_refused(store: ConversationStore) -> None:
    conversation, other = store.create(), store.create()
    question = store.add_message(conversation.id, None, "user", "q")
    answer = store.add_message(conversation.id, question.id, "assistant", "", state=MessageState.WRITING)
    for attempt in (
        lambda: store.conversation("none"),
        lambda: store.messages("none"),
        lambda: store.message("none"),
        lambda: store.branch("none"),
        lambda: store.tokens("none"),
        lambda: store.add_message("none", None, "user", "x"),
        lambda: store.add_message(conversation.id, "none", "user", "x"),
        lambda: store.select_leaf(other.id, question.id),
        lambda: store.rewrite(answer.id, "x"),
        lambda: store.write_answer(question.id, "x"),
        lambda: store.delete_preset("none"),
    ):
        with pytest.raises(ConversationError):
            attempt()
    store.delete_message(question.id)
    with pytest.raises(ConversationError, match="is deleted; restore it first"):
        store.branch(question.id)
    # The end of an answer that was deleted while it was written is kept for an undo.
    store.finish_answer(answer.id, "late", MessageState.STOPPED)
    store.restore_message(question.id)
    assert store.message(answer.id).content == "late"
    store.delete(conversation.id)
    with pytest.raises(ConversationError, match="is deleted; restore it first"):
        store.add_message(conversation.id, None, "user", "x")


def test_presets_and_settings(store: ConversationStore) -> None:
    for preset in (Preset("b", "sys", {"top_k": 5}), Preset("a"), Preset("b", "other")):
        store.save_preset(preset)
    assert store.presets() == [Preset("a"), Preset("b", "other")]
    assert store.setting("theme", "dark") == "dark"
    store.set_setting("theme", {"name": "light", "n": [1, None]})
    assert store.setting("theme") == {"name": "light", "n": [1, None]}
    with pytest.raises(ConversationError, match="not a JSON value"):
        store.set_setting("theme", float("nan"))


def test_text_that_has_no_utf_8_form_is_kept_readable(store: ConversationStore) -> None:
    conversation = store.create(title="\ud83d", system="\0")
    message = store.add_message(conversation.id, None, "user", "half \ude00 and \ud83d\ude00 \0 end")
    assert message.content == "half \ufffd and \U0001f600 \0 end"
    assert store.conversation(conversation.id).title == "\ufffd"


def test_files_are_in_the_data_folder_and_readable_by_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EDGERUN_HOME", raising=False)
    assert "edge-run" in data_folder().parts
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path / "mine"))
    with ConversationStore() as store:
        assert store.database.path == tmp_path / "mine" / "conversations.sqlite3"
        store.create()
        names = [path.name for path in store.database.path.parent.iterdir()]
        assert {"conversations.sqlite3", "conversations.sqlite3-wal"} <= set(names)
        if os.name != "nt":  # whose files have the permissions of the user's profile
            assert stat.S_IMODE(store.database.path.parent.stat().st_mode) == 0o700
            for path in store.database.path.parent.iterdir():
                assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
