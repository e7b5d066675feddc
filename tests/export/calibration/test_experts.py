"""Statistics, GPTQ and AWQ scaling of experts, each by the tokens that the router sends there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edgerun.export import Method, WeightFormat
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.awq import apply_awq, scaled_statistics
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.calibration.collect_statistics import (
    PRIOR_TOKENS,
    CalibratedSource,
    collect_statistics,
    rare_experts,
)
from edgerun.export.calibration.layer_graphs import expert_of
from edgerun.export.calibration.layer_runner import LayerRunner
from edgerun.export.calibration.text_batches import pack_texts
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layer_weights import FusedLinear
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.checkpoint.source import ModelSource, RowRange
from edgerun.export.quantization.codes import InputStatistics, dequantized
from edgerun.export.quantization.methods import QUANTIZERS
from edgerun.models.progress import silent
from support.tiny_models import GRANITE_EXPERTS, write_checkpoint

FAMILIES = ["qwen3_moe", "gpt_oss", "qwen3_5_moe_text"]
OVERRIDES = {"granitemoehybrid": GRANITE_EXPERTS}
GPTQ, NEAREST = (WeightFormat(4, 32, method=method) for method in (Method.GPTQ, Method.RTN))


class Collected:
    """A tiny model with experts, and the statistics of its linears' inputs over random text."""

    def __init__(self, folder: Path, family: str, tokens: int = 1500, source: ModelSource | None = None) -> None:
        self.checkpoint = source or Checkpoint(write_checkpoint(folder / "model", family, **OVERRIDES.get(family, {})))
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


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_error_of_every_expert_is_less_than_that_of_rounding(tmp_path: Path, family: str) -> None:
    found = Collected(tmp_path, family)
    source = CalibratedSource(found.checkpoint, found.config, found.store.of)
    for linear in found.experts:
        for expert in range(linear.experts):
            known, errors = found.store.of(expert_of(linear.name, expert)), []
            for weight_format in (GPTQ, NEAREST):
                total = 0.0
                for rows in found.rows_of(linear, expert):
                    exact = found.checkpoint.read_rows(rows)
                    rounded = dequantized(source.quantized(rows, weight_format), linear.columns, weight_format)
                    error = rounded - exact
                    total += float(np.einsum("nk,nk->", error @ known.second_moment, error))
                errors.append(total)
            assert errors[0] < 0.9 * errors[1], (linear.name, expert)


def test_rows_of_several_experts_are_quantized_by_the_statistics_of_each(tmp_path: Path) -> None:
    found = Collected(tmp_path, "gpt_oss")
    source, linear = CalibratedSource(found.checkpoint, found.config, found.store.of), found.experts[1]
    size = linear.shape[0] // linear.experts
    start, stop = size // 2, 3 * size - 8
    joined = source.quantized(RowRange(linear.weights[0], start, stop), GPTQ)
    exact = found.checkpoint.read_rows(RowRange(linear.weights[0], start, stop))
    for expert in range(3):
        part = slice(max(start, expert * size) - start, min(stop, (expert + 1) * size) - start)
        own = QUANTIZERS[Method.GPTQ](exact[part], GPTQ, found.store.of(expert_of(linear.name, expert)))
        np.testing.assert_array_equal(joined.packed[part], own.packed)
        np.testing.assert_array_equal(joined.scales[part], own.scales)


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


class Uneven:
    """Statistics of inputs whose magnitudes differ far more than those of random weights."""

    def __init__(self, found: Collected) -> None:
        self._columns = {linear.name: linear.columns for linear in fused_linears(found.config)}

    def of(self, linear: str) -> InputStatistics:
        """Statistics of the inputs of a linear, or of one of its experts."""
        layer_and_name = ".".join(linear.split(".")[:3])
        seed = sum(linear.encode()) if linear.count(".") == 3 and ".down." in linear else 0
        columns = self._columns[layer_and_name]
        size = np.exp(2 * np.random.default_rng(seed).standard_normal(columns))
        return InputStatistics((size**2).astype(np.float32), (0.8 * size).astype(np.float32))


@pytest.mark.parametrize(
    ("family", "second_linears"),
    [("qwen3_moe", True), ("gpt_oss", False), ("qwen3_5_moe_text", True), ("granitemoehybrid", True)],
)
def test_scaling_leaves_the_float_model_as_it_is(tmp_path: Path, family: str, second_linears: bool) -> None:
    """The inputs of gpt-oss's second linears are not proportional to up, which is bounded and has 1 added."""
    found = Collected(tmp_path, family, tokens=300)
    weight_format = WeightFormat(2, 32, method=Method.K_QUANT)
    model, statistics = apply_awq(found.checkpoint, found.config, Uneven(found).of, weight_format, silent)
    settings = json.loads((found.checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    tokens = np.array([7, 200, 31, 4, 299, 18, 31, 4])
    expected = reference_logits(found.checkpoint, settings, tokens, 256)
    np.testing.assert_allclose(reference_logits(model, settings, tokens, 256), expected, rtol=1e-4, atol=1e-4)
    changed = {name for name in model.scales.inputs if name.count(".") == 3}
    assert {name.split(".")[2] for name in changed} == ({"gate_up", "down"} if second_linears else {"gate_up"})
    # Router and shared expert read what the selected experts read, and are scaled back by the same factors.
    for layer in {name.split(".")[1] for name in changed if ".gate_up." in name}:
        router, expert = (model.scales.inputs[f"layers.{layer}.{name}"] for name in ("router", "gate_up.0"))
        np.testing.assert_array_equal(router, expert)
    after = Collected(tmp_path / "after", family, tokens=300, source=model)
    before = scaled_statistics(found.store.of, model.scales)
    for name in sorted(each for each in changed if ".gate_up." in each):
        first, second = before(name), after.store.of(name)
        np.testing.assert_allclose(first.mean_square, second.mean_square, rtol=1e-3)
    assert statistics(next(iter(changed))) is not None
