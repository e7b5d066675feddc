"""Correlated inputs of linears, of very different magnitudes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgerun.export.checkpoint.config import DecoderConfig
from edgerun.export.checkpoint.layout import fused_linears
from edgerun.export.quantization.codes import InputStatistics


def random_rows(seed: int, rows: int, columns: int) -> npt.NDArray[np.float32]:
    """A matrix of normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def correlated_inputs(seed: int, columns: int, tokens: int = 400) -> InputStatistics:
    """Statistics of such inputs over some tokens."""
    random = np.random.default_rng(seed)
    mixture = random.standard_normal((columns // 4, columns)) * np.exp(random.standard_normal(columns))
    values = random.standard_normal((tokens, columns // 4)) @ mixture + 0.1 * random.standard_normal((tokens, columns))
    return InputStatistics(
        np.square(values).mean(axis=0).astype(np.float32),
        np.abs(values).mean(axis=0).astype(np.float32),
        (values.T @ values / tokens).astype(np.float32),
    )


def output_error(errors: npt.NDArray[np.floating], inputs: InputStatistics) -> float:
    """Squared error of the output for errors of the weights, [N, K]."""
    assert inputs.second_moment is not None
    return float(np.einsum("nk,nk->", errors.astype(np.float64) @ inputs.second_moment, errors))


class UnevenInputs:
    """Statistics of inputs whose magnitudes differ far more than those of random weights."""

    def __init__(self, config: DecoderConfig) -> None:
        self._columns = {linear.name: linear.columns for linear in fused_linears(config)}

    def of(self, linear: str) -> InputStatistics:
        """Statistics of the inputs of a linear, or of an expert, whose second linear has inputs of its own."""
        columns = self._columns[".".join(linear.split(".")[:3])]
        seed = sum(linear.encode()) if linear.count(".") == 3 and ".down." in linear else columns
        size = np.exp(2 * np.random.default_rng(seed).standard_normal(columns))
        return InputStatistics((size**2).astype(np.float32), (0.8 * size).astype(np.float32))
