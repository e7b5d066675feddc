"""What the times of units are worth in whole passes, by their bits; and what a pass takes besides.

Units are timed among units of all formats, and take a few percent more or less among their like: on the machine this
was developed on, those of 8 bits less and the others more. So passes over models of one format are timed as well, and a
factor for each number of bits is fitted to all passes, with what a layer takes besides its units: least squares of
relative errors, held by a ridge (Hoerl and Kennard, 1970) near a factor of one, where passes alone do not tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

_HOLD: Final = 0.1
"""A factor that is off by one weighs as much as a pass that is off by this share."""
_LEAST, _MOST = 0.7, 1.4
"""What is further off was disturbed."""


@dataclass(frozen=True)
class WholePass:
    """A pass over a model that was timed as a whole."""

    layers: int
    milliseconds: float
    linears: Mapping[int, float]
    """Milliseconds of all its units of so many bits, as they were timed one by one."""


@dataclass(frozen=True)
class PassFit:
    """What was fitted."""

    factors: Mapping[int, float]
    """By bits: milliseconds of a unit in a pass, by those it was timed with."""
    layer: float
    """Milliseconds of a pass besides its units, for each layer. What noting the times of units adds to these is missing
    here, so it may be less than nothing."""


def fit_passes(passes: Sequence[WholePass]) -> PassFit:
    """Fit factors and the rest of a layer to passes, at least one."""
    bits = sorted({each for one in passes for each in one.linears})
    rows = [[*(one.linears.get(each, 0.0) for each in bits), one.layers] for one in passes]
    milliseconds = np.array([one.milliseconds for one in passes])
    holds = _HOLD * np.eye(len(bits), len(bits) + 1)
    system = np.vstack([np.array(rows) / milliseconds[:, None], holds])
    wanted = np.concatenate([np.ones(len(passes)), np.full(len(bits), _HOLD)])
    factors = np.clip(np.linalg.lstsq(system, wanted, rcond=None)[0][:-1], _LEAST, _MOST)
    (layer,) = np.linalg.lstsq(system[:, -1:], wanted - system[:, :-1] @ factors, rcond=None)[0]
    return PassFit(dict(zip(bits, map(float, factors), strict=True)), float(layer))
