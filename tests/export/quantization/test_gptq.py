"""GPTQ has the codes of the original algorithm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import InputError
from edgerun.export import Method, WeightFormat
from edgerun.export.checkpoint.source import QuantizedRows
from edgerun.export.quantization.codes import (
    InputStatistics,
    dequantized,
    unpack_codes,
    unpack_zero_points,
)
from edgerun.export.quantization.gptq import gptq_rows
from edgerun.export.quantization.methods import QUANTIZERS
from support.correlated_inputs import correlated_inputs, output_error, random_rows
from support.weight_operators import FORMATS


def cost(weights, quantized, weight_format: WeightFormat, inputs: InputStatistics) -> float:
    return output_error(dequantized(quantized, weights.shape[1], weight_format).astype(np.float64) - weights, inputs)


def original_codes(weights, weight_format: WeightFormat, quantized: QuantizedRows, moments):
    """The algorithm of the paper, which updates the remaining columns with the inverse of the second moments."""
    rows, columns = weights.shape
    last = (1 << weight_format.bits) - 1
    zeros = np.full(quantized.scales.shape, 1 << (weight_format.bits - 1))
    if quantized.zero_points is not None:
        zeros = unpack_zero_points(quantized.zero_points, zeros.shape[1], weight_format.bits).astype(np.int64)
    order = np.argsort(-np.diagonal(moments), kind="stable")
    damped = moments.astype(np.float64) + 0.01 * np.diagonal(moments).astype(np.float64).mean() * np.eye(columns)
    factor = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    updated = weights[:, order].astype(np.float64)
    codes = np.zeros((rows, columns), np.int64)
    for at, column in enumerate(order):
        scale, zero = (each[:, column // weight_format.block] for each in (quantized.scales.astype(np.float64), zeros))
        code = np.clip(np.rint(updated[:, at] / scale) + zero, 0, last)
        error = (updated[:, at] - (code - zero) * scale) / factor[at, at]
        updated[:, at + 1 :] -= error[:, None] * factor[at, at + 1 :]
        codes[:, column] = code
    return codes


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 70, 130, 200]), st.sampled_from(FORMATS))
def test_codes_equal_those_of_the_original_algorithm(seed: int, columns: int, weight_format: WeightFormat) -> None:
    weights, inputs = random_rows(seed, 5, columns), correlated_inputs(seed, columns)
    quantized = gptq_rows(weights, weight_format, inputs)
    found = unpack_codes(quantized.packed, weight_format.bits).reshape(5, -1)[:, :columns]
    expected = original_codes(weights, weight_format, quantized, inputs.second_moment)
    # Another order of summation may change a nearly tied code, and then all later ones in its row.
    assert (found == expected).all(axis=1).sum() >= 4


@pytest.mark.parametrize("options", [{}, {"zero_points": True}, {"half_scales": True}], ids=str)
@pytest.mark.parametrize(("bits", "block", "limit"), [(2, 64, 0.75), (4, 32, 0.6), (4, 128, 0.6), (8, 128, 0.6)])
def test_output_error_is_smaller_than_that_of_k_quant(bits: int, block: int, limit: float, options) -> None:
    weight_format = WeightFormat(bits, block, **options)
    weights, inputs = random_rows(1, 32, 256), correlated_inputs(1, 256)
    k_quant = cost(weights, QUANTIZERS[Method.K_QUANT](weights, weight_format, inputs), weight_format, inputs)
    assert cost(weights, gptq_rows(weights, weight_format, inputs), weight_format, inputs) < limit * k_quant


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_uncorrelated_inputs_give_k_quant(weight_format: WeightFormat) -> None:
    weights = random_rows(3, 20, 130)
    even = np.ones(130, np.float32)
    k_quant = QUANTIZERS[Method.K_QUANT](weights, weight_format)
    for inputs in (None, InputStatistics(even, even), InputStatistics(even, even, np.eye(130, dtype=np.float32))):
        found = gptq_rows(weights, weight_format, inputs)
        np.testing.assert_allclose(
            dequantized(found, 130, weight_format), dequantized(k_quant, 130, weight_format), rtol=1e-6
        )
    zeros = np.zeros(130, np.float32)
    unused = gptq_rows(weights, weight_format, InputStatistics(zeros, zeros, np.zeros((130, 130), np.float32)))
    np.testing.assert_array_equal(unused.packed, k_quant.packed)


def test_unused_and_duplicate_inputs() -> None:
    weights, inputs = random_rows(4, 20, 96), correlated_inputs(4, 96)
    moments = inputs.second_moment.copy()
    moments[:, 5] = moments[5] = 0
    moments[:, 7], moments[7] = moments[:, 8], moments[8]
    moments[7, 7] = moments[8, 8]
    weight_format = WeightFormat(4, 32)
    square = np.diagonal(moments).copy()
    found = gptq_rows(weights, weight_format, InputStatistics(square, np.sqrt(square), moments))
    result = dequantized(found, 96, weight_format)
    assert np.isfinite(result).all()
    assert np.abs(result[:, 5] - weights[:, 5]).max() < np.abs(found.scales).max()


@pytest.mark.parametrize("moments", [np.eye(31), np.full((32, 32), np.nan), np.ones((32, 1))])
def test_invalid_moments(moments) -> None:
    even, weights = np.ones(32, np.float32), np.ones((1, 32), np.float32)
    inputs = InputStatistics(even, even, moments.astype(np.float32))
    message = "second moments of 32 inputs must be 32 x 32 finite numbers"
    with pytest.raises(InputError, match=message):
        gptq_rows(weights, WeightFormat(4, 32), inputs)
