"""Which costs of passes by width can be those of an undisturbed machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

POSITION_COST: Final = 0.3
"""Upper estimate of what each further position of a pass costs, in passes of width 1, where nothing better is known."""


def is_plausible(times: Mapping[int, float]) -> bool:
    """Whether costs by width can be those of an undisturbed machine.

    A pass over m tokens can do no more work than m passes over one, and no less than a narrower pass. Kernels and
    disturbances may double that.
    """
    least = times[1] / 2
    for width in sorted(times):
        if not least <= times[width] <= 2 * width * times[1]:
            return False
        least = max(least, times[width] / 2)
    return True


def made_plausible(times: Mapping[int, float]) -> dict[int, float]:
    """Doubtful costs without what cannot be: a disturbed pass took too long, never too short.

    Too high a cost would keep passes of that width from ever being run, and the cost from being corrected.
    """
    found: dict[int, float] = {}
    least = math.inf
    for width in sorted(times, reverse=True):
        least = found[width] = min(least, times[width])
    single = found[1]
    return {
        width: seconds if seconds <= 2 * width * single else single * (1 + POSITION_COST * (width - 1))
        for width, seconds in found.items()
    }
