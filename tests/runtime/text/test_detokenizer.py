from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from edgerun.runtime.text.detokenizer import StopMatcher, StreamDecoder
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.nightly import examples
from support.shared_data import saved_tokenizer

TEXTS = ["Grüße, Welt!", "naïve café", "日本語のテキスト", "👩‍👩‍👧‍👦 family 🎉", "tabs\tand\nlines", " leading"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return saved_tokenizer(tmp_path_factory.mktemp("byte"), tokenizer)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """As in Llama 2: words begin with U+2581, unknown characters fall back to bytes, the first space is stripped."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "▁world", "lo", "é", "!"]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return saved_tokenizer(tmp_path_factory.mktemp("meta"), tokenizer)


@given(groups=st.lists(st.lists(st.integers(0, 260), max_size=5), max_size=12))
@settings(max_examples=examples(200))
def test_joined_pieces_equal_the_whole_text(byte_level: TextTokenizer, groups: list[list[int]]) -> None:
    """Also for tokens that are not valid UTF-8, in groups of any size."""
    decoder = StreamDecoder(byte_level)
    text = "".join(decoder.push(group) for group in groups) + decoder.flush()
    assert text == byte_level.decode([token for group in groups for token in group])


@given(words=st.lists(st.sampled_from(["<s>", "▁hello", "▁world", "lo", "é", "!", *"日👩ß\n"]), max_size=20))
@settings(max_examples=examples(200))
def test_joined_pieces_equal_the_whole_text_with_byte_fallback(metaspace: TextTokenizer, words: list[str]) -> None:
    """For valid UTF-8 only: one invalid byte makes this decoder turn all bytes around it into U+FFFD."""
    ids: list[int] = []
    for word in words:
        token = metaspace._tokenizer.token_to_id(word)
        ids += [token] if token is not None else [2 + byte for byte in word.encode()]
    decoder = StreamDecoder(metaspace)
    assert "".join(decoder.push([token]) for token in ids) + decoder.flush() == metaspace.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_contain_whole_characters_only(byte_level: TextTokenizer, text: str) -> None:
    decoder = StreamDecoder(byte_level)
    pieces = [decoder.push([token]) for token in byte_level.encode(text, add_special_tokens=False)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert decoder.flush() == ""


def test_a_long_run_of_invalid_bytes_is_shown_eventually(byte_level: TextTokenizer) -> None:
    (continuation,) = {
        i for i in range(byte_level._tokenizer.get_vocab_size()) if byte_level._tokenizer.id_to_token(i) == "Ģ"
    }
    decoder = StreamDecoder(byte_level)
    assert any(decoder.push([continuation]) for _ in range(100))


TEXT = st.text(alphabet="ab\n", max_size=30)


@given(
    before=st.text("ab\n", max_size=8),
    text=TEXT,
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
@settings(max_examples=examples(300))
def test_text_ends_at_the_first_stop_sequence_however_it_is_split(
    before: str, text: str, stops: list[str], data: st.DataObject
) -> None:
    """The expected text comes from a search for the first match that ends in the text, behind what comes before."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    matcher = StopMatcher(stops, before)
    shown = pushed = ""
    for piece in pieces:
        shown += matcher.push(piece)
        pushed += piece
        if not matcher.stopped:
            # Only text that begins some stop sequence, maybe in what comes before, is held back.
            held, whole = pushed.removeprefix(shown), before + pushed
            assert shown + held == pushed
            beginnings = (stop[:size] for stop in stops for size in range(len(held), len(stop)))
            assert not held or any(whole.endswith(beginning) for beginning in beginnings)
    ends = [
        (end, end - len(stop))
        for stop in stops
        for end in range(len(before) + 1, len(before + text) + 1)
        if (before + text)[:end].endswith(stop)
    ]
    cut = min(ends)[1] if ends else len(before + text)
    assert shown + matcher.flush() == (before + text)[len(before) : cut]
    assert matcher.stopped == bool(ends)
