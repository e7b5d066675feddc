"""Sequential GPTQ: closer to the float model than independent quantization, and resumable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgerun.export import FP32, Method, WeightFormat
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.calibration.collect_statistics import CalibratedSource, collect_statistics
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.calibration.sequential import quantize_sequentially
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.quantization.codes import dequantized
from edgerun.models.progress import silent
from support.tiny_models import write_checkpoint

GPTQ = WeightFormat(4, 32, method=Method.GPTQ)
K_QUANT = WeightFormat(4, 32, method=Method.K_QUANT)
OTHER_FAMILIES = (("gemma2", False), ("olmo2", False), ("qwen2", True))


def random_text(seed: int, texts: int = 60) -> CalibrationText:
    return CalibrationText(tuple(np.random.default_rng(seed).integers(0, 300, (texts, 40))), (), "random")


def calibrated(folder, text: CalibrationText, family: str, **overrides) -> SourceModel:
    checkpoint = Checkpoint(write_checkpoint(folder / "model", family, **overrides))
    model = SourceModel(checkpoint, read_config(checkpoint.folder), 256)
    statistics = collect_statistics(model, text, folder / "statistics", True, silent)
    return replace(model, source=CalibratedSource(checkpoint, model.config, statistics.of))


def divergence(folder, model: SourceModel, plan, weights_of) -> float:
    return PlanEvaluator(model, random_text(1, 10).calibration, weights_of, folder).divergence(plan).mean_kl


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", True), *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHER_FAMILIES)],
)
def test_divergence_is_less_than_with_independent_linears(tmp_path, family: str, tied: bool) -> None:
    text = random_text(0)
    model = calibrated(tmp_path, text, family, tie_word_embeddings=tied, num_hidden_layers=3)
    source, config = model.source, model.config
    plan = {linear.name: GPTQ for linear in fused_linears(config)}
    store = quantize_sequentially(model, text, plan, tmp_path / "store", silent)

    def independent(linear, weight_format):
        parts = (rows for name in linear.weights for rows in source.row_ranges(name))
        return np.concatenate(
            [dequantized(source.quantized(rows, weight_format), linear.columns, weight_format) for rows in parts]
        )

    plain = divergence(tmp_path / "independent", model, plan, independent)
    assert divergence(tmp_path / "sequential", model, plan, store.weights) < 0.95 * plain


def test_only_linears_of_gptq_have_targets(tmp_path) -> None:
    text = random_text(0, 30)
    model = calibrated(tmp_path, text, "llama")
    source, config = model.source, model.config
    plan = {linear.name: K_QUANT for linear in fused_linears(config)}
    plan |= {"layers.0.o": GPTQ, "layers.1.down": GPTQ, "layers.1.qkv": FP32}
    store = quantize_sequentially(model, text, plan, tmp_path / "store", silent)
    for linear in fused_linears(config):
        if plan[linear.name].bits == 32:
            np.testing.assert_array_equal(
                store.weights(linear, FP32), np.concatenate([source.read(n) for n in linear.weights])
            )
            continue
        parts = [
            source.quantized(rows, plan[linear.name]) for name in linear.weights for rows in source.row_ranges(name)
        ]
        same = np.array_equal(
            np.concatenate([part.packed for part in parts]), store.quantized(linear, plan[linear.name]).packed
        )
        assert same == (plan[linear.name].method is not Method.GPTQ), linear.name


class Broken(Exception):
    """Interrupts a run."""


def test_an_interrupted_run_is_resumed(tmp_path) -> None:
    text = random_text(0, 30)
    model = calibrated(tmp_path, text, "llama")
    plan = {linear.name: GPTQ for linear in fused_linears(model.config)}

    def breaks(stage: str, fraction: float) -> None:
        if fraction > 0:
            raise Broken

    with pytest.raises(Broken):
        quantize_sequentially(model, text, plan, tmp_path / "broken", breaks)
    assert list((tmp_path / "broken").iterdir())
    resumed, whole = (quantize_sequentially(model, text, plan, tmp_path / name, silent) for name in ("broken", "whole"))
    for linear in fused_linears(model.config):
        np.testing.assert_array_equal(resumed.quantized(linear, GPTQ).packed, whole.quantized(linear, GPTQ).packed)
