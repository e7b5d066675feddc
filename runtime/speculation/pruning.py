"""Memory-bound draft pruning: keeps the draft tokens that pay at the measured pass cost.

A pass costs t(m) seconds and produces one token for certain and one more for every accepted draft token. The highest
tokens per second over a whole text come from choosing, in every round, the set of draft tokens with the largest

    sum of their path probabilities - rate * (t(1 + draft tokens) - t(1)),

where rate is the decoding rate in tokens per second under this very policy (renewal reward; Dinkelbach 1967).
Maximizing the ratio of each round by itself would draft too much where drafts are poor and too little where they are
good. The empty draft is allowed, and usual when no candidate is probable.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from .tree import Tree

MIN_ADVANTAGE: Final = 0.02
"""Tokens per round that a draft must gain beyond its cost; otherwise the round is a plain step."""


class PrunedDraft(NamedTuple):
    """The part of a draft that pays."""

    tree: Tree
    expected_tokens: float
    """Number of tokens the round is expected to produce, the certain one included."""
    advantage: float
    """Tokens gained over spending the same time on plain steps; 0 for the anchor alone."""


def prune(tree: Tree, curve: Sequence[float], rate: float, max_width: int) -> PrunedDraft:
    """Keep the draft tokens that pay, most probable first.

    Args:
        tree: draft with calibrated path probabilities, no child more probable than its parent.
        curve: seconds of a pass of width 1, 2, ...; draft tokens beyond its end are dropped.
        rate: decoding rate in tokens per second.
        max_width: maximum width of the pass, in token positions.
    """
    if len(tree) == 1:
        return PrunedDraft(tree, 1.0, 0.0)
    probabilities = tree.path_probs
    in_order = all(first >= second for first, second in pairwise(probabilities))
    order: list[int] = []
    if not in_order:
        # A stable sort keeps parents before children of the same probability.
        order = sorted(range(len(tree)), key=lambda node: -probabilities[node])
        probabilities = [probabilities[node] for node in order]
    width, advantage, expected = best_width(probabilities[1:], curve, rate, max_width)
    if width == 1:
        return PrunedDraft(tree.first(1), 1.0, 0.0)
    if width == len(tree):
        return PrunedDraft(tree, expected, advantage)
    return PrunedDraft(tree.first(width) if in_order else tree.kept(order[:width]), expected, advantage)


def best_width(
    probabilities: Sequence[float], curve: Sequence[float], rate: float, max_width: int
) -> tuple[int, float, float]:
    """The best pass width for draft tokens of descending path probability: (width, advantage, expected tokens)."""
    best, advantage, expected = 1, MIN_ADVANTAGE, 1.0
    tokens = 1.0
    first = curve[0]
    for count, probability in enumerate(probabilities[: min(max_width, len(curve)) - 1], 1):
        tokens += probability
        gained = tokens - 1 - rate * (curve[count] - first)
        if gained > advantage:
            best, advantage, expected = count + 1, gained, tokens
    return best, advantage if best > 1 else 0.0, expected
