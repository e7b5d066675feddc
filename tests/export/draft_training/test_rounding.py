"""Quantization-aware training rounds weights as an export does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from safetensors.numpy import load_file  # noqa: E402

from edgerun.export.draft_training.torch_llama import (  # noqa: E402
    BlockRounding,
    CausalLM,
    ModelShape,
)
from edgerun.export.quantization.codes import dequantize_rows, quantize_rows  # noqa: E402
from edgerun.models.manifest import WeightFormat  # noqa: E402
from edgerun.training.checkpoint import load_model, save_model  # noqa: E402
from edgerun.training.tokenizer import train_tokenizer  # noqa: E402

SHAPE = ModelShape(
    vocab_size=300,
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=96,
)


def tiny_model() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(SHAPE)


@pytest.mark.parametrize("text", ["4/128", "8/32", "2/64"])
def test_format_is_parsed(text: str) -> None:
    weight_format = BlockRounding.parse(text)
    assert f"{weight_format.bits}/{weight_format.block}" == text


@pytest.mark.parametrize("text", ["", "4", "3/32", "4/16", "4/128/1", "int4/32"])
def test_unsupported_format_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="BITS/BLOCK"):
        BlockRounding.parse(text)


@given(
    bits=st.sampled_from([2, 4, 8]),
    block=st.sampled_from([32, 64, 128]),
    columns=st.sampled_from([32, 96, 128, 320]),
    seed=st.integers(0, 99),
)
def test_weights_are_rounded_as_an_export_rounds_them(bits: int, block: int, columns: int, seed: int) -> None:
    weights = np.random.default_rng(seed).standard_normal((6, columns)).astype(np.float32)
    weights[1] = 0
    weights[2, :3] = 1e-35
    rounded = BlockRounding(bits, block).rounded(torch.from_numpy(weights))
    weight_format = WeightFormat(bits, block)
    exported = dequantize_rows(*quantize_rows(weights, weight_format), columns, weight_format)
    # A weight halfway between two codes may go to either: the two sides compute its quotient in different ways.
    step = np.abs(weights).max() / 2 ** (bits - 1)
    differs = np.abs(rounded.numpy() - exported) > 1e-6
    assert differs.mean() < 0.01
    np.testing.assert_allclose(rounded.numpy(), exported, atol=1.001 * step)


@given(bits=st.sampled_from([2, 4, 8]), block=st.sampled_from([32, 128]), seed=st.integers(0, 99))
def test_rounding_is_idempotent(bits: int, block: int, seed: int) -> None:
    rounding = BlockRounding(bits, block)
    torch.manual_seed(seed)
    once = rounding.rounded(torch.randn(5, 200))
    torch.testing.assert_close(rounding.rounded(once), once, rtol=1e-6, atol=0)


def test_rounding_has_the_gradient_of_the_identity() -> None:
    weight = torch.randn(4, 64, requires_grad=True)
    factors = torch.randn(4, 64)
    (BlockRounding(2, 32)(weight) * factors).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, factors)


def test_passes_and_checkpoint_have_rounded_matrices(tmp_path: Path) -> None:
    model, rounding = tiny_model().eval(), BlockRounding(2, 32)
    ids = torch.arange(40).reshape(2, 20)
    plain = model(ids)
    model.round_weights(rounding)
    rounded = model(ids)
    assert (rounded - plain).abs().max() > 1e-3

    by_hand = CausalLM(SHAPE).eval()
    by_hand.load_state_dict(
        {name: rounding.rounded(p.detach()) if p.dim() == 2 else p for name, p in model.named_parameters()}
    )
    torch.testing.assert_close(by_hand(ids), rounded)

    save_model(tmp_path, model, train_tokenizer(["list the files"], vocab_size=300))
    read, _ = load_model(tmp_path)
    torch.testing.assert_close(read.eval()(ids), rounded)
    model.round_weights(None)
    torch.testing.assert_close(model(ids), plain)


def test_rounded_checkpoint_is_exported_without_rounding_error(tmp_path: Path) -> None:
    model = tiny_model()
    model.round_weights(BlockRounding(4, 64))
    save_model(tmp_path, model, train_tokenizer(["list the files"], vocab_size=300))
    weight_format = WeightFormat(4, 64)
    matrices = [tensor for tensor in load_file(tmp_path / "model.safetensors").values() if tensor.ndim == 2]
    assert len(matrices) == 1 + 7 * SHAPE.num_hidden_layers
    for matrix in matrices:
        stored = dequantize_rows(*quantize_rows(matrix, weight_format), matrix.shape[1], weight_format)
        np.testing.assert_allclose(stored, matrix, rtol=1e-6, atol=0)


def test_float_weights_are_written_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_model()
    save_model(tmp_path, model, train_tokenizer(["list the files"], vocab_size=300))
    read, _ = load_model(tmp_path)
    for name, parameter in model.named_parameters():
        expected = parameter.detach().to(torch.bfloat16).float()
        assert torch.equal(dict(read.named_parameters())[name], expected), name
    assert dataclasses.asdict(read.shape) == dataclasses.asdict(SHAPE)
