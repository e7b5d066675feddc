"""Low-rank corrections in the graph, in the store and in bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import ExportError, InputError
from edgerun.export import ExportRecipe, Method, WeightFormat
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
from edgerun.export.calibration.collect_statistics import CalibratedSource, collect_statistics
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.calibration.sequential import quantize_sequentially
from edgerun.export.checkpoint.config import read_config
from edgerun.export.checkpoint.layer_weights import FusedLinear
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.checkpoint.safetensors_files import Checkpoint
from edgerun.export.graph import decoder as graph_module
from edgerun.export.quantization.codes import (
    FACTOR_FORMAT,
    CorrectionTarget,
    InputStatistics,
    correction_factors,
    dequantized,
    low_rank_correction,
    low_rank_product,
)
from edgerun.export.quantization.methods import DEFAULT_METHODS, nearest_rows
from edgerun.export.report.compared_plans import uniform_plan
from edgerun.models.manifest import FileDigest, Manifest
from edgerun.models.progress import silent
from support.correlated_inputs import correlated_inputs, random_rows
from support.tiny_models import write_checkpoint

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
    return BundleContent(source=store.view(plan), original=source, config=config, plan=plan, context=64)


def file_size(folder: Path, content: BundleContent) -> int:
    folder.mkdir()
    write_bundle(folder, content)
    return (folder / "model.onnx.data").stat().st_size


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
    plain = content_of(tmp_path, family, {})
    (tmp_path / "plain").mkdir()
    without, *_ = write_bundle(tmp_path / "plain", plain)
    assert without.bits_per_weight < manifest.bits_per_weight


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

    def cost(errors) -> float:
        return float(np.sum((errors @ inputs.second_moment) * errors))

    errors = weights - dequantized(quantized, shape[1], weight_format)
    before = whole = cost(errors)
    for rank in (4, 16, 32, 64):
        ranked = replace(weight_format, rank=rank)
        factors = correction_factors(errors, inputs, ranked)
        corrected = dequantized(quantized._replace(factors=factors), shape[1], ranked)
        np.testing.assert_allclose(
            corrected - dequantized(quantized, shape[1], weight_format),
            low_rank_product(factors, shape[1], ranked),
            atol=1e-5,
        )
        left = cost(weights - corrected)
        assert left < 0.9 * before
        # 8-bit factors are nearly exact; powers of two lose some.
        down, up = low_rank_correction(errors, inputs, rank)
        assert left <= cost(errors - up @ down) + 0.002 * whole
        before = left


def test_a_store_keeps_corrections_beside_the_codes(tmp_path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "checkpoint"))
    config = read_config(source.folder)
    inputs = {linear.columns: correlated_inputs(0, linear.columns) for linear in fused_linears(config)}

    def correction_target(linear: FusedLinear) -> CorrectionTarget:
        return CorrectionTarget(np.concatenate([source.read(name) for name in linear.weights]), inputs[linear.columns])

    def cost(errors, known: InputStatistics) -> float:
        return float(np.sum((errors @ known.second_moment) * errors))

    store, unweighted = (
        QuantizedLinearStore(source, config, tmp_path / name, correction_targets)
        for name, correction_targets in (("a", correction_target), ("b", None))
    )
    for linear in (linear for linear in planned_linears(config) if is_allowed(linear, RANK)):
        plain, corrected = store.quantized(linear, TWO), store.quantized(linear, RANK)
        np.testing.assert_array_equal(plain.packed, corrected.packed)
        weights, known = correction_target(linear)
        errors = [
            weights - each.weights(linear, weight_format)
            for each, weight_format in ((store, TWO), (store, RANK), (unweighted, RANK))
        ]
        without, by_inputs, alike = (cost(each, known) for each in errors)
        assert by_inputs < alike < without
        assert (errors[2] ** 2).sum() < (errors[1] ** 2).sum()
        view = store.view({linear.name: RANK})
        parts = [view.quantized(rows, RANK) for name in linear.weights for rows in source.row_ranges(name)]
        np.testing.assert_allclose(
            np.concatenate([dequantized(part, linear.columns, RANK) for part in parts]),
            store.weights(linear, RANK),
            atol=1e-6,
        )
    again = QuantizedLinearStore(source, config, tmp_path / "a", _never)
    for linear in (linear for linear in planned_linears(config) if is_allowed(linear, RANK)):
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


def test_the_file_grows_by_the_factors(tmp_path) -> None:
    name = "layers.1.down"
    corrected = content_of(tmp_path, "llama", {name: RANK})
    grown = file_size(tmp_path / "corrected", corrected) - file_size(
        tmp_path / "plain", content_of(tmp_path, "llama", {})
    )
    linear = next(linear for linear in fused_linears(corrected.config) if linear.name == name)
    stored = (
        QuantizedLinearStore(Checkpoint(tmp_path / "checkpoint"), corrected.config, tmp_path / "linears")
        .quantized(linear, RANK)
        .factors
    )
    assert stored is not None
    needed = sum(part.nbytes for part in stored)
    assert needed <= grown < needed + 4 * 4096 + 64  # each begins on a page


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


def test_no_format_for_all_weights_has_a_rank() -> None:
    with pytest.raises(InputError, match="a low-rank correction cannot be requested for all weights"):
        ExportRecipe(RANK)


def test_sequential_gptq_with_corrections(tmp_path) -> None:
    source = Checkpoint(write_checkpoint(tmp_path / "model", num_hidden_layers=3))
    config, random = read_config(source.folder), np.random.default_rng(0)
    model = SourceModel(source, config, 64)
    text = CalibrationText(tuple(random.integers(0, 300, (30, 40))), tuple(random.integers(0, 300, (10, 40))), "random")
    statistics = collect_statistics(model, text, tmp_path / "statistics", True, silent)
    known = CalibratedSource(source, config, statistics.of)
    plain, found = WeightFormat(2, 64, method=Method.GPTQ), []
    for weight_format in (plain, replace(plain, rank=32)):
        plan = {
            linear.name: weight_format if is_allowed(linear, weight_format) else plain
            for linear in fused_linears(config)
        }
        folder = tmp_path / str(weight_format.rank)
        store = quantize_sequentially(replace(model, source=known), text, plan, folder, silent, known.correction_target)
        evaluator = PlanEvaluator(model, text.held_out, store.weights, folder / "states")
        found.append(evaluator.divergence(plan).mean_kl)
    assert found[1] < 0.9 * found[0]


def test_a_manifest_names_ranks_where_there_are_any(tmp_path) -> None:
    content = content_of(tmp_path, "llama", {"layers.0.o": RANK})
    (tmp_path / "bundle").mkdir()
    write_bundle(tmp_path / "bundle", content)
    manifest = Manifest.from_json((tmp_path / "bundle" / "edge.json").read_bytes())
    assert isinstance(manifest.files["model.onnx"], FileDigest)
    text = manifest.to_json()
    assert text.count('"rank"') == 1
    assert Manifest.from_json(text) == manifest


def _never(linear: FusedLinear) -> CorrectionTarget:
    raise AssertionError(linear.name)
