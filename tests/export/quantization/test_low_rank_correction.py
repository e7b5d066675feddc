"""Low-rank corrections leave the least output error of their rank."""

from __future__ import annotations

import numpy as np
import pytest

from edgerun.errors import InputError
from edgerun.export.quantization.codes import InputStatistics, low_rank_correction
from support.correlated_inputs import correlated_inputs, random_rows


def cost(errors, inputs: InputStatistics) -> float:
    assert inputs.second_moment is not None
    return float(np.einsum("nk,nk->", errors.astype(np.float64) @ inputs.second_moment, errors))


def by_decomposition(errors, inputs: InputStatistics, rank: int):
    """The method of the paper: the square root of the second moments, and singular values."""
    values, vectors = np.linalg.eigh(inputs.second_moment.astype(np.float64))
    values = np.maximum(values, values.max() * 1e-12)
    root, inverse = ((vectors * values**power) @ vectors.T for power in (0.5, -0.5))
    u, s, v = np.linalg.svd(errors @ root, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ (v[:rank] @ inverse)


@pytest.mark.parametrize("rows", [24, 64, 100])
@pytest.mark.parametrize("rank", [1, 8, 24])
def test_error_equals_that_of_the_papers_method(rows: int, rank: int) -> None:
    errors, inputs = random_rows(rows, rows, 64), correlated_inputs(rank, 64)
    down, up = low_rank_correction(errors, inputs, rank)
    assert down.shape == (rank, 64)
    assert up.shape == (rows, rank)
    np.testing.assert_allclose(up.T @ up, np.eye(rank), atol=1e-5)
    total, remaining = cost(errors, inputs), cost(errors - up @ down, inputs)
    expected = cost(errors - by_decomposition(errors, inputs, rank), inputs)
    assert remaining <= expected * 1.001 + 1e-6 * total
    if rank < min(rows, 64):
        # The decomposition of the errors alone, without the inputs, leaves more.
        u, s, v = np.linalg.svd(errors, full_matrices=False)
        assert remaining < cost(errors - (u[:, :rank] * s[:rank]) @ v[:rank], inputs)


def test_errors_of_low_rank_are_corrected_completely() -> None:
    errors = (random_rows(0, 50, 3) @ random_rows(1, 3, 40)).astype(np.float32)
    for each in (errors, errors.T.copy()):
        down, up = low_rank_correction(each, correlated_inputs(0, each.shape[1]), 3)
        np.testing.assert_allclose(up @ down, each, atol=1e-3)
    down, up = low_rank_correction(np.zeros((50, 40), np.float32), correlated_inputs(0, 40), 3)
    assert not (up @ down).any()


@pytest.mark.parametrize("rows", [24, 100])
def test_moments_of_fewer_tokens_than_inputs(rows: int) -> None:
    inputs, errors = correlated_inputs(0, 64, tokens=8), random_rows(rows, rows, 64)
    moment = inputs.second_moment.copy()
    moment[np.diag_indices(64)] -= 1e-6 * np.diagonal(moment).max()  # like float32 rounding errors
    few = InputStatistics(inputs.mean_square, inputs.mean_magnitude, moment)
    down, up = low_rank_correction(errors, few, 8)
    assert np.isfinite(up).all()
    assert cost(errors - up @ down, inputs) < 1e-4 * cost(errors, inputs)


def test_without_second_moments_inputs_count_as_uncorrelated() -> None:
    errors, inputs = random_rows(0, 30, 40), correlated_inputs(0, 40)
    diagonal_only = InputStatistics(inputs.mean_square, inputs.mean_magnitude)
    uncorrelated = InputStatistics(inputs.mean_square, inputs.mean_magnitude, np.diag(inputs.mean_square))
    np.testing.assert_array_equal(
        low_rank_correction(errors, diagonal_only, 4)[0], low_rank_correction(errors, uncorrelated, 4)[0]
    )


def test_moments_of_another_shape() -> None:
    with pytest.raises(InputError, match="second moments of 40 inputs"):
        low_rank_correction(random_rows(0, 30, 40), correlated_inputs(0, 32), 2)
