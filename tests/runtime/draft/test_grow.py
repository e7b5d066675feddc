"""Growing drafts: what must hold of every tree, and that none of the guesses left out was worth its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.runtime.speculation.drafters.interface import Candidate
from edgerun.runtime.speculation.growth import Grower, Growth, Prices
from edgerun.runtime.speculation.tree import Source

PRIOR = (0.05, 0.3, 0.6, 0.9, 0.99)
FLAT = Prices((0.02,) * 15 + (0.0,), 1.0)
TOKENS = 4


class Table:
    """Guesses by the last token of the text; its state is the path behind the text."""

    def __init__(self, source: Source, following: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        self.source = source
        self.prior = PRIOR
        self.text: list[int] = []
        self._following = following

    def follow(self, tokens: Sequence[int]) -> None:
        self.text = list(tokens)

    def append(self, token: int) -> None:
        self.text.append(token)

    def state(self) -> tuple[int, ...]:
        return ()

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        last = state[-1] if state else self.text[-1]
        return [Candidate(*candidate) for candidate in self._following.get(last, ())]


class Costly(Table):
    """One whose guesses cost seconds, and which remembers where it was asked."""

    def __init__(self, following: Mapping[int, Sequence[tuple[int, int]]], price: float) -> None:
        super().__init__(Source.MODEL, following)
        self.price = price
        self.asked: list[tuple[int, ...]] = []

    def seconds(self, state: tuple[int, ...]) -> float:
        return self.price

    def spent(self) -> float:
        return 0.0

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        self.asked.append(state)
        return super().candidates(state)


GUESSES = st.dictionaries(
    st.integers(0, TOKENS - 1),
    st.lists(
        st.tuples(st.integers(0, TOKENS - 1), st.integers(0, len(PRIOR) - 1)),
        max_size=3,
        unique_by=lambda candidate: candidate[0],
    ),
)
PRICES = st.lists(st.floats(0, 0.4), min_size=0, max_size=15).map(lambda rows: Prices((*sorted(rows), 0.0), 1.0))
"""Rows that cost ever more."""


def path_of(growth: Growth, node: int) -> tuple[int, ...]:
    return tuple(growth.tree.tokens[list(growth.tree.path_to(node)[1:])].tolist())


@given(GUESSES, GUESSES, PRICES, st.integers(1, 40), st.booleans(), st.integers(0, TOKENS - 1))
@settings(max_examples=200)
def test_every_draft_is_a_tree_of_rows_worth_their_price(one, other, prices, deepest, chain, anchor) -> None:
    grower = Grower([Table(Source.SUFFIX, one), Table(Source.RECYCLED, other)])
    grower.follow([3, anchor])
    growth = grower.grow(anchor, prices, deepest, chain=chain)
    tree = growth.tree
    assert tree.tokens[0] == anchor
    assert len(tree) <= len(prices.rows)
    assert tree.depths.max() <= deepest
    assert not chain or tree.is_chain
    parents, probabilities = tree.parents[1:], tree.path_prob
    assert (np.diff(probabilities) <= 0).all()
    assert (probabilities[1:] < probabilities[parents]).all()
    assert all(probabilities[node] >= prices.rows[node - 1] - 1e-6 for node in range(1, len(tree)))
    for node in range(len(tree)):
        children = probabilities[1:][parents == node]
        assert children.sum() <= 0.98 * probabilities[node] + 1e-6
    # Every node was guessed by the source it is said to be from.
    said = {int(Source.SUFFIX): one, int(Source.RECYCLED): other}
    for node in range(1, len(tree)):
        before = int(tree.tokens[tree.parents[node]])
        assert int(tree.tokens[node]) in [token for token, _ in said[int(tree.source[node])].get(before, ())]
    # What was considered is kept to learn from, of the nodes that have children above all.
    assert {int(parent) for parent in parents} <= set(growth.candidates)
    assert growth.model_passes == 0


@given(GUESSES, PRICES, st.integers(1, 6), st.integers(0, TOKENS - 1))
@settings(max_examples=200)
def test_no_guess_left_out_was_worth_its_row(candidates, prices, deepest, anchor) -> None:
    grower = Grower([Table(Source.SUFFIX, candidates)])
    grower.follow([anchor])
    growth = grower.grow(anchor, prices, deepest, chain=False)
    tree, rows = growth.tree, len(growth.tree)
    inside = {path_of(growth, node): float(tree.path_prob[node]) for node in range(rows)}
    if rows == len(prices.rows):
        return
    for path, probability in inside.items():
        if len(path) == deepest:
            continue
        following = candidates.get(path[-1] if path else anchor, ())
        together = sum(PRIOR[bucket] for _, bucket in following)
        for token, bucket in following:
            value = probability * PRIOR[bucket] * min(1.0, 0.98 / together)
            child = inside.get((*path, token))
            if child is None:
                assert value < prices.rows[rows - 1] + 1e-6
            else:
                assert child == pytest.approx(value, rel=1e-3)


def test_paths_end_at_the_depth_that_was_asked_for_and_at_thirty_two() -> None:
    grower = Grower([Table(Source.SUFFIX, {1: [(1, 4)]})])
    grower.follow([1])
    many = Prices((0.0,) * 60, 1.0)
    for deepest, rows in ((1, 2), (5, 6), (32, 33), (50, 33)):
        assert len(grower.grow(1, many, deepest, chain=False).tree) == rows
    assert len(grower.grow(1, Prices((0.0,), 1.0), 5, chain=False).tree) == 1
    assert len(grower.grow(1, many.up_to(4), 5, chain=False).tree) == 4


def test_nothing_is_drafted_where_nobody_guesses() -> None:
    for predictors in ([], [Table(Source.SUFFIX, {})]):
        grower = Grower(predictors)
        grower.follow([1])
        growth = grower.grow(1, FLAT, 8, chain=False)
        assert growth.tree.tokens.tolist() == [1]
        grower.learn(growth, (0,), 2)


def test_a_guess_is_its_guessers_however_poor_and_whoever_objects() -> None:
    # What the second source thinks of other tokens than its own is more than the first has to say for this one.
    grower = Grower([Table(Source.SUFFIX, {0: [(1, 0)]}), Table(Source.RECYCLED, {0: [(2, 0), (1, 0)], 1: [(3, 0)]})])
    grower.follow([0])
    tree = grower.grow(0, Prices((0.0,) * 9, 1.0), 1, chain=False).tree
    sources = dict(zip(tree.tokens[1:].tolist(), tree.source[1:].tolist(), strict=True))
    assert sources[2] == Source.RECYCLED
    objector = Grower([Table(Source.SUFFIX, {0: [(1, 0)]}), Table(Source.RECYCLED, {0: [(2, 0)]})])
    objector.follow([0])
    tree = objector.grow(0, Prices((0.0,) * 9, 1.0), 1, chain=False).tree
    assert dict(zip(tree.tokens[1:].tolist(), tree.source[1:].tolist(), strict=True)) == {
        1: Source.SUFFIX,
        2: Source.RECYCLED,
    }


def test_what_came_true_is_learned_along_the_accepted_path_only() -> None:
    grower = Grower([Table(Source.SUFFIX, {0: [(1, 3), (2, 1)], 1: [(2, 2)], 2: [(3, 4)]})])
    grower.follow([0])
    growth = grower.grow(0, FLAT, 3, chain=False)
    taken = growth.tree.child(0, 1)
    assert taken is not None
    grower.learn(growth, (0, taken), 0)
    shares = [grower.mixer.share(Source.SUFFIX, bucket) for bucket in range(5)]
    assert shares[3] > 0.9  # came true
    assert shares[1] < 0.3  # its sibling did not
    assert shares[2] < 0.6  # nor what was to follow it
    assert (shares[0], shares[4]) == pytest.approx((0.05, 0.99))  # nobody asked


def test_text_reaches_every_predictor() -> None:
    tables = [Table(Source.SUFFIX, {}), Table(Source.NGRAM, {}), Costly({}, 0.0)]
    grower = Grower(tables[:2], tables[2])
    grower.follow([1, 2])
    grower.append([3, 4])
    assert [table.text for table in tables] == [[1, 2, 3, 4]] * 3


@pytest.mark.parametrize("chain", [True, False])
def test_a_model_that_costs_nothing_continues_every_path_that_pays(chain: bool) -> None:
    model = Costly({1: [(1, 3)]}, 0.0)
    grower = Grower([], model)
    for _ in range(30):  # until it is known to be sure
        grower.follow([1])
        growth = grower.grow(1, FLAT, 8, chain=chain)
    assert growth.tree.tokens.tolist() == [1] * 9
    assert set(growth.tree.source[1:].tolist()) == {Source.MODEL}
    assert growth.model_passes == 8
    assert model.asked[-8:] == [(1,) * depth for depth in range(8)]


def test_a_model_that_costs_more_than_it_gives_is_asked_at_the_anchor_after_doubling_waits() -> None:
    model = Costly({1: [(1, 3)]}, 3.0)
    grower = Grower([Table(Source.SUFFIX, {1: [(1, 2)]})], model)
    asked = []
    for turn in range(1, 130):
        grower.follow([1])
        if grower.grow(1, FLAT, 8, chain=False).model_passes:
            asked.append(turn)
    assert asked == [8, 24, 56, 120]
    assert set(model.asked) == {()}


def test_a_model_is_not_asked_where_the_free_guesses_are_sure() -> None:
    model = Costly({1: [(1, 4)], 2: [(1, 4)]}, 0.2)
    grower = Grower([Table(Source.SUFFIX, {1: [(1, 4)]})], model)
    for _ in range(60):
        grower.follow([2])
        grower.grow(2, FLAT, 1, chain=False)
    grower.follow([2])
    assert grower.grow(2, FLAT, 1, chain=False).model_passes == 1
    grower.follow([1])
    assert grower.grow(1, FLAT, 1, chain=False).model_passes == 0
