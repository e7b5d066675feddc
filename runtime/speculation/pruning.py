"""Memory-bound draft pruning: how many of the guesses to verify, from what a pass over m rows costs here.

A pass costs t(m) seconds and gives one token for certain and one more for every accepted guess. Over a whole text the
most tokens a second come from choosing, in every round, the set of guesses with the largest

    sum of their path probabilities - rate * (t(1 + guesses) - t(1)),

where rate is the tokens a second that decoding reaches with this very policy (renewal reward; Dinkelbach 1967). Taking
the best ratio of each round by itself would draft too much where guesses are poor and too little where they are good.
None is a legal answer, and the usual one when nothing good is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from .tree import Tree

LEAST_ADVANTAGE: Final = 0.02
"""Tokens a round that a draft has to promise beyond its cost; below, the round is a plain step."""


@dataclass(frozen=True)
class Pruned:
    """The guesses that pay."""

    tree: Tree
    expected: float
    """Tokens that the round is expected to give, the certain one included."""
    advantage: float
    """Tokens gained over spending the same time on plain steps; 0 for the anchor alone."""


def prune(tree: Tree, curve: Sequence[float], rate: float, most_rows: int) -> Pruned:
    """Keep the guesses that pay, likeliest first.

    Args:
        tree: guesses with calibrated path probabilities, no child likelier than its parent.
        curve: seconds of a pass over 1, 2, ... rows; guesses beyond its end are dropped.
        rate: tokens a second that decoding reaches.
        most_rows: most rows of the pass.
    """
    if len(tree) == 1:
        return Pruned(tree, 1.0, 0.0)
    probabilities = tree.path_prob.tolist()
    in_order = all(first >= second for first, second in pairwise(probabilities))
    order: list[int] = []
    if not in_order:
        # A stable sort keeps parents before children of the same probability.
        order = np.argsort(-tree.path_prob, kind="stable").tolist()
        probabilities = tree.path_prob[order].tolist()
    rows, advantage, expected = best_rows(probabilities[1:], curve, rate, most_rows)
    if rows == 1:
        return Pruned(tree.first(1), 1.0, 0.0)
    if rows == len(tree):
        return Pruned(tree, expected, advantage)
    return Pruned(tree.first(rows) if in_order else tree.kept(order[:rows]), expected, advantage)


def best_rows(
    probabilities: Sequence[float], curve: Sequence[float], rate: float, most_rows: int
) -> tuple[int, float, float]:
    """The best number of rows for guesses of descending path probability: (rows, advantage, expected tokens)."""
    best, advantage, expected = 1, LEAST_ADVANTAGE, 1.0
    tokens = 1.0
    first = curve[0]
    for candidates, probability in enumerate(probabilities[: min(most_rows, len(curve)) - 1], 1):
        tokens += probability
        gained = tokens - 1 - rate * (curve[candidates] - first)
        if gained > advantage:
            best, advantage, expected = candidates + 1, gained, tokens
    return best, advantage if best > 1 else 0.0, expected
