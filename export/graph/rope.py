"""Rotary position embedding: the cosine and sine tables of the graph.

Of the `dim` rotated channels of a head, pair i (channels i and i + dim/2) is rotated by `position * frequency[i]`. Rope
scalings extend a model's context; they change the frequencies and, in two cases, multiply the tables by an attention
factor. Source: Hugging Face transformers, `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rotation = tuple[npt.NDArray[np.float64], float]
"""Frequency of each channel pair in radians per position, [dim / 2], and the factor on cosine and sine."""


@dataclass(frozen=True)
class Linear:
    """Frequencies of Su et al. 2021 (RoFormer), base ** (-2 i / dim), with every position divided by `factor`.

    Source: Chen et al. 2023 (position interpolation); Gemma 4 for `share`.
    """

    factor: float = 1.0
    share: float = 1.0
    """Share of a head's channel pairs that turn, the first ones, at the frequencies of a whole head."""

    def rotation(self, base: float, dim: int, context: int) -> Rotation:  # noqa: ARG002 -- same for every context
        """Return the rotation for `dim` channels and theta `base` in a graph that serves `context` positions."""
        frequencies = _frequencies(base, dim) / self.factor
        frequencies[int(self.share * dim // 2) :] = 0.0
        return frequencies, 1.0


@dataclass(frozen=True)
class Dynamic:
    """Dynamic NTK: the base grows with the sequence once it is longer than `max_positions`.

    A cached key cannot be rotated again when the sequence grows, so the base is computed for the whole exported
    context; up to `max_positions` it does not change.
    """

    factor: float
    max_positions: int

    def rotation(self, base: float, dim: int, context: int) -> Rotation:
        """The rotation at the base for the whole context."""
        length = max(context, self.max_positions)
        growth = self.factor * length / self.max_positions - (self.factor - 1)
        return _frequencies(base * growth ** (dim / (dim - 2)), dim), 1.0


@dataclass(frozen=True)
class Llama3:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def rotation(self, base: float, dim: int, context: int) -> Rotation:  # noqa: ARG002 -- same for every context
        """The rotation by stretched frequencies."""
        unscaled = _frequencies(base, dim)
        turns = self.original_positions * unscaled / (2 * math.pi)
        unchanged = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return unchanged * unscaled + (1 - unchanged) * unscaled / self.factor, 1.0


@dataclass(frozen=True)
class Yarn:
    """Peng et al. 2023 (YaRN): interpolation by wavelength, and attention scores scaled through the tables."""

    factor: float
    original_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def rotation(self, base: float, dim: int, context: int) -> Rotation:  # noqa: ARG002 -- same for every context
        """The rotation by interpolated frequencies."""
        unscaled = _frequencies(base, dim)
        low, high = self._pair_at(self.beta_fast, base, dim), self._pair_at(self.beta_slow, base, dim)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001  # avoids a division by zero
        interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
        frequencies = unscaled * (1 - interpolated) + unscaled / self.factor * interpolated
        if self.attention_factor is not None:
            return frequencies, self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return frequencies, _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)
        return frequencies, _magnitude(self.factor, 1.0)

    def _pair_at(self, turns: float, base: float, dim: int) -> float:
        """Return the (fractional) channel pair that makes that many turns over the original context."""
        return dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True)
class LongRope:
    """Ding et al. 2024 (LongRoPE): the frequency of each channel pair is divided by its own factor.

    One list of factors applies up to `original_positions`, another to longer contexts. A cached key cannot be rotated
    again when the sequence outgrows the first, so the exported context determines which list applies.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_positions: int
    attention_factor: float

    def rotation(self, base: float, dim: int, context: int) -> Rotation:
        """The rotation by the list of factors for this context."""
        factors = np.array(self.long if context > self.original_positions else self.short)
        return _frequencies(base, dim) / factors, self.attention_factor


RopeScaling = Linear | Dynamic | Llama3 | Yarn | LongRope
"""A method of extending the context beyond the one the model was first trained with."""


@dataclass(frozen=True)
class Rope:
    """Theta and scaling of a rotary position embedding."""

    base: float
    scaling: RopeScaling

    def table(self, dim: int, context: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Compute cosines and sines in float64; returns float32 [context, dim / 2] each."""
        frequencies, factor = self.scaling.rotation(self.base, dim, context)
        angles = np.arange(context, dtype=np.float64)[:, None] * frequencies
        return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


@dataclass(frozen=True)
class QueryScaling:
    """Growth of queries with their position, which keeps attention sharp over long contexts.

    Every query is multiplied by `1 + beta * log(1 + floor(position / original_positions))`. Source: Llama 4's
    temperature of attention, in Hugging Face transformers as `get_llama_4_attn_scale`.
    """

    beta: float
    original_positions: int

    def table(self, context: int) -> npt.NDArray[np.float32]:
        """The factors of all positions, computed in float64; float32 [context, 1]."""
        steps = np.arange(context, dtype=np.int64)[:, None] // self.original_positions
        return (1 + self.beta * np.log1p(steps)).astype(np.float32)


def _frequencies(base: float, dim: int) -> npt.NDArray[np.float64]:
    return np.asarray(base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim))


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
