"""Pruning compared with every prefix-closed set of draft tokens."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.speculation.growth import MIN_ADVANTAGE, best_width, expected_replay, prune
from edgerun.runtime.speculation.tree import Source, Tree

EIGHTHS = st.integers(1, 8).map(lambda eighths: eighths / 8)
CURVES = st.lists(st.sampled_from([0.0, 0.03125, 0.125, 0.25, 1.0]), min_size=1, max_size=8).map(
    lambda steps: (1 + np.cumsum([0.0, *steps])).tolist()
)
"""Seconds, never falling, in numbers whose sums are exact."""


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    parents, probabilities = [-1], [1.0]
    for _ in range(draw(st.integers(0, 7))):
        parent = draw(st.integers(0, len(parents) - 1))
        parents.append(parent)
        probabilities.append(probabilities[parent] * draw(EIGHTHS))
    # Every node its own token: no siblings alike.
    return Tree.of(range(len(parents)), parents, probabilities, [Source.OTHER] * len(parents))


def closed_sets(tree: Tree) -> list[tuple[int, ...]]:
    """All sets of nodes that contain the parents of their nodes."""
    candidates = range(1, len(tree))
    sets = (chosen for count in range(len(tree)) for chosen in combinations(candidates, count))
    return [chosen for chosen in sets if all(tree.parents[node] in (0, *chosen) for node in chosen)]


def gained(tree: Tree, chosen: tuple[int, ...], curve: list[float], rate: float) -> float:
    """Tokens beyond those that plain steps would produce in the time of the pass."""
    return float(sum(tree.path_prob[list(chosen)].tolist())) - rate * (curve[len(chosen)] - curve[0])


@given(trees(), CURVES, st.sampled_from([0.25, 0.5, 1.0, 2.0, 50.0]), st.integers(1, 10))
def test_no_set_of_draft_tokens_gains_more(tree: Tree, curve: list[float], rate: float, max_width: int) -> None:
    pruned, expected_tokens, advantage = prune(tree, curve, rate, max_width)
    width = len(pruned)
    possible = [chosen for chosen in closed_sets(tree) if len(chosen) < min(max_width, len(curve))]
    best = max(gained(tree, chosen, curve, rate) for chosen in possible)
    assert 1 <= width <= min(max_width, len(curve), len(tree))
    if width == 1:
        assert best <= MIN_ADVANTAGE + 1e-6
        assert (expected_tokens, advantage) == (1.0, 0.0)
    else:
        assert advantage == pytest.approx(best, abs=1e-6)
        assert advantage > MIN_ADVANTAGE
        assert not any(len(chosen) < width - 1 for chosen in possible if gained(tree, chosen, curve, rate) == best)
        assert expected_tokens == pytest.approx(1 + pruned.path_prob[1:].sum(), abs=1e-6)
    # What is left is part of the tree, with the same anchor.
    tokens = {tuple(tree.tokens[list(tree.path_to(node))].tolist()) for node in range(len(tree))}
    left = {tuple(pruned.tokens[list(pruned.path_to(node))].tolist()) for node in range(width)}
    assert left <= tokens
    assert len(left) == width


DESCENDING = st.lists(st.floats(0, 1), max_size=12).map(lambda all_: sorted(all_, reverse=True))


@given(DESCENDING, st.integers(0, 9), st.floats(0.01, 2), st.floats(0, 10))
def test_tokens_that_run_again_are_charged(probabilities: list[float], pending: int, slope: float, rate: float) -> None:
    """Where passes cost the same for every further token, as many as a rejection leaves are run again."""
    curve = [1 + slope * width for width in range(32)]
    advantages = [0.0]
    for drafted in range(1, len(probabilities) + 1):
        chances = [1.0, *probabilities[:drafted], 0.0]
        again = sum(
            (chances[accepted] - chances[accepted + 1]) * (pending + accepted + 1) for accepted in range(drafted)
        )
        assert expected_replay(drafted, chances[drafted], sum(chances[:drafted]), pending) == pytest.approx(again)
        advantages.append(sum(chances[1:]) - rate * slope * (drafted + again))
    width, advantage, _ = best_width(probabilities, curve, rate, 16, pending)
    if width == 1:
        assert max(advantages) <= MIN_ADVANTAGE + 1e-9
    else:
        assert advantage == pytest.approx(max(advantages))
        assert advantage == pytest.approx(advantages[width - 1])


def test_parents_are_kept_before_children_of_equal_probability() -> None:
    """Where many are equally likely, a cut anywhere must not part a child from its parent."""
    nodes, random = 200, np.random.default_rng(1)
    parents, probabilities = [-1], [1.0]
    for node in range(1, nodes):
        parents.append(int(random.integers(max(0, node - 9), node)))
        probabilities.append(max(0.125, probabilities[parents[-1]] * random.choice([0.5, 1.0])))
    tree = Tree.of(range(nodes), parents, probabilities, [0] + [1] * (nodes - 1))
    for width in range(2, nodes + 1):
        pruned = prune(tree, [1.0] * width, 1.0, 500)[0]
        assert len(pruned) == width
        assert all(0 <= parent < node for node, parent in enumerate(pruned.parents.tolist()) if node)
