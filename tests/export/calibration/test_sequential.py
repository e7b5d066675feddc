"""Sequential GPTQ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edgerun.export import FP32, Method, WeightFormat
from edgerun.export.allocation.quantized_weights import QuantizedLinearStore
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.calibration.collect_statistics import collect_statistics
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.calibration.sequential import quantize_sequentially
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.quantization.codes import (
    StatisticsOf,
)
from edgerun.models.progress import silent
from support.tiny_models import source_model

GPTQ = WeightFormat(4, 32, method=Method.GPTQ)
K_QUANT = WeightFormat(4, 32, method=Method.K_QUANT)
OTHER_FAMILIES = (("gemma2", False), ("olmo2", False), ("qwen2", True))


def random_text(seed: int, texts: int = 60) -> CalibrationText:
    return CalibrationText(tuple(np.random.default_rng(seed).integers(0, 300, (texts, 40))), (), "random")


def calibrated(folder, text: CalibrationText, family: str, **overrides) -> tuple[SourceModel, StatisticsOf]:
    model = source_model(folder / "model", family, **overrides)
    return model, collect_statistics(model, text, folder / "statistics", True, silent).of


def sequential(folder, model: SourceModel, text: CalibrationText, plan, statistics, progress=silent):
    store = QuantizedLinearStore(model.source, model.config, folder, statistics)
    quantize_sequentially(model, text, plan, store, progress)
    return store


def divergence(folder, model: SourceModel, plan, weights_of) -> float:
    return PlanEvaluator(model, random_text(1, 10).calibration, weights_of, folder).divergence(plan).mean_kl


@pytest.mark.parametrize(
    ("family", "tied"),
    [("llama", True), *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHER_FAMILIES)],
)
def test_divergence_is_less_than_with_independent_linears(tmp_path, family: str, tied: bool) -> None:
    text = random_text(0)
    model, statistics = calibrated(tmp_path, text, family, tie_word_embeddings=tied, num_hidden_layers=3)
    plan = {linear.name: GPTQ for linear in fused_linears(model.config)}
    store = sequential(tmp_path / "store", model, text, plan, statistics)
    independent = QuantizedLinearStore(model.source, model.config, tmp_path / "apart", statistics)
    plain = divergence(tmp_path / "independent", model, plan, independent.weights)
    assert divergence(tmp_path / "sequential", model, plan, store.weights) < 0.95 * plain


def test_only_linears_of_gptq_have_targets_and_an_interrupted_run_is_resumed(tmp_path) -> None:
    text = random_text(0, 30)
    model, statistics = calibrated(tmp_path, text, "llama")
    linears = list(fused_linears(model.config))
    plan = {linear.name: K_QUANT for linear in linears}
    plan |= {
        "layers.0.o": GPTQ,
        "layers.1.down": GPTQ,
        "layers.1.qkv": FP32,
        "layers.1.o": replace(GPTQ, bits=2),
    }

    def breaks(stage: str, fraction: float) -> None:
        if fraction > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sequential(tmp_path / "broken", model, text, plan, statistics, breaks)
    assert list((tmp_path / "broken").iterdir())
    resumed, whole = (sequential(tmp_path / name, model, text, plan, statistics) for name in ("broken", "whole"))
    apart = QuantizedLinearStore(model.source, model.config, tmp_path / "apart", statistics)
    for linear in linears:
        weights, weight_format = whole.weights(linear, plan[linear.name]), plan[linear.name]
        np.testing.assert_array_equal(weights, resumed.weights(linear, weight_format))
        same = np.array_equal(weights, apart.weights(linear, weight_format))
        assert same == (weight_format.method is not Method.GPTQ), linear.name
