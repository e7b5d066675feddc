"""Static graphs whose linears have integer inputs and outputs: SmoothQuant, rounding, and what the graphs compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgerun.export import ExportRecipe
from edgerun.export.bundle_content import BundleContent
from edgerun.export.bundle_writer import write_graph
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.calibration.collect_statistics import collect_statistics
from edgerun.export.calibration.smooth_quant import smoothed_linears
from edgerun.export.check.reference import reference_logits
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layout import layer_layout
from edgerun.export.checkpoint.open import open_source
from edgerun.export.npu.npu_weights import IntegerLinears, integer_range
from edgerun.export.npu.static_decoder import static_logits, write_static_graphs
from edgerun.export.npu.static_shapes import StaticShape
from edgerun.models.progress import silent
from support.tiny_models import ATTENTION_FAMILIES, tiny_config, tiny_weights, write_checkpoint, write_weights

TEXTS = tuple(np.random.default_rng(3).integers(5, 300, (40, 30)))
CAPACITY = 48
LARGE = 40.0
"""Factor of a few channels of a norm: activations of large models have such outliers."""
BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
SCALABLE = [family for family in ATTENTION_FAMILIES if family not in ("qwen3_moe", "gpt_oss", "gemma4_text")]


class Calibrated:
    """A tiny model with outliers in the inputs of its first layer, and how its linears are computed in integers."""

    def __init__(self, folder: Path, family: str = "llama", bits: int = 8, weights: str = "int8", **overrides: Any):
        self._folder = folder
        self.source = write_checkpoint(folder / "checkpoint", family, **overrides)
        tensors = tiny_weights(tiny_config(family, **overrides))
        if (name := "model.layers.0.input_layernorm.weight") in tensors:
            tensors[name][[3, 17]] *= LARGE
            write_weights(self.source, tensors)
        with open_source(self.source) as (config, checkpoint):
            recipe = ExportRecipe(weights, device="npu", widths=(1, 4), contexts=(CAPACITY,))
            self.content = BundleContent(
                source=checkpoint,
                original=checkpoint,
                config=config,
                plan=recipe.quant_plan(config),
                context=256,
                static_shapes=recipe.static_shapes(256),
            )
            text = CalibrationText(TEXTS, (), "random")
            statistics = collect_statistics(self.content, text, folder / "statistics", True, silent).of
            self.integers = smoothed_linears(self.content, text, statistics, bits, silent)

    def reference(self, source: Any, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return reference_logits(source, read_config(self.source), tokens, 256)

    def logits(self, integers: IntegerLinears, width: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        bundle = self._folder / "bundle"
        bundle.mkdir(exist_ok=True)
        content = replace(self.content, integer_linears=integers)
        write_static_graphs(bundle, content, write_graph(bundle, content)[0], silent)
        return static_logits(bundle, StaticShape(width, CAPACITY))(tokens)

    def error(self, integers: IntegerLinears, width: int = 4) -> float:
        """Root mean square of the logit differences to the float model, relative to the logits' standard deviation."""
        expected = self.reference(self.content.source, TEXTS[0])
        difference = self.logits(integers, width, TEXTS[0]) - expected
        return float(np.sqrt(np.square(difference).mean()) / expected.std())


@pytest.mark.parametrize(("family", "overrides"), [*((family, {}) for family in SCALABLE), ("llama", BIASED)], ids=str)
def test_factors_keep_the_float_model(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    model = Calibrated(tmp_path, family, **overrides)
    expected = model.reference(model.content.source, TEXTS[0])
    found = model.reference(model.integers.source, TEXTS[0])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())
    name = layer_layout(model.content.config, 0).down.weights[0]
    assert np.abs(model.integers.source.read(name) - model.content.source.read(name)).max() > 0.01


def test_outliers_of_inputs_move_into_the_weights(tmp_path: Path) -> None:
    model = Calibrated(tmp_path)
    plain = replace(smoothed_at_16_bits(model), bits=8)
    name = layer_layout(model.content.config, 0).qkv.name

    def spread(integers: IntegerLinears) -> float:
        largest = np.abs(integers.ranges[name]).max(axis=0)
        return float(largest.max() / np.median(largest))

    assert spread(plain) > LARGE / 4
    assert spread(model.integers) < spread(plain) / 3
    assert model.error(model.integers) < 0.6 * model.error(plain)


def smoothed_at_16_bits(model: Calibrated) -> IntegerLinears:
    """The model's linears for 16 bits, whose inputs keep their outliers."""
    statistics = collect_statistics(model.content, CalibrationText(TEXTS, (), ""), model.source / "s", True, silent).of
    return smoothed_linears(model.content, CalibrationText(TEXTS, (), ""), statistics, 16, silent)


@pytest.mark.parametrize(
    ("family", "bits", "weights", "limit", "overrides"),
    [
        ("llama", 16, "int8", 0.06, BIASED),
        ("llama", 8, "int8", 0.15, BIASED),
        ("phi3", 16, "int8", 0.02, {}),
        ("gemma2", 16, "int8", 0.02, {}),
        ("qwen2", 16, "int4", 0.4, {}),
    ],
    ids=str,
)
def test_graphs_agree_with_the_float_model(
    tmp_path: Path, family: str, bits: int, weights: str, limit: float, overrides: dict[str, Any]
) -> None:
    model = Calibrated(tmp_path, family, bits, weights, **overrides)
    errors = [model.error(model.integers, width) for width in (1, 4)]
    assert max(errors) < limit


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_symmetric_codes_of_one_scale_an_output(tmp_path: Path, bits: int) -> None:
    model = Calibrated(tmp_path)
    linear = layer_layout(model.content.config, 1).gate_up
    for name in linear.weights:
        codes, scales = model.integers.matrix(linear, name, bits)
        exact = model.integers.source.read(name).T
        assert codes.shape == exact.shape
        assert codes.min() >= -(1 << (bits - 1))
        assert codes.max() < 1 << (bits - 1)
        assert (scales > 0).all()
        np.testing.assert_array_equal(scales, scales.astype(np.float16))
        error = np.abs(codes * scales - exact)
        # GPTQ moves errors between weights, so single ones may be off by more than half a step.
        assert (error < 0.51 * scales).mean() > 0.5
        assert error.mean() < 0.6 * scales.mean()


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("values", [(-3.0, 5.0), (0.0, 7.0), (-1e-4, 0.0), (0.0, 0.0), (-60000.0, 60000.0)])
def test_integers_reach_the_range_and_have_an_exact_zero(bits: int, values: tuple[float, float]) -> None:
    scale, zero = integer_range(np.array(values, np.float32)[:, None], bits)
    assert np.isfinite(scale)
    assert scale > 0
    least, largest = (0 - int(zero)) * float(scale), ((1 << bits) - 1 - int(zero)) * float(scale)
    assert least <= values[0] + float(scale) / 2
    assert largest >= values[1] - float(scale) / 2
    assert zero.dtype == (np.uint8 if bits == 8 else np.uint16)
