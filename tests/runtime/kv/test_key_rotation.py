"""Rotating a cached key back gives the key of an earlier position."""

from __future__ import annotations

import numpy as np
import pytest

from edgerun.runtime.graph.cache_shift import KeyRotation


def tables(frequencies: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(300)[:, None] * frequencies
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def rotated(keys: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, interleaved: bool) -> np.ndarray:
    """Keys [heads, slots, channels] at these positions, in float64."""
    turned, half = keys.copy(), frequencies.size
    first, second = slice(half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    plane = (keys[..., first] + 1j * keys[..., second]) * np.exp(1j * positions[:, None] * frequencies)
    turned[..., first], turned[..., second] = plane.real, plane.imag
    return turned


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("channels", [8, 16])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_against_float64(interleaved: bool, channels: int, factor: float) -> None:
    """Partial rotation, neighbouring pairs, and tables with an attention factor, which keys have once only."""
    rng = np.random.default_rng(channels)
    frequencies = np.sort(rng.uniform(1e-4, 1, channels // 2))[::-1]
    keys = rng.normal(size=(3, 40, 16)) * factor
    cached = rotated(keys, np.arange(200, 240), frequencies, interleaved).astype(np.float32)
    rotation = KeyRotation(*tables(frequencies, factor), interleaved)
    rotation.rotate_back(cached, 157)
    expected = rotated(keys, np.arange(43, 83), frequencies, interleaved)
    np.testing.assert_allclose(cached, expected, atol=2e-6 * np.abs(keys).max())


def test_what_does_not_rotate_is_refused() -> None:
    cosines, sines = tables(np.array([1.0, 0.1]), 1.0)
    keys = np.zeros((1, 2, 4), np.float32)
    for rotation, positions in (
        (KeyRotation(cosines, sines), 300),
        (KeyRotation(cosines, 2 * sines), 5),
        (KeyRotation(0 * cosines, sines), 5),
        (KeyRotation(cosines, sines[:, :1]), 5),
    ):
        with pytest.raises(ValueError, match="rotary tables"):
            rotation.rotate_back(keys, positions)
    with pytest.raises(ValueError, match="the rotary tables rotate 4 of 2 channels"):
        KeyRotation(cosines, sines).rotate_back(keys[..., :2], 5)
