"""Real tokenizers: recorded encodings, and round trips."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.runtime.text.detokenizer import StreamDecoder
from edgerun.runtime.text.tokenizer import TextTokenizer
from support.nightly import examples
from support.shared_data import data_path, real_tokenizer

GOLDEN = {"qwen2": "qwen2.5", "phi-3": "phi-3-mini"}
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.fixture(scope="module", params=GOLDEN)
def golden(request: pytest.FixtureRequest) -> tuple[TextTokenizer, list[str], list[list[int]]]:
    """A tokenizer, and texts with their ids."""
    inputs, outputs = (data_path(f"tokenizers/golden/{request.param}.{suffix}") for suffix in ("inp", "out"))
    # Line ends are part of the texts.
    texts = inputs.read_bytes().decode("utf-8").split(SEPARATOR)
    ids = [[int(token) for token in line.split()] for line in outputs.read_text(encoding="utf-8").split("\n")]
    assert len(texts) == len(ids) >= 46
    return real_tokenizer(GOLDEN[request.param]), texts, ids


def test_encodings_equal_the_recorded_ones(golden: tuple[TextTokenizer, list[str], list[list[int]]]) -> None:
    tokenizer, texts, ids = golden
    for text, expected in zip(texts, ids, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == expected, repr(text)


def test_streamed_tokens_give_the_text_back(golden: tuple[TextTokenizer, list[str], list[list[int]]]) -> None:
    tokenizer, texts, ids = golden
    for text, tokens in zip(texts, ids, strict=True):
        decoder = StreamDecoder(tokenizer)
        streamed = "".join(decoder.push([token]) for token in tokens) + decoder.flush()
        assert streamed == tokenizer.decode(tokens)
        # SentencePiece adds a space before the text and removes it again.
        assert streamed == text or streamed.lstrip(" ") == text.lstrip(" "), repr(text)


@settings(max_examples=examples(60))
@given(text=st.text(max_size=40))
def test_a_byte_level_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = real_tokenizer("qwen2.5")
    normal = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    # The tokenizer normalizes to NFC, which does not change normalized text.
    assert tokenizer.decode(tokenizer.encode(normal, add_special_tokens=False)) == normal


def test_special_tokens_in_a_text_are_one_token_each() -> None:
    ids = real_tokenizer("qwen2.5").encode("<|im_start|>user\nhi<|im_end|>", add_special_tokens=False)
    assert ids[0] == 151644
    assert ids[-1] == 151645
    assert len(ids) == 5
