"""Growing drafts: what holds for every tree, and that no candidate left out was worth its token position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.runtime.speculation.drafters.interface import Candidate, Drafter
from edgerun.runtime.speculation.growth import TokenPrices, TreeGrowth
from edgerun.runtime.speculation.learned_rates import Mixer
from edgerun.runtime.speculation.tree import Source
from edgerun.runtime.speculation.verification import VerifyResult
from support.adversarial_drafters import eager
from support.nightly import examples

PRIOR = (0.05, 0.3, 0.6, 0.9, 0.99)
FLAT = TokenPrices((0.02,) * 15 + (0.0,), 1.0)
TOKENS = 4


class Table(Drafter):
    """A drafter with candidates by the last token of the sequence; its state is the path behind the sequence."""

    def __init__(self, source: Source, following: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        self.source = source
        self.prior = PRIOR
        self.token_ids: list[int] = []
        self._following = following

    def reset(self, token_ids: Sequence[int]) -> None:
        self.token_ids = list(token_ids)

    def append(self, token: int) -> None:
        self.token_ids.append(token)

    def state(self) -> tuple[int, ...]:
        return ()

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        last = state[-1] if state else self.token_ids[-1]
        return [Candidate(*candidate) for candidate in self._following.get(last, ())]


class Costly(Table):
    """A draft model whose candidates cost seconds; records the states it was run at."""

    def __init__(self, following: Mapping[int, Sequence[tuple[int, int]]], cost_s: float) -> None:
        super().__init__(Source.MODEL, following)
        self.cost_s = cost_s
        self.states_run: list[tuple[int, ...]] = []

    def seconds(self, state: tuple[int, ...]) -> float:
        return self.cost_s

    def take_seconds_spent(self) -> float:
        return 0.0

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        self.states_run.append(state)
        return super().candidates(state)


class Growing:
    """Grows trees with one mixer and one model value, as a speculator does."""

    def __init__(self, drafters: Sequence[Table], model: Costly | None = None) -> None:
        self.drafters, self.model = drafters, model
        everyone = [*drafters, *([] if model is None else [model])]
        self.everyone = everyone
        self.mixer = Mixer({each.source: each.prior for each in everyone})

    def grow(self, sequence: Sequence[int], prices: TokenPrices, max_depth: int, *, chain: bool = False) -> TreeGrowth:
        for each in self.everyone:
            each.reset(sequence)
        growth = TreeGrowth(self.drafters, self.model, self.mixer)
        growth.grow(sequence[-1], prices, max_depth, chain=chain)
        return growth


CANDIDATES = st.dictionaries(
    st.integers(0, TOKENS - 1),
    st.lists(
        st.tuples(st.integers(0, TOKENS - 1), st.integers(0, len(PRIOR) - 1)),
        max_size=3,
        unique_by=lambda candidate: candidate[0],
    ),
)
PRICES = st.lists(st.floats(0, 0.4), min_size=0, max_size=15).map(
    lambda positions: TokenPrices((*sorted(positions), 0.0), 1.0)
)
"""Token positions of rising prices."""


def path_of(growth: TreeGrowth, node: int) -> tuple[int, ...]:
    return tuple(growth.tree.tokens[list(growth.tree.path_to(node)[1:])].tolist())


@given(CANDIDATES, CANDIDATES, PRICES, st.integers(1, 40), st.booleans(), st.integers(0, TOKENS - 1))
@settings(max_examples=examples(200))
def test_every_draft_is_a_tree_of_tokens_worth_their_price(one, other, prices, max_depth, chain, anchor) -> None:
    growing = Growing([Table(Source.SUFFIX, one), Table(Source.RECYCLE, other)])
    growth = growing.grow([3, anchor], prices, max_depth, chain=chain)
    tree = growth.tree
    assert tree.tokens[0] == anchor
    assert len(tree) <= len(prices.positions)
    assert tree.depths.max() <= max_depth
    assert not chain or tree.is_chain
    parents, probabilities = tree.parents[1:], tree.path_prob
    assert (np.diff(probabilities) <= 0).all()
    assert (probabilities[1:] < probabilities[parents]).all()
    assert all(probabilities[node] >= prices.positions[node - 1] - 1e-6 for node in range(1, len(tree)))
    for node in range(len(tree)):
        children = probabilities[1:][parents == node]
        assert children.sum() <= 0.98 * probabilities[node] + 1e-6
    # Every node was proposed by the source that it is counted under.
    proposals = {int(Source.SUFFIX): one, int(Source.RECYCLE): other}
    for node in range(1, len(tree)):
        before = int(tree.tokens[tree.parents[node]])
        assert int(tree.tokens[node]) in [token for token, _ in proposals[int(tree.source[node])].get(before, ())]
    # The candidates are kept to learn from, at least for every node that has children.
    assert {int(parent) for parent in parents} <= set(growth.candidates)
    assert growth.model_passes == 0


@given(CANDIDATES, PRICES, st.integers(1, 6), st.integers(0, TOKENS - 1))
@settings(max_examples=examples(200))
def test_no_candidate_left_out_was_worth_its_position(candidates, prices, max_depth, anchor) -> None:
    growth = Growing([Table(Source.SUFFIX, candidates)]).grow([anchor], prices, max_depth)
    tree, width = growth.tree, len(growth.tree)
    inside = {path_of(growth, node): float(tree.path_prob[node]) for node in range(width)}
    if width == len(prices.positions):
        return
    for path, probability in inside.items():
        if len(path) == max_depth:
            continue
        following = candidates.get(path[-1] if path else anchor, ())
        total = sum(PRIOR[bucket] for _, bucket in following)
        for token, bucket in following:
            value = probability * PRIOR[bucket] * min(1.0, 0.98 / total)
            child = inside.get((*path, token))
            if child is None:
                assert value < prices.positions[width - 1] + 1e-6
            else:
                assert child == pytest.approx(value, rel=1e-3)


def test_paths_end_at_the_given_depth_and_at_thirty_two() -> None:
    growing = Growing([Table(Source.SUFFIX, {1: [(1, 4)]})])
    many = TokenPrices((0.0,) * 60, 1.0)
    for max_depth, width in ((1, 2), (5, 6), (32, 33), (50, 33)):
        assert len(growing.grow([1], many, max_depth).tree) == width
    assert len(growing.grow([1], TokenPrices((0.0,), 1.0), 5).tree) == 1


def test_outcomes_are_learned_along_the_accepted_path_only() -> None:
    speculator = eager(Table(Source.SUFFIX, {0: [(1, 3), (2, 1)], 1: [(2, 2)], 2: [(3, 4)]}))
    speculator.reset([0])
    draft = speculator.propose(1, 4, 16)
    accepted = draft.tree.child(0, 1)
    logits = np.zeros((len(draft.tree), TOKENS), np.float32)
    speculator.observe(draft, VerifyResult((0, accepted), 0), logits, 1, 0.1)
    rates = [speculator.mixer.acceptance_rate(Source.SUFFIX, bucket) for bucket in range(5)]
    assert rates[3] > 0.9  # accepted
    assert rates[1] < 0.3  # its sibling was not
    assert rates[2] < 0.6  # nor was its child
    assert (rates[0], rates[4]) == pytest.approx((0.05, 0.99))  # not on the path


@pytest.mark.parametrize("chain", [True, False])
def test_a_model_that_costs_nothing_continues_every_path_that_pays(chain: bool) -> None:
    model = Costly({1: [(1, 3)]}, 0.0)
    growing = Growing([], model)
    for _ in range(30):  # until its candidates are learned to be reliable
        growth = growing.grow([1], FLAT, 8, chain=chain)
    assert growth.tree.tokens.tolist() == [1] * 9
    assert set(growth.tree.source[1:].tolist()) == {Source.MODEL}
    assert growth.model_passes == 8
    assert model.states_run[-8:] == [(1,) * depth for depth in range(8)]


def test_a_model_is_not_run_where_the_free_candidates_are_reliable() -> None:
    model = Costly({1: [(1, 4)], 2: [(1, 4)]}, 0.2)
    growing = Growing([Table(Source.SUFFIX, {1: [(1, 4)]})], model)
    for _ in range(60):
        growing.grow([2], FLAT, 1)
    assert growing.grow([2], FLAT, 1).model_passes == 1
    assert growing.grow([1], FLAT, 1).model_passes == 0
