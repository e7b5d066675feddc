"""Operations of the reference decoder, float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..checkpoint.source import RowRange
from .reference_positions import Float64Array


class WeightSource(Protocol):
    """Named tensors in float32, read one at a time."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read a whole tensor."""
        ...

    def read_rows(self, rows: RowRange) -> npt.NDArray[np.float32]:
        """Read some rows of a matrix."""
        ...

    def chunks(self, name: str) -> Iterator[npt.NDArray[np.float32]]:
        """Read a matrix from top to bottom, some rows at a time."""
        ...


def linear(weights: WeightSource, name: str, value: Float64Array, biased: bool) -> Float64Array:
    """value @ weight.T + bias, a chunk of the weight at a time."""
    products = [value @ piece.astype(np.float64).T for piece in weights.chunks(f"{name}.weight")]
    result = np.concatenate(products, axis=-1)
    return result + weights.read(f"{name}.bias") if biased else result


def rms_norm(value: Float64Array, epsilon: float) -> Float64Array:
    """Value divided by its root mean square over the last axis."""
    return np.asarray(value / np.sqrt(np.mean(value**2, axis=-1, keepdims=True) + epsilon))


def softmax(scores: Float64Array) -> Float64Array:
    """Probabilities of scores, over the last axis."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def soft_capped(value: Float64Array, cap: float | None) -> Float64Array:
    """cap * tanh(value / cap), or the value itself without a cap."""
    return value if cap is None else np.asarray(cap * np.tanh(value / cap))


def gelu_tanh(value: Float64Array) -> Float64Array:
    """GELU in its approximation by tanh."""
    return np.asarray(value / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))))


def rotate(heads: Float64Array, cosine: Float64Array, sine: Float64Array) -> Float64Array:
    """Rotate channel pairs (i, i + dim/2) of the first dim channels of heads [n, heads, _] by angles [n, dim/2]."""
    half = cosine.shape[-1]
    first, second, rest = np.split(heads, [half, 2 * half], axis=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)
