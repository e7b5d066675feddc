"""Packing and rounding of codes, and the operators that decode them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgerun.export import WeightFormat
from edgerun.export.checkpoint.source import QuantizedRows
from edgerun.export.quantization.codes import (
    blocks_of,
    dequantize_rows,
    dequantized,
    pack_codes,
    pack_zero_points,
    quantize_rows,
    unpack_codes,
    unpack_zero_points,
)
from support.weight_operators import FORMATS, run_operators

SYMMETRIC = [weight_format for weight_format in FORMATS if not weight_format.zero_points]


@given(st.sampled_from(FORMATS), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_packing_is_reversible(weight_format: WeightFormat, rows: int, blocks: int, seed: int) -> None:
    codes = (
        np.random.default_rng(seed)
        .integers(0, 1 << weight_format.bits, (rows, blocks, weight_format.block))
        .astype(np.uint8)
    )
    packed = pack_codes(codes, weight_format.bits)
    assert packed.shape == (rows, blocks, weight_format.block * weight_format.bits // 8)
    np.testing.assert_array_equal(unpack_codes(packed, weight_format.bits), codes)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_zero_points_are_packed_row_by_row(bits: int, rows: int, blocks: int, seed: int) -> None:
    zeros = np.random.default_rng(seed).integers(0, 1 << bits, (rows, blocks)).astype(np.uint8)
    packed = pack_zero_points(zeros, bits)
    assert packed.shape == (rows, -(-blocks * bits // 8))
    np.testing.assert_array_equal(unpack_zero_points(packed, blocks, bits), zeros)


def test_the_first_code_is_in_the_low_bits() -> None:
    np.testing.assert_array_equal(pack_codes(np.array([[[1, 2, 15, 0]]], np.uint8), 4), [[[0x21, 0x0F]]])
    np.testing.assert_array_equal(pack_codes(np.array([[[1, 2, 3, 0]]], np.uint8), 2), [[[0b00111001]]])


@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.integers(1, 200)),
        elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=True),
    ),
    st.sampled_from(SYMMETRIC),
)
def test_error_is_at_most_half_a_step_and_the_extreme_is_exact(weights, weight_format: WeightFormat) -> None:
    packed, scales = quantize_rows(weights, weight_format)
    rows, columns = weights.shape
    blocks = blocks_of(columns, weight_format)
    assert scales.shape == (rows, blocks)
    padded = np.zeros((rows, blocks * weight_format.block), np.float32)
    padded[:, :columns] = weights
    error = np.abs(dequantize_rows(packed, scales, blocks * weight_format.block, weight_format) - padded)
    error = error.reshape(rows, blocks, weight_format.block)
    grouped = padded.reshape(rows, blocks, weight_format.block)
    half = 1 << (weight_format.bits - 1)
    # Half a step, except that the end opposite to the extreme has one code less and may be off by a whole step.
    opposite = np.abs(grouped) > (half - 1.5) * np.abs(scales[..., None])
    step = np.abs(scales)[..., None] + np.float32(1e-30) * half
    assert np.all(error <= np.where(opposite, 1.0, 0.5) * step * 1.001)
    # Where two weights have the largest magnitude, one of them is the extreme.
    largest = np.abs(grouped).max(-1, keepdims=True)
    at_extremes = np.where(np.abs(grouped) == largest, error, np.inf).min(-1)
    np.testing.assert_allclose(at_extremes, 0, atol=float(largest.max()) * 1e-6 + 1.1e-30)
    # The padding of the last block decodes to zero.
    assert not dequantize_rows(packed, scales, blocks * weight_format.block, weight_format)[:, columns:].any()


@pytest.mark.parametrize("weight_format", SYMMETRIC, ids=str)
def test_all_codes_are_used(weight_format: WeightFormat) -> None:
    half = 1 << (weight_format.bits - 1)
    row = np.resize(np.arange(-half, half, dtype=np.float32), (1, 2 * half))
    packed, scales = quantize_rows(row, WeightFormat(weight_format.bits, max(2 * half, weight_format.block)))
    columns = 2 * half
    codes = unpack_codes(packed, weight_format.bits).reshape(-1)[:columns]
    np.testing.assert_array_equal(codes, np.arange(columns))
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
