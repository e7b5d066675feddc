"""Quantization methods: error, independence of rows, and exports."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import CheckpointError, InputError
from edgerun.export import FP32, INT2, INT4, INT8, ExportRecipe, Method, WeightFormat, export_checkpoint
from edgerun.export.quantization.codes import InputStatistics, correction_factors, dequantized, low_rank_product
from edgerun.export.quantization.methods import QUANTIZERS
from edgerun.models.bundle import open_bundle
from support.correlated_inputs import correlated_inputs
from support.nightly import some_nightly
from support.tiny_models import tiny_weights, write_bundle, write_checkpoint, write_weights
from support.weight_operators import FORMATS

DATA_FREE = [Method.RTN, Method.K_QUANT]
"""Methods that do not use statistics of the inputs."""


def random_rows(seed: int, rows: int, columns: int, tails: float, magnitude: float):
    """Random rows from Student's t distribution; smaller `tails` give heavier tails."""
    sampled = np.random.default_rng(seed).standard_t(tails, (rows, columns))
    return (sampled * magnitude).astype(np.float32)


def inputs(mean_square) -> InputStatistics:
    return InputStatistics(mean_square, np.sqrt(np.abs(mean_square)))


def cost(weights, quantized, weight_format: WeightFormat, importance=None) -> float:
    error = dequantized(quantized, weights.shape[1], weight_format).astype(np.float64) - weights
    return float((error**2 * (1 if importance is None else importance)).sum())


matrices = st.builds(
    random_rows,
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.sampled_from([16, 64, 130, 200]),
    st.sampled_from([1.5, 3.0, 100.0]),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e15]),
)


@settings(max_examples=60)
@given(matrices, st.sampled_from(FORMATS), st.booleans())
def test_error_is_at_most_that_of_round_to_nearest(weights, weight_format: WeightFormat, weighted: bool) -> None:
    importance = None
    if weighted:
        importance = np.random.default_rng(0).exponential(size=weights.shape[1]).astype(np.float32) ** 3
    found = QUANTIZERS[Method.K_QUANT](weights, weight_format, None if importance is None else inputs(importance))
    nearest = cost(weights, QUANTIZERS[Method.RTN](weights, weight_format), weight_format, importance)
    assert cost(weights, found, weight_format, importance) <= nearest * (1 + 1e-5)


@pytest.mark.parametrize(
    ("weight_format", "limit"), [(WeightFormat(2, 32), 0.92), (WeightFormat(4, 32), 0.98)], ids=str
)
def test_error_is_smaller_on_normal_weights(weight_format: WeightFormat, limit: float) -> None:
    weights = random_rows(1, 64, 512, 100.0, 0.02)
    nearest = cost(weights, QUANTIZERS[Method.RTN](weights, weight_format), weight_format)
    assert cost(weights, QUANTIZERS[Method.K_QUANT](weights, weight_format), weight_format) < limit * nearest


@pytest.mark.parametrize("weight_format", [WeightFormat(2, 32), WeightFormat(4, 64)], ids=str)
def test_importance_moves_the_error_to_less_important_columns(weight_format: WeightFormat) -> None:
    weights = random_rows(2, 64, 512, 100.0, 1.0)
    importance = np.where(np.arange(512) % 4 == 0, 50, 1).astype(np.float32)
    k_quant = QUANTIZERS[Method.K_QUANT]
    weighted, unweighted = k_quant(weights, weight_format, inputs(importance)), k_quant(weights, weight_format)
    assert cost(weights, weighted, weight_format, importance) < 0.97 * cost(
        weights, unweighted, weight_format, importance
    )
    assert cost(weights, weighted, weight_format) > cost(weights, unweighted, weight_format)
    # Only ratios count; blocks without any importance get equal importance.
    for same in (importance * 1e-20, importance * np.float32(1e20)):
        np.testing.assert_array_equal(k_quant(weights, weight_format, inputs(same))[0], weighted[0])
    np.testing.assert_array_equal(k_quant(weights, weight_format, inputs(np.zeros(512, np.float32)))[0], unweighted[0])


@pytest.mark.parametrize("importance", [np.ones(31), np.full(32, -1.0), np.full(32, np.nan), np.full(32, np.inf)])
def test_invalid_importance(importance) -> None:
    with pytest.raises(InputError, match="importance of 32 columns must be 32 finite numbers of at least 0"):
        QUANTIZERS[Method.K_QUANT](np.ones((1, 32), np.float32), INT4, inputs(importance.astype(np.float32)))


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("method", DATA_FREE, ids=str)
def test_rows_are_independent_of_each_other(method: Method, weight_format: WeightFormat) -> None:
    weights = random_rows(3, 300, 520, 3.0, 0.1)
    together = QUANTIZERS[method](weights, weight_format)
    for part in (slice(0, 1), slice(7, 130), slice(299, 300)):
        alone = QUANTIZERS[method](np.ascontiguousarray(weights[part]), weight_format)
        np.testing.assert_array_equal(alone.packed, together.packed[part])
        np.testing.assert_array_equal(alone.scales, together.scales[part])
        if together.zero_points is not None:
            np.testing.assert_array_equal(alone.zero_points, together.zero_points[part])


@settings(max_examples=60)
@given(
    st.sampled_from([*Method]),
    st.sampled_from(FORMATS),
    st.integers(1, 70),
    st.sampled_from([32, 64, 96, 128, 200, 256]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_codes_do_not_depend_on_the_memory_order(
    method: Method, weight_format: WeightFormat, rows: int, columns: int, known: bool, seed: int
) -> None:
    weights = random_rows(seed, rows, columns, 3.0, 0.1)
    about = correlated_inputs(seed, columns) if known else None
    for same in (np.asfortranarray(weights), np.asfortranarray(np.tile(weights, 2))[:, :columns]):
        for expected, found in zip(
            QUANTIZERS[method](weights, weight_format, about),
            QUANTIZERS[method](same, weight_format, about),
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)
    if about is not None and not weight_format.zero_points:
        corrected = replace(weight_format, rank=min(4, rows))
        factors = [correction_factors(each, about, corrected) for each in (weights, np.asfortranarray(weights))]
        products = [low_rank_product(each, columns, corrected) for each in factors]
        np.testing.assert_allclose(products[1], products[0], atol=0.02 * np.abs(weights).max())


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
@pytest.mark.parametrize("method", DATA_FREE, ids=str)
def test_zeros_constants_and_tiny_weights_are_exact(method: Method, weight_format: WeightFormat) -> None:
    weights = np.zeros((6, 2 * weight_format.block), np.float32)
    weights[1] = 0.75
    weights[2] = -3.0
    weights[3, 5] = 1e-3
    weights[4, ::2] = 2.0
    weights[5] = 1e-35
    result = dequantized(QUANTIZERS[method](weights, weight_format), weights.shape[1], weight_format)
    np.testing.assert_allclose(result, weights, rtol=1e-6, atol=1e-34)
    assert not result[0].any()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
@pytest.mark.parametrize("method", DATA_FREE, ids=str)
@pytest.mark.parametrize("block", some_nightly([32, 64, 128], every=2))
def test_exports_with_two_bits(tmp_path, method: Method, block: int, tied: bool) -> None:
    recipe = ExportRecipe(WeightFormat(2, block), method=method)
    bundle = write_bundle(tmp_path, weights=recipe, tie_word_embeddings=tied, intermediate_size=172)
    manifest = open_bundle(bundle).manifest
    assert set(manifest.weights.values()) == {WeightFormat(2, block)}
    assert manifest.parity["max_abs_diff"] < 1e-4


def test_the_manifest_names_the_method_of_each_linear(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")

    def methods(recipe: ExportRecipe) -> set[str | None]:
        export_checkpoint(source, tmp_path / "bundle", recipe)
        written = json.loads((tmp_path / "bundle" / "edge.json").read_text(encoding="utf-8"))["weights"]
        manifest = open_bundle(tmp_path / "bundle").manifest
        for linear, weight_format in manifest.weights.items():
            assert written[linear].get("method") == (weight_format.method and weight_format.method.value)
        return {weight_format.get("method") for weight_format in written.values()}

    assert methods(ExportRecipe(INT4)) == methods(ExportRecipe(INT2)) == {"k-quant"}
    assert methods(ExportRecipe(INT4, head=INT8)) == {"k-quant", "rtn"}
    assert methods(ExportRecipe(INT4, head=FP32, method=Method.K_QUANT)) == {"k-quant", None}
    assert methods(ExportRecipe(INT8)) == methods(ExportRecipe(INT4, method=Method.RTN)) == {"rtn"}


def test_a_method_for_fp32_weights_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="--method has no effect on fp32 weights.*; leave --method out"):
        ExportRecipe(FP32, method=Method.RTN)
    assert ExportRecipe(FP32, head=INT8, method=Method.RTN).method is Method.RTN


@pytest.mark.parametrize("method", DATA_FREE, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, method: Method, bad: float) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = {name: value.copy() for name, value in tiny_weights(config, 0).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = bad
    write_weights(source, tensors)
    with pytest.raises(CheckpointError, match="up_proj"):
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(INT4, method=method))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("method", DATA_FREE, ids=str)
def test_exports_are_deterministic(tmp_path, method: Method) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    first, second = (
        export_checkpoint(source, tmp_path / name, ExportRecipe(INT2, method=method)).bundle for name in "ab"
    )
    for file in ("model.onnx", "model.onnx.data"):
        assert (first / file).read_bytes() == (second / file).read_bytes()
