"""AWQ scaling keeps the float model and loses less; statistics, GPTQ and scaling of experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgerun.export import Method, WeightFormat
from edgerun.export.allocation.quantized_weights import QuantizedLinearStore
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.awq import AwqSource, apply_awq, scaled_statistics
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.calibration.collect_statistics import (
    PRIOR_TOKENS,
    StatisticsStore,
    collect_statistics,
    rare_experts,
)
from edgerun.export.calibration.layer_graphs import expert_of
from edgerun.export.calibration.layer_runner import LayerRunner
from edgerun.export.calibration.text_batches import pack_texts
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layer_weights import FusedLinear
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.checkpoint.source import RowRange
from edgerun.export.quantization.codes import InputStatistics, StatisticsOf, dequantized
from edgerun.export.quantization.methods import QUANTIZERS
from edgerun.models.progress import silent
from support.correlated_inputs import UnevenInputs
from support.tiny_models import GRANITE_EXPERTS, write_checkpoint

FORMAT = WeightFormat(2, 32, method=Method.K_QUANT)
FAMILIES = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "phi3": {"num_key_value_heads": 2},
    "gemma2": {},
    "gemma3_text": {"tie_word_embeddings": False},
    "olmo2": {},
    "granite": {},
    "lfm2": {"conv_bias": True},
    "qwen3_5_text": {},
    "granitemoehybrid": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "qwen3_5_moe_text": {},
    "granitemoehybrid with experts": GRANITE_EXPERTS,
}
USUAL = {"qkv", "o", "gate_up", "down"}
SCALED = {
    "olmo2": {"o", "down"},
    "lfm2": USUAL | {"conv_in", "conv_out"},
    # The inputs of a delta net's output projection are normed, and proportional to no part of its first linear.
    "qwen3_5_text": USUAL | {"delta_in", "delta_gates"},
    "granitemoehybrid": USUAL | {"mamba_in"},
    "qwen3_moe": USUAL | {"router"},
    # The inputs of its second linears are not proportional to up, which is bounded and has 1 added.
    "gpt_oss": {"qkv", "o", "gate_up", "router"},
    "qwen3_5_moe_text": USUAL | {"delta_in", "delta_gates", "router", "shared_gate_up", "shared_gate", "shared_down"},
    "granitemoehybrid with experts": USUAL | {"mamba_in", "router", "shared_gate_up", "shared_down"},
}
"""Kinds of linears whose inputs are scaled, for families with others than the usual ones."""
TOKENS = np.array([7, 200, 31, 4, 299, 18, 31, 4])


def scaled_model(
    folder, family: str = "llama", **overrides
) -> tuple[Checkpoint, DecoderConfig, AwqSource, StatisticsOf]:
    source = Checkpoint(write_checkpoint(folder / "model", family, **overrides))
    config = read_config(source.folder)
    return source, config, *apply_awq(source, config, UnevenInputs(config).of, FORMAT, silent)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_float_model_is_unchanged_and_its_statistics_are_those_of_the_scaled_one(tmp_path, family: str) -> None:
    source, config, model, _ = scaled_model(tmp_path, family.partition(" ")[0], **FAMILIES[family])
    expected = reference_logits(source, config, TOKENS, 256)
    np.testing.assert_allclose(reference_logits(model, config, TOKENS, 256), expected, rtol=1e-4, atol=1e-4)
    changed = {name.split(".")[2] if "." in name else name for name in model.scales.inputs}
    assert changed == SCALED.get(family, USUAL) | (set() if config.tied_head else {"head"})
    # Router and shared expert read what the selected experts read, and are scaled back by the same factors.
    for name, factors in model.scales.inputs.items():
        if name.endswith(".router"):
            np.testing.assert_array_equal(factors, model.scales.inputs[name.replace("router", "gate_up.0")])
    texts = tuple(np.random.default_rng(0).integers(0, 300, (6, 40)))

    def collected(which, name: str) -> StatisticsStore:
        text = CalibrationText(texts, (), "random")
        return collect_statistics(SourceModel(which, config, 256), text, tmp_path / name, True, silent)

    after, known = collected(model, "after"), scaled_statistics(collected(source, "before").of, model.scales)
    for name in {*(linear.name for linear in fused_linears(config)), *model.scales.inputs}:
        if config.experts is not None and ".down" in name:
            continue  # experts share a part of their statistics, but have factors of their own
        first, second = known(name), after.of(name)
        assert (first is None) == (second is None) == (name == "embedding" and not config.tied_head)
        if first is not None and second is not None:
            np.testing.assert_allclose(first.mean_square, second.mean_square, rtol=1e-3)
            np.testing.assert_allclose(first.mean_magnitude, second.mean_magnitude, rtol=1e-3)
            largest = np.abs(second.second_moment).max()
            np.testing.assert_allclose(first.second_moment, second.second_moment, rtol=1e-2, atol=1e-4 * largest)


def test_quantization_loses_less(tmp_path) -> None:
    source, config, model, statistics = scaled_model(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    unscaled = QuantizedLinearStore(source, config, tmp_path / "unscaled", UnevenInputs(config).of)
    with_scales = QuantizedLinearStore(model, config, tmp_path / "scaled", statistics)
    mean_square = UnevenInputs(config).of("layers.0.down").mean_square
    exact = source.read(name)
    rows = RowRange(name, 0, len(exact))
    columns = exact.shape[1]
    plain = dequantized(unscaled.quantized(rows, FORMAT), columns, FORMAT)
    # Undo the scaling of columns and rows.
    scaled = dequantized(with_scales.quantized(rows, FORMAT), columns, FORMAT) * (exact / model.read(name))
    first, second = (float((np.square(each - exact) @ mean_square).sum()) for each in (plain, scaled))
    assert second < 0.9 * first


def test_even_inputs_are_left_alone(tmp_path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "model"))
    config = read_config(source.folder)

    def even(linear: str) -> InputStatistics:
        ones = np.ones(next(each.columns for each in fused_linears(config) if each.name == linear), np.float32)
        return InputStatistics(ones, ones)

    model, statistics = apply_awq(source, config, even, FORMAT, silent)
    for linear in fused_linears(config):
        for name in linear.weights:
            np.testing.assert_array_equal(model.read(name), source.read(name))
        assert (statistics(linear.name).mean_square == 1).all()


EXPERT_FAMILIES = ["qwen3_moe", "gpt_oss", "qwen3_5_moe_text"]
OVERRIDES = {"granitemoehybrid": GRANITE_EXPERTS}
GPTQ = WeightFormat(4, 32, method=Method.GPTQ)


class Collected:
    """A tiny model, and the statistics of its linears' inputs over random text."""

    def __init__(self, folder: Path, family: str, tokens: int = 1500, **overrides: object) -> None:
        overrides = {**OVERRIDES.get(family, {}), **overrides}
        self.checkpoint = Checkpoint(write_checkpoint(folder / "model", family, **overrides))
        self.config = read_config(self.checkpoint.folder)
        self.texts = tuple(np.random.default_rng(2).integers(0, 300, (tokens // 30, 30)))
        self.model = SourceModel(self.checkpoint, self.config, 256)
        text = CalibrationText(self.texts, (), "random")
        self.store = collect_statistics(self.model, text, folder / "work", True, silent)
        self.experts = [linear for linear in fused_linears(self.config) if linear.experts]

    def rows_of(self, linear: FusedLinear, expert: int) -> list[RowRange]:
        """The rows of an expert in the checkpoint's matrices."""
        if linear.stacked:
            rows = linear.shape[0] // linear.experts
            return [RowRange(linear.weights[0], expert * rows, (expert + 1) * rows)]
        each = len(linear.weights) // linear.experts
        own = slice(expert * each, (expert + 1) * each)
        return [RowRange(name, 0, rows) for name, rows in zip(linear.weights[own], linear.rows[own], strict=True)]


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_statistics_are_those_of_the_tokens_of_an_expert(tmp_path: Path, family: str) -> None:
    found = Collected(tmp_path, family, tokens=600)
    runner, inputs = LayerRunner(found.model), {}
    for batch in pack_texts(found.texts):
        hidden = runner.embed(batch)
        for index in range(found.config.layers):
            hidden, _, routed = runner.captured(index, hidden, batch, runner.matrix)
            for name, (tokens, values) in routed.items():
                kept = batch.filled.reshape(-1)[tokens]
                inputs.setdefault(name, []).append(values[kept])
    for linear in found.experts:
        own = [np.concatenate(inputs[expert_of(linear.name, expert)]) for expert in range(linear.experts)]
        every = np.concatenate(own)
        for expert, values in enumerate(own):
            known = found.store.of(expert_of(linear.name, expert))
            assert known.second_moment is not None
            assert found.store.tokens(expert_of(linear.name, expert)) == len(values)
            moment = (values.T @ values + PRIOR_TOKENS * every.T @ every / len(every)) / (len(values) + PRIOR_TOKENS)
            np.testing.assert_allclose(known.second_moment, moment, rtol=1e-3, atol=1e-4 * np.abs(moment).max())
            np.testing.assert_allclose(known.mean_square, np.diagonal(moment), rtol=1e-3)
        assert found.store.tokens(linear.name) == len(every) == len(found.texts) * 30 * found.config.experts.top_k


def test_large_experts_share_the_second_moments_of_their_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Collected(tmp_path / "own", "qwen3_moe", tokens=300)
    monkeypatch.setattr("edgerun.export.calibration.collect_statistics.MAX_MOMENT_BYTES", 5 * 4 * 64 * 64 - 1)
    shared = Collected(tmp_path / "shared", "qwen3_moe", tokens=300)
    for name, is_shared in (("layers.0.gate_up", True), ("layers.0.down", False)):
        together = shared.store.of(name)
        first, second = own.store.of(f"{name}.1"), shared.store.of(f"{name}.1")
        assert together is not None
        np.testing.assert_array_equal(first.mean_square, second.mean_square)
        expected = together if is_shared else first
        assert expected.second_moment is not None
        assert second.second_moment is not None
        np.testing.assert_array_equal(second.second_moment, expected.second_moment)


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", True), ("llama", False), *((family, True) for family in EXPERT_FAMILIES)]
)
def test_linears_and_experts_are_quantized_by_their_own_statistics(
    tmp_path: Path, family: str, tied: bool, monkeypatch
) -> None:
    monkeypatch.setattr("edgerun.export.checkpoint.source._CHUNK_WEIGHTS", 40 * 64)  # parts that begin in an expert
    found = Collected(tmp_path, family, tie_word_embeddings=tied)
    source = QuantizedLinearStore(found.checkpoint, found.config, tmp_path / "linears", found.store.of)
    for linear in (each for each in fused_linears(found.config) if not each.exact):
        whole = [RowRange(name, 0, rows) for name, rows in zip(linear.weights, linear.rows, strict=True)]
        experts = [(expert_of(linear.name, each), found.rows_of(linear, each)) for each in range(linear.experts)]
        for name, ranges in experts or [(linear.name, whole)]:
            for rows in ranges:
                own = QUANTIZERS[Method.GPTQ](found.checkpoint.read_rows(rows), GPTQ, found.store.of(name))
                stored = source.quantized(rows, GPTQ)
                np.testing.assert_array_equal(stored.packed, own.packed)
                np.testing.assert_array_equal(stored.scales, own.scales)


def test_experts_that_the_text_hardly_reaches_are_named_and_use_the_statistics_of_all(tmp_path: Path) -> None:
    few = Collected(tmp_path / "few", "qwen3_moe", tokens=30)
    (note,) = rare_experts(few.store, few.config)
    tokens = [few.store.tokens(expert_of(linear.name, each)) for linear in few.experts[::2] for each in range(5)]
    assert note.startswith(f"{len(tokens)} of {len(tokens)} experts read fewer than {PRIOR_TOKENS} tokens")
    assert f"({tokens.count(0)} of them none)" in note
    for linear in few.experts:
        together = few.store.of(linear.name)
        for expert in range(linear.experts):
            known = few.store.of(expert_of(linear.name, expert))
            if few.store.tokens(expert_of(linear.name, expert)) == 0:
                np.testing.assert_allclose(known.mean_square, together.mean_square, rtol=1e-5)
    many = Collected(tmp_path / "many", "qwen3_moe", tokens=3000)
    assert rare_experts(many.store, many.config) == []
