"""GPTQ: the codes of the original's updates, less error of the output, and the same for any cut of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.errors import InputError
from edgerun.export import Method, WeightFormat
from edgerun.export.checkpoint.source import QuantizedRows
from edgerun.export.quantization.codes import dequantized, unpack_codes, unpack_zero_points
from edgerun.export.quantization.gptq import gptq_rows
from edgerun.export.quantization.input_statistics import InputStatistics
from edgerun.export.quantization.methods import QUANTIZERS
from support.correlated_inputs import correlated_inputs, random_rows
from support.weight_operators import FORMATS


def cost(weights, quantized, form: WeightFormat, inputs: InputStatistics) -> float:
    """Squared error of the outputs."""
    assert inputs.second_moment is not None
    error = dequantized(quantized, weights.shape[1], form).astype(np.float64) - weights
    return float(np.einsum("nk,nk->", error @ inputs.second_moment, error))


def codes_of_the_original(weights, form: WeightFormat, quantized: QuantizedRows, moments):
    """As the paper has it: after each column the rest is moved by the inverse of the second moments."""
    rows, columns = weights.shape
    last = (1 << form.bits) - 1
    zeros = np.full(quantized.scales.shape, 1 << (form.bits - 1))
    if quantized.zero_points is not None:
        zeros = unpack_zero_points(quantized.zero_points, zeros.shape[1], form.bits).astype(np.int64)
    order = np.argsort(-np.diagonal(moments), kind="stable")
    damped = moments.astype(np.float64) + 0.01 * np.diagonal(moments).astype(np.float64).mean() * np.eye(columns)
    factor = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    left = weights[:, order].astype(np.float64)
    codes = np.zeros((rows, columns), np.int64)
    for at, column in enumerate(order):
        scale, zero = (each[:, column // form.block] for each in (quantized.scales.astype(np.float64), zeros))
        code = np.clip(np.rint(left[:, at] / scale) + zero, 0, last)
        error = (left[:, at] - (code - zero) * scale) / factor[at, at]
        left[:, at + 1 :] -= error[:, None] * factor[at, at + 1 :]
        codes[:, column] = code
    return codes


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 70, 130, 200]), st.sampled_from(FORMATS))
def test_codes_are_those_of_the_original(seed: int, columns: int, form: WeightFormat) -> None:
    weights, inputs = random_rows(seed, 5, columns), correlated_inputs(seed, columns)
    quantized = gptq_rows(weights, form, inputs)
    found = unpack_codes(quantized.packed, form.bits).reshape(5, -1)[:, :columns]
    expected = codes_of_the_original(weights, form, quantized, inputs.second_moment)
    # Sums in another order may move a weight that lies between two codes, and then all after it in its row.
    assert (found == expected).all(axis=1).sum() >= 4


@pytest.mark.parametrize("marks", [{}, {"zero_points": True}, {"powers_of_two": True}], ids=str)
@pytest.mark.parametrize(("bits", "block", "share"), [(2, 64, 0.75), (4, 32, 0.6), (4, 128, 0.6), (8, 128, 0.6)])
def test_less_error_of_the_output(bits: int, block: int, share: float, marks) -> None:
    form = WeightFormat(bits, block, **marks)
    weights, inputs = random_rows(1, 32, 256), correlated_inputs(1, 256)
    usual = cost(weights, QUANTIZERS[Method.K_QUANT](weights, form, inputs), form, inputs)
    assert cost(weights, gptq_rows(weights, form, inputs), form, inputs) < share * usual


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_rows_are_independent_of_each_other(form: WeightFormat) -> None:
    weights, inputs = random_rows(2, 300, 200), correlated_inputs(2, 200)
    whole = gptq_rows(weights, form, inputs)
    for part in (slice(0, 1), slice(7, 130), slice(299, 300)):
        alone = gptq_rows(np.ascontiguousarray(weights[part]), form, inputs)
        np.testing.assert_array_equal(alone.packed, whole.packed[part])
        np.testing.assert_array_equal(alone.scales, whole.scales[part])
        if whole.zero_points is not None and alone.zero_points is not None:
            np.testing.assert_array_equal(alone.zero_points, whole.zero_points[part])


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_inputs_that_have_nothing_to_do_with_each_other_leave_k_quant(form: WeightFormat) -> None:
    weights = random_rows(3, 20, 130)
    even = np.ones(130, np.float32)
    usual = QUANTIZERS[Method.K_QUANT](weights, form)
    for inputs in (None, InputStatistics(even, even), InputStatistics(even, even, np.eye(130, dtype=np.float32))):
        found = gptq_rows(weights, form, inputs)
        np.testing.assert_allclose(dequantized(found, 130, form), dequantized(usual, 130, form), rtol=1e-6)
    nothing = np.zeros(130, np.float32)
    silent = gptq_rows(weights, form, InputStatistics(nothing, nothing, np.zeros((130, 130), np.float32)))
    np.testing.assert_array_equal(silent.packed, usual.packed)


def test_channels_that_are_dead_or_twice_there() -> None:
    weights, inputs = random_rows(4, 20, 96), correlated_inputs(4, 96)
    assert inputs.second_moment is not None
    moments = inputs.second_moment.copy()
    moments[:, 5] = moments[5] = 0
    moments[:, 7], moments[7] = moments[:, 8], moments[8]
    moments[7, 7] = moments[8, 8]
    form = WeightFormat(4, 32)
    square = np.diagonal(moments).copy()
    found = gptq_rows(weights, form, InputStatistics(square, np.sqrt(square), moments))
    result = dequantized(found, 96, form)
    assert np.isfinite(result).all()
    assert np.abs(result[:, 5] - weights[:, 5]).max() < np.abs(found.scales).max()


@pytest.mark.parametrize("moments", [np.eye(31), np.full((32, 32), np.nan), np.ones((32, 1))])
def test_moments_that_are_none(moments) -> None:
    even = np.ones(32, np.float32)
    with pytest.raises(InputError, match="second moments of 32 inputs must be 32 x 32 finite numbers"):
        gptq_rows(
            np.ones((1, 32), np.float32), WeightFormat(4, 32), InputStatistics(even, even, moments.astype(np.float32))
        )
