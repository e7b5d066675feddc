"""Memory-bound draft pruning: keeps the draft tokens that pay at the measured pass cost.

A pass costs t(m) seconds and produces one token for certain and one more for every accepted draft token. The highest
tokens per second over a whole text come from choosing, in every round, the set of draft tokens with the largest

    sum of their path probabilities - rate * (t(1 + draft tokens) - t(1)),

where rate is the decoding rate in tokens per second under this very policy (renewal reward; Dinkelbach 1967).
Maximizing the ratio of each round by itself would draft too much where drafts are poor and too little where they are
good. The empty draft is allowed, and usual when no candidate is probable.

Where a recurrent state cannot be cut back, a rejection has a price: the accepted tokens run once more inside the next
pass, after those that have to run again already. Of a chain of k draft tokens with path probabilities p(1) to p(k), j
are accepted with probability p(j) - p(j + 1), and then j + 1 tokens run again, the anchor included. Their expected
number is 1 + p(1) + ... + p(k - 1) - k p(k). A round without a draft leaves nothing to run again.
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


def prune(tree: Tree, curve: Sequence[float], rate: float, max_width: int, replay: int | None = None) -> PrunedDraft:
    """Keep the draft tokens that pay, most probable first.

    Args:
        tree: draft with calibrated path probabilities, no child more probable than its parent.
        curve: seconds of a pass of width 1, 2, ...; draft tokens beyond its end are dropped.
        rate: decoding rate in tokens per second.
        max_width: maximum width of the pass, in token positions.
        replay: number of tokens that the pass runs once more before the draft, where the accepted tokens of a rejected
            draft do so too; None where a rejection costs nothing.
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
    width, advantage, expected = best_width(probabilities[1:], curve, rate, max_width, replay)
    if width == 1:
        return PrunedDraft(tree.first(1), 1.0, 0.0)
    if width == len(tree):
        return PrunedDraft(tree, expected, advantage)
    return PrunedDraft(tree.first(width) if in_order else tree.kept(order[:width]), expected, advantage)


def best_width(
    probabilities: Sequence[float], curve: Sequence[float], rate: float, max_width: int, replay: int | None = None
) -> tuple[int, float, float]:
    """The best pass width for draft tokens of descending path probability: (width, advantage, expected tokens).

    Arguments as for `prune`; tokens that run once more do not count as width.
    """
    pending = replay or 0
    best, advantage, expected = 1, MIN_ADVANTAGE, 1.0
    tokens = 1.0
    first = curve[min(pending, len(curve) - 1)]
    for count, probability in enumerate(probabilities[: max(min(max_width, len(curve) - pending) - 1, 0)], 1):
        tokens += probability
        gained = tokens - 1 - rate * (curve[pending + count] - first)
        if replay is not None:
            again = expected_replay(count, probability, tokens - probability, pending)
            gained -= rate * again * replay_seconds(curve, pending + count)
        if gained > advantage:
            best, advantage, expected = count + 1, gained, tokens
    return best, advantage if best > 1 else 0.0, expected


def expected_replay(count: int, probability: float, certain: float, pending: int) -> float:
    """Expected number of tokens that run once more after a chain of draft tokens.

    Args:
        count: number of draft tokens.
        probability: path probability of the last one.
        certain: sum of the path probabilities of the anchor, which is 1, and of all draft tokens before the last one.
        pending: number of tokens that run once more in this pass.
    """
    return (1 - probability) * pending + certain - count * probability


def replay_seconds(curve: Sequence[float], tokens: int) -> float:
    """Seconds of each of some tokens that run once more, as the average of what they add to a pass over one."""
    width = min(tokens, len(curve) - 1)
    return (curve[width] - curve[0]) / width if width else 0.0
