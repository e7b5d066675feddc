"""Sessions, and the files that they are saved in."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import (
    ContextError,
    Engine,
    GenerateOptions,
    InputError,
    Session,
)
from edgerun.runtime import conversation
from edgerun.runtime.kv.arena import KVArena
from edgerun.runtime.speculation.choice import Speculation
from support.tiny_models import write_bundle


def test_answers_of_a_session_reuse_the_cache_without_changing_the_text(engine: Engine) -> None:
    with engine.session(system="a system for the other " * 4) as chat:
        first = chat.send("the other", max_tokens=8)
        second = chat.send("in the end", max_tokens=8)
        assert first.stats.reused_tokens == 0
        assert second.stats.reused_tokens > 8
        messages = list(chat.messages)
    ids = engine.encode_chat(messages[:-1])
    fresh = engine.model.answer(engine.model.new_sequence(), ids, GenerateOptions(max_tokens=8))
    assert "".join(chunk.text for chunk in fresh) == second.text
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]


def test_a_session_reuses_the_cache_of_messages_with_typed_special_tokens(engine: Engine) -> None:
    token = engine.tokenizer.token_text("eos_token")
    counts = {}
    for allowed in (False, True):
        with engine.session() as chat:
            first = chat.send(
                f"the {token} other{' of the other' * 8}", max_tokens=8, special_tokens_in_messages=allowed
            )
            messages = list(chat.messages)
            second = chat.send("in the end", max_tokens=8, special_tokens_in_messages=allowed)
        ids = engine.encode_chat(messages[:1], special_tokens_in_messages=allowed)
        assert first.stats.prompt_tokens == len(ids)
        assert second.stats.reused_tokens >= len(ids)
        counts[allowed] = len([token for token in ids if token in engine.tokenizer.special_ids])
    assert counts[True] == counts[False] + 1


def test_a_closed_stream_keeps_the_text_so_far(engine: Engine) -> None:
    chat = engine.session()
    stream = chat.stream("the", max_tokens=30)
    text = next(stream).text
    stream.close()
    assert chat.messages == [{"role": "user", "content": "the"}, {"role": "assistant", "content": text}]
    assert chat.send("on", max_tokens=4).text


def test_two_streams_of_a_session_are_answered_in_order(engine: Engine) -> None:
    chat = engine.session()
    first, second = chat.stream("the", max_tokens=4), chat.stream("other", max_tokens=4)
    list(first)
    list(second)
    assert [message["content"] for message in chat.messages if message["role"] == "user"] == ["the", "other"]


def test_a_reset_during_an_answer_is_kept(engine: Engine) -> None:
    chat = engine.session()
    stream = chat.stream("the", max_tokens=20)
    next(stream)
    chat.reset()
    list(stream)
    assert chat.messages == []


def test_saving_during_an_answer_keeps_what_was_said_before(engine: Engine, tmp_path: Path) -> None:
    chat = engine.session()
    chat.send("of the", max_tokens=4)
    before = list(chat.messages)
    stream = chat.stream("the", max_tokens=20)
    next(stream)
    chat.save(tmp_path / "chat.kv")
    stream.close()
    assert engine.session(resume=tmp_path / "chat.kv").messages == before


def test_a_failed_message_leaves_the_conversation_unchanged(engine: Engine) -> None:
    chat = engine.session()
    chat.send("the", max_tokens=4)
    before = list(chat.messages)
    with pytest.raises(ContextError, match=r"start again with reset \(/reset in the terminal\)"):
        chat.send("x" * 300)
    with pytest.raises(InputError, match="raw and system belong to a single answer"):
        chat.send("x", raw=True)
    assert chat.messages == before


def test_a_resumed_conversation_continues_as_the_saved_one(engine: Engine, tiny_bundle: Path, tmp_path: Path) -> None:
    chat = engine.session(system="s")
    chat.send("the other", max_tokens=10)
    chat.save(tmp_path / "chat.kv")
    expected = chat.send("again", max_tokens=10)
    with edgerun.load(tiny_bundle) as other, other.session(resume=tmp_path / "chat.kv") as resumed:
        assert resumed.system == "s"
        reply = resumed.send("again", max_tokens=10)
        assert reply.text == expected.text
        assert reply.stats.reused_tokens == expected.stats.reused_tokens
        resumed.reset()
        assert resumed.messages == [{"role": "system", "content": "s"}]


def test_caches_of_more_than_ten_kinds_of_tensors_keep_their_order() -> None:
    arrays = {f"rows.{kind}": np.array([kind]) for kind in range(12)}
    assert np.concatenate(conversation._numbered(arrays, "rows.")).tolist() == list(range(12))


def cached(engine: Engine, chat: Session) -> KVArena:
    """What the prefix cache has of a conversation."""
    found = engine.model.prefixes.longest(chat._token_ids())
    return found[0]


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("float", "int8"), ("int8", "float"), ("int8", "int8"), ("int4", "int4"), ("int4", "float"), ("int8", "int4")],
)
def test_a_conversation_is_resumed_with_a_cache_of_any_format(
    tiny_bundle_of: Callable[[str, str], Path], tmp_path: Path, family: str, saved: str, resumed: str
) -> None:
    bundle, options = tiny_bundle_of(family, "fp32"), {"max_tokens": 10, "speculation": Speculation.OFF}
    with edgerun.load(bundle, kv=saved) as first, first.session(system="s") as chat:
        chat.send("the other", **options)
        chat.save(tmp_path / "chat.kv")
        rows, messages = cached(first, chat).snapshot(), list(chat.messages)
        expected = chat.send("again", **options)
    with edgerun.load(bundle, kv=resumed) as second:
        if saved != resumed:
            with second.session(system="s") as chat:
                chat.messages = messages
                expected = chat.send("again", **options)  # reads everything
        with second.session(resume=tmp_path / "chat.kv") as chat:
            assert chat.messages == messages
            if saved == resumed:
                arena = cached(second, chat)
                assert arena.plain_length == arena.length
                for found, before in zip(arena.snapshot(), rows, strict=True):
                    np.testing.assert_array_equal(found, before)
            reply = chat.send("again", **options)
            assert reply.text == expected.text
            assert reply.stats.reused_tokens >= expected.stats.reused_tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_conversation_is_saved_in_8_bits_where_that_is_asked_for(
    tiny_bundle_of: Callable[[str, str], Path], tmp_path: Path, family: str
) -> None:
    bundle, options = tiny_bundle_of(family, "fp32"), {"max_tokens": 10, "speculation": Speculation.OFF}
    slots, sizes = {}, {}
    for parks in (False, True):
        path = tmp_path / f"{parks}.kv"
        with edgerun.load(bundle, lossy_parking=parks) as first, first.session(system="s " * 40) as chat:
            chat.send("the other", **options)
            chat.save(path)
        with np.load(path) as arrays:
            sizes[parks] = arrays["rows.0"].nbytes
        with edgerun.load(bundle) as second, second.session(resume=path) as chat:
            arena = cached(second, chat)
            slots[parks] = arena.snapshot()
            assert arena.plain_length == (0 if parks else arena.length)
            assert chat.send("again", **options).stats.reused_tokens >= 40
    assert sizes[False] == 4 * sizes[True]
    exact, restored = slots[False][0], slots[True][0]
    steps = np.abs(exact).max(axis=3, keepdims=True) / 127
    assert (np.abs(exact - restored) <= 0.51 * steps).all()
    assert not np.array_equal(exact, restored)
    for states, before in zip(slots[True][1:], slots[False][1:], strict=True):
        np.testing.assert_array_equal(states, before)


def test_damaged_scales_of_a_saved_conversation_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    with edgerun.load(tiny_bundle, lossy_parking=True) as engine:
        with engine.session() as chat:
            chat.send("the other", max_tokens=2, speculation=Speculation.OFF)
            chat.save(path)
        arrays = dict(np.load(path))
        good = arrays["scales.0"]
        for scales in (good[:1], good * np.float32(-1), good.astype(np.float64), None):
            changed = {**arrays, "scales.0": scales}
            np.savez(tmp_path / "changed.npz", **{name: each for name, each in changed.items() if each is not None})
            with pytest.raises(InputError, match=r"changed\.npz is (damaged|not a saved conversation)"):
                engine.session(resume=tmp_path / "changed.npz")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_a_saved_conversation_is_its_owners_alone(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    path.write_bytes(b"older")
    path.chmod(0o644)
    engine.session().save(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_other_files_are_refused_as_saved_conversations(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    with pytest.raises(InputError, match=r"chat\.kv cannot be read: No such file"):
        engine.session(resume=path)
    path.write_text("hello", encoding="utf-8")
    with pytest.raises(InputError, match="is not a saved conversation"):
        engine.session(resume=path)
    with path.open("wb") as file:
        np.savez_compressed(file, about=np.zeros(100 << 20, np.uint8))
    with pytest.raises(InputError, match=r"chat\.kv cannot be read: its contents have \d+ bytes"):
        engine.session(resume=path)
    chat = engine.session()
    chat.send("the", max_tokens=5)
    chat.save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="is not a saved conversation"):
        engine.session(resume=path)
    with edgerun.load(write_bundle(tmp_path / "other", seed=1).rename(tmp_path / "other-model")) as other:
        chat.save(path)
        with pytest.raises(InputError) as raised:
            other.session(resume=path)
    name = engine.bundle.folder.name
    assert str(raised.value) == f"{path} was saved with the model {name}, not other-model; load {name}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "chat.kv was saved by another version of edge-run; start a new conversation"),
        (
            {"model": "0", "name": ""},
            "chat.kv was saved with another model than bundle; load the one it was saved with",
        ),
        ({"model": "0"}, "chat.kv was saved with other files of bundle, which has changed since; start a new"),
        ({"model": "0", "name": ["x"]}, "chat.kv was saved with the model ['x'], not bundle; load ['x']"),
        *(({"messages": value}, "is not a saved conversation") for value in ("hi", 3, [1, 2], [{"role": "user"}])),
        ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "is not a saved conversation"),
    ],
)
def test_what_a_saved_conversation_needs_is_said(
    engine: Engine, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "chat.kv"
    engine.session().save(path)
    with np.load(path) as stored:
        arrays = dict(stored)
    about = {**json.loads(arrays["about"].tobytes()), **changes}
    with path.open("wb") as file:
        np.savez(file, **{**arrays, "about": np.frombuffer(json.dumps(about).encode(), np.uint8)})
    with pytest.raises(InputError, match=re.escape(message)):
        engine.session(resume=path)


def test_a_flipped_bit_in_a_saved_conversation_raises_at_most_an_input_error(engine: Engine, tmp_path: Path) -> None:
    """The records of the archive itself have no checksum, and reading damaged ones fails in many ways."""
    with engine.session() as session:
        session.send("in the", max_tokens=2)
        session.save(tmp_path / "chat")
    saved = (tmp_path / "chat").read_bytes()
    records = [at for at in range(len(saved)) if saved[at : at + 4] in (b"PK\1\2", b"PK\3\4", b"PK\5\6")]
    for record in records:
        for at in range(record, min(record + 30, len(saved))):
            damaged = bytearray(saved)
            damaged[at] ^= 1 << at % 8
            (tmp_path / "chat").write_bytes(damaged)
            with suppress(InputError):
                engine.session(resume=tmp_path / "chat").close()
            damaged[at] = saved[at] ^ (1 << (at + 5) % 8)
            (tmp_path / "chat").write_bytes(damaged)
            with suppress(InputError):
                engine.session(resume=tmp_path / "chat").close()


def test_history_stores_the_new_tokens_of_every_answer(tiny_bundle: Path, cache: Path) -> None:
    with edgerun.load(tiny_bundle, history=True) as engine, engine.session() as chat:
        new = []
        for text in ("the other " * 10, "again"):
            reply = chat.send(text, max_tokens=5)
            found = engine.model.prefixes.longest(chat._token_ids())
            new.append(found[1][reply.stats.reused_tokens :].tolist())
        assert reply.stats.reused_tokens > 0
        # The last token of an answer has no slot of the cache.
        with closing(sqlite3.connect(engine.model.drafters._store._path)) as database:
            stored = database.execute("SELECT tokens FROM sequences").fetchall()
        assert [np.frombuffer(tokens, "<u4").tolist()[:-1] for (tokens,) in stored] == new
