"""Sequential GPTQ, and low-rank corrections in the graph, in the store and in bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import ExportError
from edgerun.export import FP32, Method, WeightFormat
from edgerun.export.allocation.choices import measure_sensitivities
from edgerun.export.allocation.format_candidates import (
    BASE_FORMATS,
    LOW_RANK_FORMATS,
    completed_plan,
    format_candidates,
    is_allowed,
    planned_linears,
)
from edgerun.export.allocation.plan_costs import bytes_read
from edgerun.export.allocation.quantized_weights import QuantizedLinearStore
from edgerun.export.bundle_content import BundleContent, SourceModel
from edgerun.export.bundle_writer import write_bundle
from edgerun.export.calibration.calibration_text import CalibrationText
from edgerun.export.calibration.collect_statistics import collect_statistics
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.calibration.sequential import quantize_sequentially
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layer_weights import FusedLinear
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.checkpoint.source import RowRange
from edgerun.export.graph import decoder as graph_module
from edgerun.export.quantization.codes import (
    FACTOR_FORMAT,
    StatisticsOf,
    correction_factors,
    dequantized,
    low_rank_correction,
    low_rank_product,
)
from edgerun.export.quantization.methods import DEFAULT_METHODS, nearest_rows
from edgerun.export.report.compared_plans import uniform_plan
from edgerun.models.manifest import Manifest
from edgerun.models.progress import silent
from support.correlated_inputs import correlated_inputs, output_error, random_rows
from support.tiny_models import source_model, write_checkpoint

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
        "layers.1.o": replace(GPTQ, bits=2, rank=16),
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


TWO = WeightFormat(2, 64, method=Method.K_QUANT)
RANK = replace(TWO, rank=32)
PLACES = ("qkv", "o", "gate_up", "down")


def content_of(folder: Path, family: str, corrected: dict[str, WeightFormat]) -> BundleContent:
    """A tiny model of 2 bits, some of whose linears have a low-rank correction."""
    source = Checkpoint(write_checkpoint(folder / "checkpoint", family))
    config = read_config(source.folder)
    plan = completed_plan(config, {**uniform_plan(config, TWO), **corrected})
    store = QuantizedLinearStore(source, config, folder / "linears")
    for linear in planned_linears(config):
        store.make(linear, plan[linear.name])
    return BundleContent(source=store, original=source, config=config, plan=plan, context=64)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("place", PLACES)
def test_the_graph_equals_the_reference_for_any_corrected_linear(tmp_path, family: str, place: str) -> None:
    name = f"layers.1.{place}"
    content = content_of(tmp_path, family, {name: RANK})
    folder = tmp_path / "bundle"
    folder.mkdir()
    manifest, *_ = write_bundle(folder, content)  # fails where the graph differs from the reference
    nodes = {node.name: node for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node}
    assert list(nodes[name].input) == [f"{name}.product", f"{name}.repair"]
    assert [nodes[f"{name}.{part}"].op_type for part in ("product", "thin", "repair")] == ["MatMulNBits"] * 3
    manifest = Manifest.from_json((folder / "edge.json").read_bytes())
    assert str(manifest.weights[name]) == "int2/64+rank32"
    assert manifest.weights == content.plan
    assert manifest.to_json().count('"rank"') == 1
    assert Manifest.from_json(manifest.to_json()) == manifest
    plain = content_of(tmp_path, family, {})
    (tmp_path / "plain").mkdir()
    without, *_ = write_bundle(tmp_path / "plain", plain)
    assert without.bits_per_weight < manifest.bits_per_weight
    linear = next(each for each in fused_linears(content.config) if each.name == name)
    factors = content.source.quantized(RowRange(linear.weights[0], 0, linear.rows[0]), RANK).factors
    needed = (factors.down_codes.nbytes + factors.down_scales.nbytes) + (
        factors.up_codes.nbytes + factors.up_scales.nbytes
    ) * linear.shape[0] // linear.rows[0]
    grown = (folder / "model.onnx.data").stat().st_size - (tmp_path / "plain" / "model.onnx.data").stat().st_size
    assert needed <= grown < needed + 4 * 4096 + 64  # each begins on a page


@pytest.mark.parametrize("change", ["forgotten", "twice"])
def test_a_graph_with_a_wrong_correction_is_not_written(tmp_path, monkeypatch, change: str) -> None:
    right = graph_module.build_graph

    def wrong(*arguments):
        model = right(*arguments)
        node = next(node for node in model.graph.node if node.name == "layers.0.down")
        node.input[1 if change == "forgotten" else 0] = node.input[0 if change == "forgotten" else 1]
        return model

    monkeypatch.setattr("edgerun.export.bundle_writer.build_graph", wrong)
    content = content_of(tmp_path, "llama", {"layers.0.down": RANK})
    (tmp_path / "bundle").mkdir()
    with pytest.raises(ExportError, match="differs from the reference"):
        write_bundle(tmp_path / "bundle", content)


@pytest.mark.parametrize("shape", [(96, 64), (64, 200)])
def test_factors_lower_the_error_of_the_output(shape: tuple[int, int]) -> None:
    weights, inputs = random_rows(0, *shape), correlated_inputs(1, shape[1])
    weight_format = WeightFormat(2, 64)
    quantized = nearest_rows(weights, weight_format)

    errors = weights - dequantized(quantized, shape[1], weight_format)
    before = whole = output_error(errors, inputs)
    for rank in (4, 16, 32, 64):
        ranked = replace(weight_format, rank=rank)
        factors = correction_factors(errors, inputs, ranked)
        corrected = dequantized(quantized._replace(factors=factors), shape[1], ranked)
        np.testing.assert_allclose(
            corrected - dequantized(quantized, shape[1], weight_format),
            low_rank_product(factors, shape[1], ranked),
            atol=1e-5,
        )
        left = output_error(weights - corrected, inputs)
        assert left < 0.9 * before
        # 8-bit factors are nearly exact; powers of two lose some.
        down, up = low_rank_correction(errors, inputs, rank)
        assert left <= output_error(errors - up @ down, inputs) + 0.002 * whole
        before = left


def test_a_store_keeps_corrections_beside_the_codes(tmp_path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "checkpoint"))
    config = read_config(source.folder)
    inputs = {linear.columns: correlated_inputs(0, linear.columns) for linear in fused_linears(config)}

    columns = {linear.name: linear.columns for linear in fused_linears(config)}
    store, unweighted = (
        QuantizedLinearStore(source, config, tmp_path / name, statistics)
        for name, statistics in (("a", lambda linear: inputs[columns[linear]]), ("b", None))
    )
    linears = [linear for linear in planned_linears(config) if is_allowed(linear, RANK)]
    for linear in linears:
        plain, corrected = store.whole(linear, TWO), store.whole(linear, RANK)
        np.testing.assert_array_equal(plain.packed, corrected.packed)
        weights = np.concatenate([source.read(name) for name in linear.weights])
        errors = [
            weights - each.weights(linear, weight_format)
            for each, weight_format in ((store, TWO), (store, RANK), (unweighted, RANK))
        ]
        without, by_inputs, alike = (output_error(each, inputs[linear.columns]) for each in errors)
        assert by_inputs < alike < without
        assert (errors[2] ** 2).sum() < (errors[1] ** 2).sum()
        parts = [store.quantized(rows, RANK) for name in linear.weights for rows in source.row_ranges(name)]
        np.testing.assert_allclose(
            np.concatenate([dequantized(part, linear.columns, RANK) for part in parts]),
            store.weights(linear, RANK),
            atol=1e-6,
        )
    again = QuantizedLinearStore(source, config, tmp_path / "a", pytest.fail)
    for linear in linears:
        np.testing.assert_array_equal(again.weights(linear, RANK), store.weights(linear, RANK))


@settings(max_examples=30)
@given(st.integers(64, 2000), st.integers(64, 2000), st.sampled_from(LOW_RANK_FORMATS))
def test_budgets_count_the_factors(rows: int, columns: int, weight_format: WeightFormat) -> None:
    linear = FusedLinear("layers.0.o", ("o_proj",), (rows,), columns)
    factors = FACTOR_FORMAT
    thin = (
        FusedLinear("layers.0.o", ("down",), (weight_format.rank,), columns),
        FusedLinear("layers.0.o", ("up",), (rows,), weight_format.rank),
    )
    parts = bytes_read(linear, replace(weight_format, rank=0)) + sum(bytes_read(each, factors) for each in thin)
    assert bytes_read(linear, weight_format) == parts


def test_only_linears_inside_layers_may_be_corrected(tmp_path) -> None:
    config = read_config(write_checkpoint(tmp_path, tie_word_embeddings=False))
    tried = format_candidates(DEFAULT_METHODS, low_rank=True)
    assert set(tried) == {*BASE_FORMATS, *LOW_RANK_FORMATS}
    sensitivities = measure_sensitivities(
        list(planned_linears(config)), tried, lambda *_: 1.0, tmp_path / "sensitivities.json"
    )
    for linear in planned_linears(config):
        ranks = {each.weight_format.rank for each in sensitivities[linear.name]}
        assert ranks == ({0} if linear.name in ("embedding", "head") else {0, 16, 32, 64})
    assert not is_allowed(FusedLinear("layers.0.o", ("o",), (48,), 96), WeightFormat(2, 64, rank=64))
