"""Tokenizers rebuilt from GGUF metadata encode like the originals."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edgerun.errors import CheckpointError
from edgerun.export.gguf.gguf_tokenizer import PRE_TOKENIZERS, GgufTokenizer
from edgerun.models.gguf_header import GgufHeader
from support.gguf_files import tokenizer_metadata
from support.shared_data import data_path
from support.tiny_models import CHAT_TEMPLATE, tiny_tokenizer, write_json

PATH = Path("model.gguf")
TOKENIZERS = [("qwen2.5", "qwen2"), ("smollm", "smollm"), ("phi-3-mini", "")]
TEXTS = [
    "",
    " ",
    "Hello  world\n\n",
    "naïve café 你好 🙂 ½",
    "I'LL pay 1234567 €",
    "\t<|im_start|>user\nHi<|im_end|>",
    "ℵ\0",
]


def python_values(metadata):
    """Replace NumPy scalars with Python values, as in a parsed header."""
    return json.loads(json.dumps(metadata, default=lambda value: value.item()))


def gguf_tokenizer(folder: Path, pre: str = "gpt-2", size: int | None = None, **also) -> GgufTokenizer:
    changes = {f"tokenizer.ggml.{key}": value for key, value in also.items()}
    metadata = python_values(tokenizer_metadata(folder, pre)) | changes
    known = {key: value for key, value in metadata.items() if value is not None}
    return GgufTokenizer(GgufHeader(PATH, known), size or len(known["tokenizer.ggml.tokens"]))


def rebuilt(folder: Path, pre: str, **also) -> Tokenizer:
    return Tokenizer.from_str(gguf_tokenizer(folder, pre, **also).tokenizer_json())


def golden(name: str) -> list[tuple[str, list[int]]]:
    folder = data_path("tokenizers/golden")
    texts = (folder / f"{name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    ids = (folder / f"{name}.out").read_text(encoding="utf-8").splitlines()
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, ids, strict=False)]


@functools.cache
def real_tokenizer(name: str, pre: str) -> Tokenizer:
    return rebuilt(data_path(f"tokenizers/{name}"), pre)


@pytest.mark.parametrize(("name", "pre"), TOKENIZERS)
def test_real_tokenizers_encode_and_decode_like_the_originals(name: str, pre: str) -> None:
    ours, original = real_tokenizer(name, pre), Tokenizer.from_file(str(data_path(f"tokenizers/{name}/tokenizer.json")))
    texts = [*TEXTS, *(text for text, _ in golden("qwen2") + golden("phi-3"))]
    for text in texts:
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids) == original.decode(ids)
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(("name", "pre", "pairs"), [("qwen2.5", "qwen2", "qwen2"), ("phi-3-mini", "", "phi-3")])
def test_token_ids_equal_the_golden_ones(name: str, pre: str, pairs: str) -> None:
    ours = real_tokenizer(name, pre)
    for text, ids in golden(pairs):
        assert ours.encode(text, add_special_tokens=False).ids == ids, text


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_tokenizer(300).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE})
    return folder


@given(text=st.text(max_size=40))
def test_any_text_encodes_like_the_original(tiny_folder: Path, text: str) -> None:
    original = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    assert rebuilt(tiny_folder, "gpt-2").encode(text).ids == original.encode(text).ids


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loads_and_is_lossless(tiny_folder: Path, pre: str) -> None:
    tokenizer = rebuilt(tiny_folder, pre)
    for text in ("It'S 12345 o'clock,  at\r\n the Café ... $5+<=>!\n ", "ab1c", "  "):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("llama-bpe", ["A", "ĠB", "123", "45", "'LL"]),
        ("qwen2", ["A", "ĠB", "1", "2", "3", "4", "5", "'LL"]),
        ("gpt-2", ["A", "ĠB", "12345", "'", "LL"]),
        ("smollm", ["A", "ĠB", "1", "2", "3", "4", "5", "'", "LL"]),
        ("default", ["A", "ĠB", "123", "45", "'", "LL"]),
        ("tekken", ["A", "ĠB", "1", "2", "3", "4", "5", "'LL"]),
    ],
)
def test_texts_are_split_like_the_models_do(tiny_folder: Path, pre: str, parts: list[str]) -> None:
    split = rebuilt(tiny_folder, pre).pre_tokenizer.pre_tokenize_str("A B12345'LL")
    assert [part for part, _ in split] == parts


def test_special_tokens_are_added_when_the_file_says_so(tiny_folder: Path) -> None:
    special = {"bos_token_id": 2, "eos_token_id": 0}
    assert rebuilt(tiny_folder, "gpt-2", **special, add_bos_token=True).encode("a").ids[0] == 2
    assert rebuilt(tiny_folder, "gpt-2", **special, add_bos_token=False).encode("a").ids[0] != 2
    both = rebuilt(tiny_folder, "llama-bpe", **special, add_bos_token=True, add_eos_token=True).encode("a", "a").ids
    assert both[0] == 2
    assert both[-1] == 0
    assert len(both) == 6


def test_default_of_the_beginning_of_text_token(tiny_folder: Path) -> None:
    assert gguf_tokenizer(tiny_folder, pre="llama-bpe", add_bos_token=None).tokenizer_config()["add_bos_token"] is True
    assert gguf_tokenizer(tiny_folder, pre="qwen2", add_bos_token=None).tokenizer_config()["add_bos_token"] is False


def test_all_end_tokens_are_listed(tiny_folder: Path) -> None:
    ids = gguf_tokenizer(tiny_folder, eos_token_id=7, eot_token_id=8, bos_token_id=9).token_ids()
    assert ids == {"bos_token_id": 9, "eos_token_id": [7, 8, 0]}  # 0 is <|end|>


def test_padding_tokens_are_left_out(tiny_folder: Path) -> None:
    metadata = python_values(tokenizer_metadata(tiny_folder))
    tokens = [*metadata["tokenizer.ggml.tokens"], "[PAD]", "[PAD]", ""]
    types = [*metadata["tokenizer.ggml.token_type"], 5, 5, 1]
    text = gguf_tokenizer(tiny_folder, size=400, tokens=tokens, token_type=types).tokenizer_json()
    assert len(json.loads(text)["model"]["vocab"]) == 300


@pytest.mark.parametrize(
    ("also", "message"),
    [
        ({"model": "bert"}, "the tokenizer 'bert' is not supported; supported are gpt2"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"pre": "unknown"}, "tokenizer.ggml.pre 'unknown' is not supported; supported are codeshell, "),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'; each merge must name two tokens"),
        ({"merges": ["a nosuchtoken"]}, "the tokenizer is damaged: .*nosuchtoken"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": ["a"] * 300}, "tokenizer.ggml.tokens holds 'a' twice, as 0 and 1"),
        ({"tokens": [str(i) for i in range(301)]}, "has 301 tokens, token_embd.weight 300 rows"),
        ({"tokens": 5}, "tokenizer.ggml.tokens is 5; it must be a list"),
        ({"token_type": [1, 2]}, "tokenizer.ggml.token_type has 2 entries for 300 tokens"),
        ({"token_type": ["a"] * 300}, "it must be a list of int"),
        ({"eos_token_id": 300}, "tokenizer.ggml.eos_token_id is 300; the vocabulary has 300 tokens"),
        ({"eos_token_id": -1}, "tokenizer.ggml.eos_token_id is -1"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes'; it must be true or false"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"model": "llama", "scores": [float("nan")] * 300}, "tokenizer.ggml.scores holds NaN"),
        ({"model": "llama", "scores": [0.5]}, "tokenizer.ggml.scores has 1 entries for 300 tokens"),
    ],
    ids=str,
)
def test_inconsistent_tokenizers_are_refused(tiny_folder: Path, also, message: str) -> None:
    def read() -> None:
        built = gguf_tokenizer(tiny_folder, size=300, **also)
        built.tokenizer_json(), built.tokenizer_config(), built.token_ids()

    with pytest.raises(CheckpointError, match=message):
        read()
