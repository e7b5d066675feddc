"""Long texts: the same token ids as by the method for short ones, and other threads run meanwhile."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import edgerun
from edgerun.models.find import bundled_folder
from edgerun.runtime.text import message_marks, tokenizer_library
from edgerun.runtime.text.message_marks import MessageMarks
from edgerun.runtime.text.tokenizer_library import LONG_TEXT, decode_ids, encode_text
from support.nightly import examples
from support.shared_data import data_path

TOKENIZERS = ("bundled", "phi-3-mini", "qwen2.5", "smollm")
ODD = [
    "\u0301",
    "e\u0301",
    "\ufb01",
    "\u200d",
    "👩‍👩‍👧",
    "\ufffd",
    "\ufeff",
    "\x00",
    "\u2581",
    "\U000f0000",
    "İ",
    "ß",
    "한",
    "\r\n",
]
YIELDS = 20
"""Times that another thread runs; a call that holds the interpreter's lock leaves it two or three, around the call."""


@lru_cache(maxsize=len(TOKENIZERS))
def tokenizer(name: str) -> Tokenizer:
    folder = bundled_folder() if name == "bundled" else data_path(f"tokenizers/{name}")
    read = Tokenizer.from_file(str(folder / "tokenizer.json"))
    read.no_truncation()
    read.no_padding()
    return read


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_long_texts_have_the_token_ids_of_short_ones(name: str, data: st.DataObject) -> None:
    library = tokenizer(name)
    added = sorted(token.content for token in library.get_added_tokens_decoder().values())
    pieces = st.one_of(st.text(max_size=12), st.sampled_from([*added, *ODD, " ", "  ", "\n", "the", "12345"]))
    text = data.draw(st.lists(pieces, max_size=12).map("".join))
    for special in (False, True):
        ids = encode_text(library, text, add_special_tokens=special)
        assert ids == library.encode(text, add_special_tokens=special).ids
        with patch.object(tokenizer_library, "LONG_TEXT", 0):
            assert encode_text(library, text, add_special_tokens=special) == ids
            assert decode_ids(library, ids) == library.decode(ids, skip_special_tokens=True)


def lets_others_run(work: Callable[[], object]) -> bool:
    """Whether another thread gets the interpreter during a call; a busy machine may need several calls to show it."""
    return any(runs_meanwhile(work) > YIELDS for _ in range(20))


def runs_meanwhile(work: Callable[[], object]) -> int:
    """How often another thread gets the interpreter during a call."""
    count, ended = 0, threading.Event()

    def run() -> None:
        nonlocal count
        while not ended.is_set():
            count += 1
            time.sleep(0)

    other = threading.Thread(target=run)
    other.start()
    try:
        before = count
        work()
        return count - before
    finally:
        ended.set()
        other.join()


def test_other_threads_run_while_a_long_text_is_encoded_and_decoded() -> None:
    with edgerun.load(draft=None) as engine:
        ids: list[int] = []
        text = "list all files " * 20_000
        assert lets_others_run(lambda: ids.extend(engine.tokenizer.encode(text, add_special_tokens=False)))
        assert lets_others_run(lambda: engine.tokenizer.decode(ids))
        assert lets_others_run(lambda: engine.tokenizer.encode_plain(f"{text}<|end|>"))


def test_a_long_text_does_not_wait_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands keep messages of panics back, which only one call at a time can do."""
    from edgerun.runtime.text.tokenizer_library import panic_messages_hidden

    inner = threading.Event()
    with edgerun.load(draft=None) as engine, panic_messages_hidden():
        encode = tokenizer_library.encode_text

        def waiting(library: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
            if len(text) >= LONG_TEXT:
                assert inner.wait(60)
            return encode(library, text, add_special_tokens=add_special_tokens)

        monkeypatch.setattr("edgerun.runtime.text.tokenizer.encode_text", waiting)
        long = threading.Thread(
            target=engine.tokenizer.encode, args=("a" * LONG_TEXT,), kwargs={"add_special_tokens": False}
        )
        long.start()
        assert engine.tokenizer.encode("short", add_special_tokens=False)
        assert long.is_alive()
        inner.set()
        long.join()


@settings(max_examples=examples(200), deadline=None)
@given(
    text=st.lists(st.sampled_from(["<|im_start|>", "<|im", "<|", "<", "|>", ">", "<s>", "a", "ꀀ", " "])).map("".join)
)
def test_marks_in_texts_are_found_across_the_parts_that_are_searched(text: str) -> None:
    marks = MessageMarks(["<|im_start|>", "<|im_end|>", "<s>", "|"])
    expected = marks.mark({"text": text}, ""), marks.own_tokens(text), marks.own_tokens(text, "ꀀ")
    assert expected[1] == re.findall(r"<\|im_start\|>|<\|im_end\|>|<s>|\|", text)
    with patch.object(message_marks, "_SEARCHED", 3):
        assert (marks.mark({"text": text}, ""), marks.own_tokens(text), marks.own_tokens(text, "ꀀ")) == expected


def test_other_threads_run_while_a_long_message_is_searched_for_special_tokens() -> None:
    marks = MessageMarks(["<|im_start|>", "<|im_end|>", "<repo_name>"])
    assert lets_others_run(lambda: marks.mark({"text": "a" * 5_000_000}, ""))
