"""Rounding unit by unit to what makes up for the units before: nearer to the float model, and the same every time."""

from __future__ import annotations

import numpy as np
import pytest

from edgerun.export import FP32, Method, WeightFormat
from edgerun.export.calibration.calibrated_source import CalibratedSource
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.calibration.collect_statistics import collect_statistics
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.calibration.sequential import quantize_sequentially
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.quantization.codes import dequantized
from edgerun.models.progress import silent
from support.tiny_models import write_checkpoint

GPTQ = WeightFormat(4, 32, method=Method.GPTQ)
K_QUANT = WeightFormat(4, 32, method=Method.K_QUANT)


def random_text(seed: int, texts: int = 60) -> CalibrationText:
    return CalibrationText(tuple(np.random.default_rng(seed).integers(0, 300, (texts, 40))), (), "random")


def observed(folder, text: CalibrationText, family: str, **overrides) -> tuple[CalibratedSource, DecoderConfig]:
    checkpoint = Checkpoint(write_checkpoint(folder / "model", family, **overrides))
    config = read_config(checkpoint.folder)
    statistics = collect_statistics(checkpoint, config, text, folder / "statistics", 256, True, lambda _: None)
    return CalibratedSource(checkpoint, config, statistics), config


def divergence(folder, source: CalibratedSource, config: DecoderConfig, plan, weights_of) -> float:
    texts = random_text(1, 10).calibration
    return PlanEvaluator(source, config, texts, weights_of, folder, 256).divergence(plan).mean_kl


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gemma2", False), ("olmo2", False), ("qwen2", True)])
def test_nearer_to_the_float_model_than_units_by_themselves(tmp_path, family: str, tied: bool) -> None:
    text = random_text(0)
    source, config = observed(tmp_path, text, family, tie_word_embeddings=tied, num_hidden_layers=3)
    plan = {linear.name: GPTQ for linear in fused_linears(config)}
    store = quantize_sequentially(source, config, text, plan, tmp_path / "store", 256, silent)

    def alone(linear, form):
        parts = (rows for name in linear.weights for rows in source.row_ranges(name))
        return np.concatenate([dequantized(source.quantized(rows, form), linear.columns, form) for rows in parts])

    plain = divergence(tmp_path / "alone", source, config, plan, alone)
    assert divergence(tmp_path / "successive", source, config, plan, store.weights) < 0.95 * plain


def test_only_units_of_gptq_have_targets(tmp_path) -> None:
    text = random_text(0, 30)
    source, config = observed(tmp_path, text, "llama")
    plan = {linear.name: K_QUANT for linear in fused_linears(config)}
    plan |= {"layers.0.o": GPTQ, "layers.1.down": GPTQ, "layers.1.qkv": FP32}
    store = quantize_sequentially(source, config, text, plan, tmp_path / "store", 256, silent)
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
    """Stands for whatever ends a run."""


def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path) -> None:
    text = random_text(0, 30)
    source, config = observed(tmp_path, text, "llama")
    plan = {linear.name: GPTQ for linear in fused_linears(config)}

    def breaks(stage: str, fraction: float) -> None:
        if fraction > 0:
            raise Broken

    with pytest.raises(Broken):
        quantize_sequentially(source, config, text, plan, tmp_path / "broken", 256, breaks)
    assert list((tmp_path / "broken").iterdir())
    resumed, whole = (
        quantize_sequentially(source, config, text, plan, tmp_path / name, 256, silent) for name in ("broken", "whole")
    )
    for linear in fused_linears(config):
        np.testing.assert_array_equal(resumed.quantized(linear, GPTQ).packed, whole.quantized(linear, GPTQ).packed)
