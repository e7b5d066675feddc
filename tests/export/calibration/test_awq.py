"""AWQ scaling keeps the float model, and quantization loses less."""

from __future__ import annotations

import json

import numpy as np
import pytest

from edgerun.export import FP32, Method, WeightFormat
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.awq import AwqSource, apply_awq, scaled_statistics
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.calibration.collect_statistics import (
    CalibratedSource,
    StatisticsOf,
    StatisticsStore,
    collect_statistics,
)
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.checkpoint.source import RowRange
from edgerun.export.quantization.codes import InputStatistics, dequantized
from edgerun.export.quantization.methods import QUANTIZERS
from edgerun.models.progress import silent
from support.tiny_models import write_checkpoint

FORMAT = WeightFormat(2, 32, method=Method.K_QUANT)
FAMILIES = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "qwen2": {},
    "phi3": {"num_key_value_heads": 2},
    "gemma2": {},
    "gemma3_text": {},
    "olmo2": {},
    "granite": {},
    "lfm2": {"conv_bias": True},
    "qwen3_5_text": {},
    "granitemoehybrid": {},
}
TOKENS = np.array([7, 200, 31, 4, 299, 18, 31, 4])


class Uneven:
    """Statistics of inputs whose magnitudes differ far more than those of random weights."""

    def __init__(self, config: DecoderConfig) -> None:
        self._columns = {linear.name: linear.columns for linear in fused_linears(config)}

    def of(self, linear: str) -> InputStatistics:
        """Statistics of a linear's inputs."""
        size = np.exp(2 * np.random.default_rng(self._columns[linear]).standard_normal(self._columns[linear]))
        return InputStatistics((size**2).astype(np.float32), (0.8 * size).astype(np.float32))


def scaled_model(
    folder, family: str = "llama", **overrides
) -> tuple[Checkpoint, DecoderConfig, AwqSource, StatisticsOf]:
    source = Checkpoint(write_checkpoint(folder / "model", family, **overrides))
    config = read_config(source.folder)
    return source, config, *apply_awq(source, config, Uneven(config).of, FORMAT, silent)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_float_model_is_unchanged(tmp_path, family: str) -> None:
    source, config, model, statistics = scaled_model(tmp_path, family, **FAMILIES[family])
    settings = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    expected = reference_logits(source, settings, TOKENS, 256)
    np.testing.assert_allclose(reference_logits(model, settings, TOKENS, 256), expected, rtol=1e-4, atol=1e-4)
    # All kinds of linears that can be scaled are.
    before, changed = Uneven(config), set()
    for linear in fused_linears(config):
        known = statistics(linear.name)
        if not np.array_equal(known.mean_square, before.of(linear.name).mean_square):
            changed.add(linear.name.split(".")[-1])
    after_norms = set() if family == "olmo2" else {"qkv", "gate_up"}
    # The inputs of a delta net's output projection are normed, and proportional to no part of its first linear.
    mixers = {
        "lfm2": {"conv_in", "conv_out"},
        "qwen3_5_text": {"delta_in", "delta_gates"},
        "granitemoehybrid": {"mamba_in"},
    }.get(family, set())
    assert changed == {"o", "down"} | after_norms | mixers | (set() if config.tied_head else {"head"})


def test_heads_of_a_group_share_their_factors(tmp_path) -> None:
    _, config, _, statistics = scaled_model(tmp_path, num_attention_heads=8, num_key_value_heads=2)
    before, after = Uneven(config).of("layers.0.o"), statistics("layers.0.o")
    factors = (after.mean_magnitude / before.mean_magnitude).reshape(2, 4, config.head_dim)
    np.testing.assert_allclose(factors, np.broadcast_to(factors[:, :1], factors.shape), rtol=1e-5)
    assert np.ptp(factors) > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_statistics_are_those_of_the_scaled_model(tmp_path, family: str) -> None:
    source, config, model, _ = scaled_model(tmp_path, family, tie_word_embeddings=False)
    texts = tuple(np.random.default_rng(0).integers(0, 300, (6, 40)))
    text = CalibrationText(texts, (), "random")

    def collected(which, name: str) -> StatisticsStore:
        return collect_statistics(SourceModel(which, config, 256), text, tmp_path / name, True, silent)

    expected, known = collected(model, "after"), scaled_statistics(collected(source, "before").of, model.scales)
    for linear in fused_linears(config):
        first, second = known(linear.name), expected.of(linear.name)
        assert (first is None) == (second is None) == (linear.name == "embedding")
        if first is not None and second is not None:
            np.testing.assert_allclose(first.mean_square, second.mean_square, rtol=1e-3)
            np.testing.assert_allclose(first.mean_magnitude, second.mean_magnitude, rtol=1e-3)
            largest = np.abs(second.second_moment).max()
            np.testing.assert_allclose(first.second_moment, second.second_moment, rtol=1e-2, atol=1e-4 * largest)


def test_quantization_loses_less(tmp_path) -> None:
    source, config, model, statistics = scaled_model(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    unscaled = CalibratedSource(source, config, Uneven(config).of)
    with_scales = CalibratedSource(model, config, statistics)
    mean_square = Uneven(config).of("layers.0.down").mean_square
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

    class Even:
        def of(self, linear: str) -> InputStatistics | None:
            columns = next(each.columns for each in fused_linears(config) if each.name == linear)
            return InputStatistics(np.ones(columns, np.float32), np.ones(columns, np.float32))

    model, statistics = apply_awq(source, config, Even().of, FORMAT, silent)
    for linear in fused_linears(config):
        for name in linear.weights:
            np.testing.assert_array_equal(model.read(name), source.read(name))
        known = statistics(linear.name)
        assert (known.mean_square == 1).all()


@pytest.mark.parametrize("tied", [True, False])
def test_methods_get_the_statistics_of_the_linear(tmp_path, tied: bool) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "model", tie_word_embeddings=tied))
    config = read_config(source.folder)
    statistics = Uneven(config).of
    calibrated = CalibratedSource(source, config, statistics)
    for linear in fused_linears(config):
        for name in linear.weights:
            (rows,) = source.row_ranges(name)
            expected = QUANTIZERS[Method.K_QUANT](source.read(name), FORMAT, statistics(linear.name))
            np.testing.assert_array_equal(calibrated.quantized(rows, FORMAT).packed, expected.packed)
    assert calibrated.stored_format("model.embed_tokens.weight") == FP32
