"""Quantization: packing and rounding of codes, the operators that decode them, errors of the methods, and exports."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgerun.errors import InputError
from edgerun.export import FP32, INT4, INT8, ExportRecipe, Method, WeightFormat, export_checkpoint
from edgerun.export.checkpoint.source import QuantizedRows
from edgerun.export.quantization.codes import (
    InputStatistics,
    blocks_of,
    dequantized,
    nearest_rows,
    pack_codes,
    pack_zero_points,
    unpack_codes,
    unpack_zero_points,
)
from edgerun.export.quantization.methods import QUANTIZERS
from edgerun.models.bundle import open_bundle
from support.correlated_inputs import correlated_inputs
from support.nightly import examples
from support.tiny_models import exported, write_checkpoint
from support.weight_operators import FORMATS, run_operators

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


@settings(max_examples=examples(60))
@given(matrices, st.sampled_from(FORMATS), st.booleans())
def test_error_is_at_most_that_of_round_to_nearest(weights, weight_format: WeightFormat, weighted: bool) -> None:
    importance = None
    if weighted:
        importance = np.random.default_rng(0).exponential(size=weights.shape[1]).astype(np.float32) ** 3
    found = QUANTIZERS[Method.K_QUANT](weights, weight_format, None if importance is None else inputs(importance))
    nearest = cost(weights, QUANTIZERS[Method.RTN](weights, weight_format), weight_format, importance)
    assert cost(weights, found, weight_format, importance) <= nearest * (1 + 1e-5)


ZERO_POINTS, HALF_SCALES = {"zero_points": True}, {"half_scales": True}


@pytest.mark.parametrize(
    ("bits", "block", "method", "scales", "limit"),
    [
        (2, 32, Method.RTN, {}, 0.92),
        (4, 32, Method.RTN, {}, 0.98),
        *((*size, Method.K_QUANT, ZERO_POINTS, 1.0) for size in ((4, 32), (4, 128), (8, 64))),
        *((bits, block, Method.K_QUANT, HALF_SCALES, 1.02) for bits, block in ((2, 32), (4, 64), (8, 128))),
    ],
)
def test_error_on_normal_weights(bits: int, block: int, method: Method, scales: dict[str, bool], limit: float) -> None:
    """K-quant is better than round-to-nearest, zero points reduce the error, and float16 scales hardly raise it."""
    weights, plain = random_rows(1, 64, 512, 100.0, 0.02), WeightFormat(bits, block)
    of_plain = cost(weights, QUANTIZERS[method](weights, plain), plain)
    chosen = replace(plain, **scales)
    assert cost(weights, QUANTIZERS[Method.K_QUANT](weights, chosen), chosen) < limit * of_plain


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
@pytest.mark.parametrize("method", Method, ids=str)
def test_rows_are_independent_of_each_other(method: Method, weight_format: WeightFormat) -> None:
    weights, about = random_rows(3, 300, 200, 3.0, 0.1), correlated_inputs(2, 200) if method is Method.GPTQ else None
    together = QUANTIZERS[method](weights, weight_format, about)
    for part in (slice(0, 1), slice(7, 130), slice(299, 300)):
        alone = QUANTIZERS[method](np.ascontiguousarray(weights[part]), weight_format, about)
        for one, every in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one, None if every is None else every[part])


@settings(max_examples=examples(60))
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


def test_the_manifest_names_format_and_method_of_each_linear(tmp_path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")

    def written(recipe: ExportRecipe) -> dict[str, dict[str, object]]:
        export_checkpoint(source, tmp_path / "bundle", recipe)
        weights = json.loads((tmp_path / "bundle" / "edge.json").read_text(encoding="utf-8"))["weights"]
        for linear, weight_format in open_bundle(tmp_path / "bundle").manifest.weights.items():
            assert weights[linear].get("method") == (weight_format.method and weight_format.method.value)
        return weights

    def methods(recipe: ExportRecipe) -> set[object]:
        return {each.get("method") for each in written(recipe).values()}

    assert methods(ExportRecipe(INT4)) == methods(ExportRecipe("int2")) == {"k-quant"}
    assert methods(ExportRecipe(INT4, head=INT8)) == {"k-quant", "rtn"}
    assert methods(ExportRecipe(INT4, head=FP32, method=Method.K_QUANT)) == {"k-quant", None}
    assert methods(ExportRecipe(INT8)) == methods(ExportRecipe(INT4, method=Method.RTN)) == {"rtn"}
    with_points = WeightFormat(4, 64, zero_points=True)
    stored = written(ExportRecipe(with_points, head=FP32))["layers.0.o"]
    assert stored == {"bits": 4, "block": 64, "zero_points": True, "method": "k-quant"}
    assert open_bundle(tmp_path / "bundle").manifest.weights["layers.0.o"] == with_points != WeightFormat(4, 64)
    assert str(with_points) == "int4/64+zero-points"


def test_a_method_for_fp32_weights_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="--method has no effect on fp32 weights.*; leave it out"):
        ExportRecipe(FP32, method=Method.RTN)
    assert ExportRecipe(FP32, head=INT8, method=Method.RTN).method is Method.RTN


@pytest.mark.parametrize("method", DATA_FREE, ids=str)
def test_exports_are_deterministic(tmp_path, method: Method) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    first, second = (exported(source, tmp_path / name, ExportRecipe("int2", method=method)) for name in "ab")
    for file in ("model.onnx", "model.onnx.data"):
        assert (first / file).read_bytes() == (second / file).read_bytes()


SYMMETRIC = [weight_format for weight_format in FORMATS if not weight_format.zero_points]


@given(st.sampled_from(FORMATS), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_packing_is_reversible(weight_format: WeightFormat, rows: int, blocks: int, seed: int) -> None:
    bits, shape = weight_format.bits, (rows, blocks, weight_format.block)
    codes = np.random.default_rng(seed).integers(0, 1 << bits, shape).astype(np.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (rows, blocks, weight_format.block * bits // 8)
    np.testing.assert_array_equal(unpack_codes(packed, bits), codes)
    zeros = codes[..., 0]
    packed = pack_zero_points(zeros, bits)
    assert packed.shape == (rows, -(-blocks * bits // 8))
    np.testing.assert_array_equal(unpack_zero_points(packed, blocks, bits), zeros)


def test_the_first_code_is_in_the_low_bits() -> None:
    np.testing.assert_array_equal(pack_codes(np.array([[[1, 2, 15, 0]]], np.uint8), 4), [[[0x21, 0x0F]]])
    np.testing.assert_array_equal(pack_codes(np.array([[[1, 2, 3, 0]]], np.uint8), 2), [[[0b00111001]]])


@settings(max_examples=examples(150))
@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 200)),
        elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=True),
    ),
    st.sampled_from(FORMATS),
)
def test_error_is_at_most_half_a_step_and_the_extreme_is_exact(weights, weight_format: WeightFormat) -> None:
    quantized, (rows, columns) = QUANTIZERS[Method.RTN](weights, weight_format), weights.shape
    blocks = blocks_of(columns, weight_format)
    assert quantized.scales.shape == (rows, blocks)
    padded = np.zeros((rows, blocks * weight_format.block), np.float32)
    padded[:, :columns] = weights
    decoded = dequantized(quantized, blocks * weight_format.block, weight_format)
    error = np.abs(decoded - padded).reshape(rows, blocks, weight_format.block)
    grouped, half = padded.reshape(rows, blocks, weight_format.block), 1 << (weight_format.bits - 1)
    # Half a step, except that without zero points the end opposite to the extreme has one code less and may be off by a
    # whole step.
    opposite = np.abs(grouped) > (half - 1.5) * np.abs(quantized.scales[..., None])
    step = np.abs(quantized.scales)[..., None] + np.float32(1e-30) * 2 * half
    assert np.all(error <= np.where(opposite & (not weight_format.zero_points), 1.0, 0.5) * step * 1.001)
    if not weight_format.zero_points:
        # Where two weights have the largest magnitude, one of them is the extreme.
        largest = np.abs(grouped).max(-1, keepdims=True)
        at_extremes = np.where(np.abs(grouped) == largest, error, np.inf).min(-1)
        np.testing.assert_allclose(at_extremes, 0, atol=float(largest.max()) * 1e-6 + 1.1e-30)
    # The padding of the last block decodes to zero, so that it adds nothing to a product.
    assert not decoded[:, columns:].any()


@pytest.mark.parametrize("weight_format", SYMMETRIC, ids=str)
def test_all_codes_are_used(weight_format: WeightFormat) -> None:
    codes = 1 << weight_format.bits
    row = np.arange(-codes // 2, codes // 2, dtype=np.float32)[None]
    packed, scales, *_ = nearest_rows(row, WeightFormat(weight_format.bits, max(codes, weight_format.block)))
    np.testing.assert_array_equal(unpack_codes(packed, weight_format.bits).reshape(-1)[:codes], np.arange(codes))
    assert scales.reshape(-1)[0] == 1.0


@settings(max_examples=25)
@given(st.sampled_from(FORMATS), st.integers(1, 9), st.sampled_from([16, 32, 172, 200, 256]), st.integers(0, 2**32 - 1))
def test_operators_decode_any_codes(weight_format: WeightFormat, rows: int, columns: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    blocks = blocks_of(columns, weight_format)
    codes, zeros = (
        random.integers(0, 1 << weight_format.bits, shape).astype(np.uint8)
        for shape in ((rows, blocks, weight_format.block), (rows, blocks))
    )
    quantized = QuantizedRows(
        pack_codes(codes, weight_format.bits),
        random.standard_normal((rows, blocks)).astype(np.float32),
        zero_points=pack_zero_points(zeros, weight_format.bits) if weight_format.zero_points else None,
    )
    expected = dequantized(quantized, columns, weight_format)
    product, gathered = run_operators(quantized, columns, weight_format)
    np.testing.assert_allclose(product, expected.T, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(gathered.reshape(rows, -1)[:, :columns], expected)
    # The kernels in use round inputs to 8 bits block by block, which does not change a single 1. One row of inputs uses
    # other kernels than many.
    for inputs in (np.eye(columns, dtype=np.float32), np.eye(columns, dtype=np.float32)[-1:]):
        product, _ = run_operators(quantized, columns, weight_format, accuracy_level=4, inputs=inputs)
        np.testing.assert_allclose(product, inputs @ expected.T, rtol=1e-5, atol=1e-4)
