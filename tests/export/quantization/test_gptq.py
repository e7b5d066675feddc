"""GPTQ has the codes of the original algorithm."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
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


def dense_moments(seed: int, size: int) -> npt.NDArray[np.float32]:
    """Second moments of correlated gradients, [size, size]."""
    moments = correlated_inputs(seed, size).second_moment
    assert moments is not None
    return moments


def divergence(errors, inputs: InputStatistics, outputs) -> float:
    return float(np.einsum("ij,ik,jl,kl->", errors, outputs, inputs.second_moment, errors, optimize=True))


def codes_by_inverses(weights, weight_format: WeightFormat, scales, inputs, outputs):
    """Each weight in turn is rounded, and those that follow take the values that are best for the errors so far."""
    rows, columns = weights.shape
    half, row_order, order = (
        1 << (weight_format.bits - 1),
        np.argsort(-np.diagonal(outputs), kind="stable"),
        np.argsort(-np.diagonal(inputs.second_moment), kind="stable"),
    )
    damped = [
        each.astype(np.float64) + 0.01 * np.diagonal(each).astype(np.float64).mean() * np.eye(len(each))
        for each in (outputs, inputs.second_moment)
    ]
    hessian = np.kron(*(each[np.ix_(by, by)] for each, by in zip(damped, (row_order, order), strict=True)))
    exact = weights[row_order][:, order].astype(np.float64).ravel()
    steps = scales[row_order][:, order // weight_format.block].astype(np.float64).ravel()
    updated, errors = exact.copy(), np.zeros_like(exact)
    codes = np.zeros(exact.shape, np.int64)
    for at in range(len(exact)):
        codes[at] = np.clip(np.rint(updated[at] / steps[at]) + half, 0, 2 * half - 1)
        errors[at] = (codes[at] - half) * steps[at] - exact[at]
        rest, done = slice(at + 1, None), slice(at + 1)
        updated[rest] = exact[rest] - np.linalg.solve(hessian[rest, rest], hessian[rest, done] @ errors[done])
    found = np.empty((rows, columns), np.int64)
    found[np.ix_(row_order, order)] = codes.reshape(rows, columns)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_rows_and_columns_compensate_as_by_the_inverse_of_the_whole_hessian(seed: int) -> None:
    weight_format = WeightFormat(4, 32)
    weights, inputs, outputs = random_rows(seed, 8, 8), correlated_inputs(seed, 8), dense_moments(seed + 100, 8)
    quantized = gptq_rows(weights, weight_format, inputs, outputs)
    found = unpack_codes(quantized.packed, 4).reshape(8, -1)[:, :8]
    np.testing.assert_array_equal(found, codes_by_inverses(weights, weight_format, quantized.scales, inputs, outputs))


def test_gradients_come_near_the_best_codes() -> None:
    """The best of all codes of 2 x 4 weights that are near the weights; the average over problems."""
    weight_format, ratios = WeightFormat(4, 32), []
    steps = np.stack(np.meshgrid(*[range(-1, 3)] * 8)).reshape(8, -1).T.reshape(-1, 2, 4)
    for seed in range(20):
        weights, inputs, outputs = random_rows(seed, 2, 4), correlated_inputs(seed, 4), dense_moments(seed, 8)[:2, :2]
        found = [gptq_rows(weights, weight_format, inputs, each) for each in (None, outputs)]
        errors = np.clip(np.floor(weights / found[0].scales) + steps, -8, 7) * found[0].scales - weights
        best = np.einsum("nij,ik,jl,nkl->n", errors, outputs, inputs.second_moment, errors, optimize=True).min()
        rounded = (dequantized(each, 4, weight_format) for each in found)
        ratios.append([divergence(each - weights, inputs, outputs) / best for each in rounded])
    of_plain, of_rounded = np.exp(np.log(ratios).mean(axis=0))
    assert of_rounded < 2
    assert of_rounded < 0.8 * of_plain


@pytest.mark.parametrize("weight_format", FORMATS, ids=str)
def test_gradients_lower_the_divergence_of_large_matrices(weight_format: WeightFormat) -> None:
    weights, inputs, outputs = random_rows(5, 130, 70), correlated_inputs(5, 70), dense_moments(6, 130)
    plain, rounded = (
        divergence(
            dequantized(gptq_rows(weights, weight_format, inputs, each), 70, weight_format) - weights, inputs, outputs
        )
        for each in (None, outputs)
    )
    assert rounded < 0.75 * plain
    # Uncorrelated gradients give GPTQ, whatever the order of rows.
    even = np.diag(np.random.default_rng(0).uniform(1, 2, 130)).astype(np.float32)
    same = gptq_rows(weights, weight_format, inputs, even)
    np.testing.assert_array_equal(same.packed, gptq_rows(weights, weight_format, inputs).packed)
