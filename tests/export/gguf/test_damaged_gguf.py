"""Damaged, truncated and inconsistent GGUF files give a one-line error, quickly and in little memory."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.errors import CheckpointError, EdgeError
from edgerun.export import ExportRecipe
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layout import expected_tensors
from edgerun.export.checkpoint.open import require_readable
from edgerun.export.checkpoint.source import RowRange
from edgerun.export.gguf.gguf_model import open_gguf
from edgerun.models.bundle import GRAPH_NAME, Bundle
from edgerun.models.gguf_header import read_gguf_header
from support.gguf_files import write_gguf
from support.nightly import examples
from support.tiny_models import exported, write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("damage") / "checkpoint", num_hidden_layers=1, vocab_size=300)


@pytest.fixture(scope="module")
def whole(checkpoint: Path) -> bytes:
    return write_gguf(checkpoint.parent / "whole.gguf", checkpoint, "Q8_0").read_bytes()


def read_all(path: Path) -> None:
    """Read everything that an export reads of a file."""
    with open_gguf(path) as model:
        config = read_config(model.folder)
        for name, shape in expected_tensors(config):
            model.require(name, shape)
        require_readable(Bundle(model.folder, model.folder / GRAPH_NAME, None), config.vocab_size)
        for name, shape in expected_tensors(config):
            if len(shape) == 2 and (stored := model.stored_format(name)).block:
                model.quantized(RowRange(name, 0, shape[0]), stored)
            model.read(name)


def assert_refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_all(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"", "is truncated or not a GGUF file"),
        (lambda raw: b"GGUF", "is truncated or not a GGUF file"),
        (lambda raw: b"PK\3\4" + raw[4:], "is truncated or not a GGUF file"),
        (lambda raw: raw[:4] + raw[4:8][::-1] + raw[8:], "is a big-endian GGUF file; get the little-endian one"),
        (lambda raw: raw[:4] + struct.pack("<I", 1) + raw[8:], "has GGUF version 1; supported are 2 and 3"),
        (lambda raw: raw[:4] + struct.pack("<I", 77) + raw[8:], "has GGUF version 77"),
        (
            lambda raw: raw[:8] + struct.pack("<Q", 1 << 60) + raw[16:],
            "the count of 'the tensors' is 11529215046068469",
        ),
        (lambda raw: raw[:8] + struct.pack("<Q", 60000) + raw[16:], "is damaged: "),
        (lambda raw: raw[:16] + struct.pack("<Q", 1 << 60) + raw[24:], "the count of 'the keys' is"),
        (lambda raw: raw[:16] + struct.pack("<Q", 60000) + raw[24:], "is damaged: "),
        (lambda raw: raw[:24] + struct.pack("<Q", 1 << 40) + raw[32:], "'a key' has 1099511627776 bytes"),
        (lambda raw: raw[:24] + struct.pack("<Q", 1000) + raw[32:], "is damaged: "),
        (lambda raw: raw[:32] + b"\xff" + raw[33:], "'a key' is not UTF-8"),
        (lambda raw: raw[:2000], "is damaged: the header is cut off"),
        (lambda raw: raw[: len(raw) // 2], r"is (damaged|truncated): .* extends beyond"),
        (lambda raw: raw[:-200], "is truncated: .* extends beyond the end of the file"),
    ],
)
def test_damaged_headers(tmp_path, whole: bytes, change, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(change(whole))
    assert_refused(path, message)


@pytest.mark.parametrize(
    ("key", "skip", "value", "message"),
    [
        ("ggml.tokens", 4, struct.pack("<IQ", 8, 1 << 62), "the count of 'tokenizer.ggml.tokens' is 46116860184273879"),
        ("ggml.tokens", 4, struct.pack("<IQ", 8, 4000000), "is damaged: "),
        ("ggml.tokens", 4, struct.pack("<IQ", 0, 1 << 40), "the count of 'tokenizer.ggml.tokens' is 1099511627776"),
        ("ggml.tokens", 4, struct.pack("<I", 9), "'tokenizer.ggml.tokens' has the unknown value type 9"),
        ("ggml.tokens", 0, struct.pack("<I", 99), "'tokenizer.ggml.tokens' has the unknown value type 99"),
        ("add_bos_token", 4, b"\2", "'tokenizer.ggml.add_bos_token' holds a boolean other than 0 and 1"),
        ("llama.block_count", -5, b"kount", "llama.block_count is missing"),
        ("attn_v.weight", -8, b"u", "holds 'blk.0.attn_u.weight', which is not part of a llama model with 1 layers"),
        ("attn_v.weight", -8, b"q", "the tensor 'blk.0.attn_q.weight' occurs twice"),
        ("attn_v.weight", 0, struct.pack("<I", 5), "'blk.0.attn_v.weight' has 5 dimensions"),
        ("attn_v.weight", 4, struct.pack("<Q", 0), "'blk.0.attn_v.weight' has the shape .32, 0."),
        ("attn_v.weight", 4, struct.pack("<Q", 1 << 62), "'blk.0.attn_v.weight' extends beyond"),
        ("attn_v.weight", 4, struct.pack("<Q", 96), r"attn_v.weight has shape \[32, 96\], but the metadata implies"),
        ("attn_v.weight", 20, struct.pack("<I", 16), "blk.0.attn_v.weight has type IQ2_XXS; supported are F32, "),
        ("attn_v.weight", 20, struct.pack("<I", 10), "blk.0.attn_v.weight has type Q2_K; supported are F32, "),
        ("attn_v.weight", 20, struct.pack("<I", 999), "blk.0.attn_v.weight has type number 999"),
        (
            "attn_v.weight",
            20,
            struct.pack("<I", 14),
            "blk.0.attn_v.weight has 64 columns, which is not a multiple of the Q6_K block size 256",
        ),
        ("attn_v.weight", 24, struct.pack("<Q", 3), "'blk.0.attn_v.weight' has offset 3, which is not a multiple"),
        ("attn_v.weight", 24, struct.pack("<Q", 1 << 63), "'blk.0.attn_v.weight' extends beyond"),
    ],
)
def test_inconsistent_header_entries(tmp_path, whole: bytes, key: str, skip: int, value: bytes, message: str) -> None:
    """Overwrite bytes that follow a key or the name of a tensor at a distance of `skip`."""
    assert whole.count(key.encode()) == 1
    start = whole.index(key.encode()) + len(key) + skip
    path = tmp_path / "model.gguf"
    path.write_bytes(whole[:start] + value + whole[start + len(value) :])
    assert_refused(path, message)


@pytest.mark.parametrize(
    ("also", "without", "message"),
    [
        ({}, ["general.architecture"], "general.architecture is missing"),
        (
            {"general.architecture": "mamba"},
            [],
            "the architecture 'mamba' is not supported as GGUF; supported are llama",
        ),
        ({}, ["llama.embedding_length"], "llama.embedding_length is missing"),
        ({}, ["llama.attention.layer_norm_rms_epsilon"], "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, [], "rms_epsilon is nan; it must be a number"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, [], "must be greater than zero"),
        ({"llama.attention.head_count": 0}, [], "llama.attention.head_count is 0"),
        ({"llama.attention.head_count": [4, 2]}, [], "head_count is .4, 2.; it must be one integer"),
        ({"llama.attention.head_count": "4"}, [], "llama.attention.head_count is '4'; it must be one integer"),
        ({"llama.attention.head_count": 4000}, ["llama.attention.key_length"], "is larger than llama.embedding_length"),
        ({"llama.attention.value_length": 8}, [], "llama.attention.value_length is 8, but a head has 16 channels"),
        ({"llama.block_count": 2000}, [], "lacks the tensor model.layers.1"),
        ({"llama.expert_count": 8}, [], "llama.expert_count is 8, which is not supported"),
        ({"llama.attention.causal": False}, [], "attention is not causal"),
        ({"llama.context_length": 1}, [], "llama.context_length is 1"),
        ({"general.alignment": 0}, [], "general.alignment is 0"),
        ({"tokenizer.chat_template": 5}, [], "tokenizer.chat_template is 5; it must be text"),
        ({"split.count": 3}, [], "is one of 3 parts; give the first one"),
        ({}, ["token_embd.weight"], "does not contain a complete language model: token_embd.weight is missing"),
        ({}, ["blk.0.ffn_up.weight"], "lacks the tensor model.layers.0.mlp.up_proj.weight"),
    ],
    ids=str,
)
def test_inconsistent_models(tmp_path, checkpoint: Path, also, without, message: str) -> None:
    assert_refused(write_gguf(tmp_path / "model.gguf", checkpoint, also=also, without=without), message)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(tmp_path, checkpoint: Path, value: float) -> None:
    embedding = np.full((300, 64), 0.5, np.float32)
    embedding[3, 5] = value
    raw = {"token_embd.weight": embedding}
    assert_refused(
        write_gguf(tmp_path / "a.gguf", checkpoint, raw=raw), "token_embd.weight holds NaN or infinite weights"
    )


@pytest.mark.parametrize("offset", [0, 2], ids=["scale", "minimum"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(tmp_path, checkpoint: Path, value: float, offset: int) -> None:
    name, kind = "blk.0.ffn_up.weight", "Q4_1" if offset else "Q8_0"
    blocks = gguf.quants.quantize(np.ones((96, 64), np.float32), gguf.GGMLQuantizationType[kind])
    blocks[7, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    file = write_gguf(tmp_path / "model.gguf", checkpoint, {name: kind}, raw={name: blocks})
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinite weights"):
        exported(file, tmp_path / "bundle", ExportRecipe())
    assert not (tmp_path / "bundle").exists()


@pytest.mark.nightly
@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_bytes_are_read_or_refused(tmp_path, whole: bytes, data) -> None:
    """A changed file is read or refused in one line, and no list is longer than the file."""
    raw = bytearray(whole)
    header = whole.index(b"blk.0.attn_output") + 2000
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, header) | st.integers(0, 700) | st.integers(0, len(raw) - 1))
        raw[position] = data.draw(st.sampled_from([0, 1, 2, 9, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(raw)))
    path = tmp_path / "model.gguf"
    path.write_bytes(raw[:cut])
    message = ""
    try:
        read_all(path)
    except EdgeError as error:
        message = str(error)
    else:
        lists = (value for value in read_gguf_header(path).metadata.values() if isinstance(value, list))
        assert sum(map(len, lists)) < len(raw)
    assert "\n" not in message
