"""The tokens listed for an answer are those of its text, with the bytes that make it up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from edgerun.runtime.sampling.logprobs import PositionLogprobs
from edgerun.runtime.text.detokenizer import StopMatcher, StreamDecoder
from edgerun.runtime.text.token_logprobs import AnswerTokens, TokenLogprob
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.nightly import examples
from support.shared_data import data_path, real_tokenizer, saved_tokenizer

REAL = ("qwen2.5", "phi-3-mini", "smollm")
SEPARATOR = "\n__ggml_vocab_test__\n"
TEXTS = ["naïve café, 日本語のテキスト", "👩‍👩‍👧‍👦 family 🎉", "def f(x):\n\treturn x ** 2\n", " Grüße", "\u200b x"]


def golden_texts() -> list[str]:
    return data_path("tokenizers/golden/qwen2.inp").read_bytes().decode("utf-8").split(SEPARATOR)


def listed(
    tokenizer: TextTokenizer, token_ids: list[int], stops: tuple[str, ...] = ()
) -> tuple[str, list[TokenLogprob]]:
    """The text of an answer and its tokens; checks that no chunk lists a token whose text is not shown yet."""
    decoder, matcher, tokens = StreamDecoder(tokenizer), StopMatcher(stops), AnswerTokens(tokenizer.token_bytes)
    text, found = "", list[TokenLogprob]()
    for index, token in enumerate(token_ids):
        decoded = decoder.push((token,))
        piece = matcher.push(decoded)
        tokens.add(PositionLogprobs(token, -float(index), ((token, -float(index)),)), decoded)
        text += piece
        if piece:
            found += tokens.take(piece)
            if "\ufffd" not in text:
                assert text.encode().startswith(b"".join(one.bytes for one in found))
        if matcher.stopped:
            break
    decoded = decoder.flush()
    piece = matcher.push(decoded) + matcher.flush()
    return text + piece, [*found, *tokens.finish(decoded, piece)]


@pytest.mark.parametrize("name", REAL)
def test_the_bytes_of_an_answers_tokens_are_its_text(name: str) -> None:
    tokenizer = real_tokenizer(name)
    for whole in [*golden_texts(), *TEXTS]:
        token_ids = tokenizer.encode(whole, add_special_tokens=False)
        text, tokens = listed(tokenizer, token_ids)
        assert [token.token_id for token in tokens] == token_ids
        assert [token.logprob for token in tokens] == [-float(index) for index in range(len(token_ids))]
        assert b"".join(token.bytes for token in tokens).decode() == text == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", REAL)
@given(data=st.data())
@settings(max_examples=examples(200))
def test_the_bytes_of_any_text_are_those_of_its_tokens(name: str, data: st.DataObject) -> None:
    """Where bytes are invalid, the text of byte-level tokenizers has U+FFFD, and the tokens have the bytes."""
    tokenizer = real_tokenizer(name)
    if name != "phi-3-mini" and data.draw(st.booleans()):
        token_ids = data.draw(st.lists(st.integers(0, 400), max_size=20))
    else:
        token_ids = tokenizer.encode(data.draw(st.text(max_size=40)), add_special_tokens=False)
    shown, tokens = listed(tokenizer, token_ids)
    assert [token.token_id for token in tokens] == token_ids
    # A vocabulary may lack some bytes.
    assert b"".join(token.bytes for token in tokens).decode("utf-8", "replace") == shown


@pytest.mark.parametrize("name", REAL)
@given(data=st.data())
@settings(max_examples=examples(100))
def test_the_tokens_reach_up_to_the_stop_sequence(name: str, data: st.DataObject) -> None:
    tokenizer = real_tokenizer(name)
    whole = data.draw(st.sampled_from(TEXTS))
    begin = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[begin : begin + data.draw(st.integers(1, 6))]
    token_ids = tokenizer.encode(whole, add_special_tokens=False)
    shown, tokens = listed(tokenizer, token_ids, (stop, "\0\0"))
    assert shown == tokenizer.decode(token_ids).partition(stop)[0]
    joined = b"".join(token.bytes for token in tokens)
    assert joined.startswith(shown.encode())
    # Only the last token may have more than what is shown.
    assert len(joined) - (len(tokens[-1].bytes) if tokens else 0) <= len(shown.encode())
    assert [token.token_id for token in tokens] == token_ids[: len(tokens)]


def test_special_tokens_are_listed_and_add_no_bytes() -> None:
    tokenizer = real_tokenizer("qwen2.5")
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    token_ids = [*end, *tokenizer.encode("Hi é", add_special_tokens=False), *end]
    text, tokens = listed(tokenizer, token_ids)
    assert text == "Hi é"
    assert [(token.text, token.bytes) for token in tokens] == [
        ("<|im_end|>", b""),
        ("Hi", b"Hi"),
        (" é", " é".encode()),
        ("<|im_end|>", b""),
    ]
    assert tokens[0].top == (TokenLogprob(end[0], "<|im_end|>", b"", -0.0),)


def test_parts_of_characters_have_their_bytes_and_alternatives_too() -> None:
    for name in ("qwen2.5", "phi-3-mini"):
        tokenizer = real_tokenizer(name)
        token_ids = tokenizer.encode("x𒀀", add_special_tokens=False)
        _, tokens = listed(tokenizer, token_ids)
        parts = [token for token in tokens if "\ufffd" in token.text]
        assert len(parts) > 1
        assert b"".join(token.bytes for token in parts) == "𒀀".encode()
        assert [token.top[0].bytes for token in parts] == [token.bytes for token in parts]


def test_an_id_without_a_token_is_listed_without_text() -> None:
    tokenizer = real_tokenizer("qwen2.5")
    word = tokenizer.encode("word", add_special_tokens=False)
    text, tokens = listed(tokenizer, [*word, 151_900, *word])
    assert text == "wordword"
    assert [token.bytes for token in tokens] == [b"word", b"", b"word"]


def test_words_whose_text_depends_on_their_neighbours_keep_the_bytes_of_the_text(tmp_path: Path) -> None:
    """A WordPiece tokenizer writes a space before every word but the first, and none before a continuation."""
    words = {word: index for index, word in enumerate(["[UNK]", "[SEP]", "a", "run", "##ning", "is", "good"])}
    library = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece(cleanup=False)
    library.add_special_tokens([AddedToken("[SEP]", special=True)])
    tokenizer = saved_tokenizer(tmp_path, library)
    text, tokens = listed(tokenizer, [words[word] for word in ("run", "##ning", "[SEP]", "is", "good")])
    assert text == "running is good"
    assert b"".join(token.bytes for token in tokens).decode() == text
    assert [token.bytes for token in tokens] == [b"run", b"ning", b"", b" is", b" good"]
