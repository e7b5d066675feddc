"""Rotates cached keys to other positions.

Keys are cached with their rotary positions applied. Rotating a pair of channels by one angle and then by another equals
rotating it by the sum, so a key at position p becomes the one of position p - d by a rotation by -d, exact up to the
rounding of floats. Whatever scaling the frequencies have, its cosines and sines at d are in the tables of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_NORM_TOLERANCE = 1e-3
"""Largest difference of the norm of a table's cosine and sine, which is 1 but for rounding."""


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """The rotary tables of the keys of a layer."""

    cosines: npt.NDArray[Any]
    """`[positions, channels / 2]`; an attention factor may have multiplied both tables."""
    sines: npt.NDArray[Any]
    interleaved: bool = False
    """Whether the channels of a pair are neighbours; if not, the second half of the channels follows the first."""

    def at(self, position: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Cosine and sine of every pair at a position, float64 `[channels / 2]`, without the attention factor.

        Raises:
            ValueError: the tables do not have the position, or are not those of a rotation.
        """
        if not 0 <= position < len(self.cosines) or self.cosines.shape != self.sines.shape:
            raise ValueError(f"the rotary tables have no position {position}")
        cosines, sines = (np.asarray(table[position], np.float64) for table in (self.cosines, self.sines))
        factor = np.asarray(self.cosines[0], np.float64)  # the cosine of 0 is 1
        with np.errstate(divide="ignore", invalid="ignore"):
            cosines, sines = cosines / factor, sines / factor
            norms = np.hypot(cosines, sines)
        if not (np.abs(norms - 1) < _NORM_TOLERANCE).all():
            raise ValueError("the rotary tables are not those of a rotation")
        return cosines / norms, sines / norms

    def rotate_back(self, keys: npt.NDArray[Any], positions: int) -> None:
        """Rotate cached keys `[..., channels]` in place to positions that are so much smaller.

        Channels after those that the tables have are not rotated.

        Raises:
            ValueError: as for `at`, or the keys have fewer channels.
        """
        cosines, sines = (values.astype(np.float32) for values in self.at(positions))
        channels = 2 * cosines.size
        if keys.shape[-1] < channels:
            raise ValueError(f"the rotary tables rotate {channels} of {keys.shape[-1]} channels")
        if self.interleaved:
            first, second = keys[..., 0:channels:2], keys[..., 1:channels:2]
        else:
            first, second = keys[..., : channels // 2], keys[..., channels // 2 : channels]
        rotated = first * cosines + second * sines
        second[...] = second * cosines - first * sines
        first[...] = rotated
