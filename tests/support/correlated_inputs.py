"""Correlated inputs of linears, of very different magnitudes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
