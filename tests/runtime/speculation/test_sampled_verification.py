"""Verified sampled drafts have the target's distribution: by enumeration, and on graphs by chi-square."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from edgerun.runtime.sampling.distribution import Distribution, Purpose, uniforms_at
from edgerun.runtime.sampling.logit_stage import Logits
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams, uniform_at
from edgerun.runtime.speculation.drafters import stochastic_ngram
from edgerun.runtime.speculation.drafters.sampled import SampledDraft, sample_children
from edgerun.runtime.speculation.drafters.stochastic_ngram import NgramDistributions, TargetNgrams
from edgerun.runtime.speculation.sampled_speculator import (
    acceptance_probability,
    block_acceptance,
    verify_block,
    verify_recursive,
)
from edgerun.runtime.speculation.tree import Source, Tree
from edgerun.runtime.speculation.verification import VerifyResult
from support.adversarial_drafters import chain_tree
from support.chi_square import expect_distribution, items

NOBODY = frozenset[int]()
Text = tuple[int, ...]
Model = Callable[[Text], Distribution]
"""The distribution of the next token after a sequence."""
Verifier = Callable[[SampledDraft, Logits, Sampler, int, frozenset[int], int], VerifyResult]
V, GAMMA = 3, 3


def dist_of(*probs: float) -> Distribution:
    """Make a distribution of dense probabilities; zeros are left out, as filters leave them out."""
    dense = np.array(probs, np.float64)
    ids = np.flatnonzero(dense)
    return Distribution(ids, dense[ids] / dense.sum())


def toy(seed: int, holes: float = 0.25, size: int = V) -> Model:
    """A different random distribution after every sequence, some tokens impossible."""

    @cache
    def after(text: Text) -> Distribution:
        random = np.random.default_rng([seed, len(text), *text])
        dense = random.dirichlet(np.full(size, 0.7)) * (random.random(size) >= holes)
        dense[random.integers(size)] += 0.05
        return dist_of(*dense)

    return after


def continued(p: Model, text: Text, count: int) -> Iterator[tuple[Text, float]]:
    """All continuations of `text` by `count` tokens, and their probabilities."""
    if count == 0:
        yield text, 1.0
        return
    for token, first in items(p(text)):
        for whole, rest in continued(p, (*text, token), count - 1):
            yield whole, first * rest


def difference(found: Counter[Text], p: Model, length: int) -> float:
    """Largest difference from the target's distribution of `length` tokens."""
    expected = dict(continued(p, (), length))
    return max(abs(found[text] - expected.get(text, 0.0)) for text in {*found, *expected})


def add(found: Counter[Text], p: Model, emitted: Text, length: int, weight: float) -> None:
    """Count an outcome, continued as the target continues it."""
    for whole, rest in continued(p, emitted, length - len(emitted)):
        found[whole] += weight * rest


# Exact distributions: every draft and every decision, with its probability.


def block_outcomes(p: Model, q: Model, gamma: int) -> Iterator[tuple[Text, Text, float]]:
    """Accepted tokens, emitted tokens and probability of every draft and decision of block verification."""
    for drawn, chance in continued(q, (), gamma):
        targets = [p(drawn[:i]) for i in range(gamma + 1)]
        drafts = [q(drawn[:i]) for i in range(gamma)]
        weights, probabilities = block_acceptance(drawn, targets, drafts)
        for taken in range(gamma + 1):
            decided = math.prod((probabilities[taken - 1] if taken else 1.0, *(1 - h for h in probabilities[taken:])))
            rest = targets[taken] if taken == gamma else targets[taken].residual(drafts[taken], weights[taken])
            for token, last in items(rest):
                yield drawn[:taken], (*drawn[:taken], token), chance * decided * last


def ordered_draws(q: Distribution, count: int) -> Iterator[tuple[Text, float]]:
    """Every draw without replacement, in order."""
    if count == 0 or not q.ids.size:
        yield (), 1.0
        return
    for token, first in items(q):
        for others, rest in ordered_draws(q.without(token), count - 1):
            yield (token, *others), first * rest


def recursive_outcomes(p: Model, q: Model, widths: Sequence[int], text: Text = ()) -> Iterator[tuple[Text, float]]:
    """Tokens emitted and probability, for a tree with that many children of every node at each depth."""
    if not widths:
        yield from (((*text, token), last) for token, last in items(p(text)))
        return
    for drawn, drawn_with in ordered_draws(q(text), widths[0]):
        chance, rest, proposal = drawn_with, p(text), q(text)
        for token in drawn:
            taken = acceptance_probability(rest, proposal, token)
            if taken > 0:
                for emitted, more in recursive_outcomes(p, q, widths[1:], (*text, token)):
                    yield emitted, chance * taken * more
            chance *= 1 - taken
            rest, proposal = rest.residual(proposal), proposal.without(token)
        yield from (((*text, token), chance * last) for token, last in items(rest))


@pytest.mark.parametrize("seed", range(6))
def test_block_verification_gives_the_targets_distribution(seed: int) -> None:
    p, q = toy(seed), toy(seed + 100)
    found: Counter[Text] = Counter()
    for _, emitted, weight in block_outcomes(p, q, GAMMA):
        add(found, p, emitted, GAMMA + 1, weight)
    assert difference(found, p, GAMMA + 1) < 1e-12


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2), (3, 2, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_recursive_rejection_gives_the_targets_distribution(seed: int, widths: tuple[int, ...]) -> None:
    p, q = toy(seed), toy(seed + 100)
    found: Counter[Text] = Counter()
    for emitted, weight in recursive_outcomes(p, q, widths):
        add(found, p, emitted, GAMMA + 1, weight)
    assert difference(found, p, GAMMA + 1) < 1e-12


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_drafts_of_ngrams_keep_the_targets_distribution(temperature: float) -> None:
    """The table has learned distributions of other texts that end alike, and misses some of them."""
    p, table = toy(4, size=6), TargetNgrams()
    for text in ((0, 1), (2, 1), (3, 1), (0, 4), (1, 2), (1, 2, 1), (5,), (3, 3)):
        logits = np.full(6, -1e9, np.float32)
        logits[p(text).ids] = np.log(p(text).probs)
        table.learn(text, logits)
    ngrams = NgramDistributions(table)
    ngrams.start(SamplingParams(temperature=temperature, top_k=4))

    def q(text: Text) -> Distribution:
        ngrams.reset((2,))
        return ngrams.distribution((1, *text)) or Distribution(np.empty(0, np.intp), np.empty(0))

    sizes = {text: q(text).ids.size for text in ((), (1,), (4,), (0,))}
    assert sizes[()] > 1 < sizes[(1,)]
    assert sizes[(0,)] == 0
    found: Counter[Text] = Counter()
    for emitted, weight in recursive_outcomes(p, q, (3, 2)):
        add(found, p, emitted, 3, weight)
    assert difference(found, p, 3) < 1e-12
    first = sum(weight for emitted, weight in recursive_outcomes(p, q, (3,)) if len(emitted) == 2)
    single = np.minimum([p(()).probability(token) for token in q(()).ids.tolist()], q(()).probs).sum()
    assert first > single > 0


def test_ngrams_average_what_the_target_gave_and_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stochastic_ngram, "_MOST", 3)
    table = TargetNgrams()
    for probs in ((0.5, 0.5, 0, 0), (0.25, 0, 0.75, 0)):
        table.learn((7, 8), np.log(np.maximum(probs, 1e-30), dtype=np.float32))
    tokens, sums = table.after((9, 9, 7, 8)) or ((), ())
    assert tokens.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(sums, [0.75, 0.5, 0.75, 0], atol=1e-6)
    assert table.after((8, 7)) is None
    table.learn((5, 6), np.zeros(4, np.float32))
    assert table.after((3, 8)) is None
    assert table.after((7, 8)) is not None


def test_block_verification_accepts_more_than_token_by_token() -> None:
    """The paper's example: 11/9 of two draft tokens are accepted, with token-level rejection 10/9."""
    p, q = dist_of(1 / 3, 2 / 3), dist_of(2 / 3, 1 / 3)
    taken = sum(len(path) * weight for path, _, weight in block_outcomes(lambda _: p, lambda _: q, 2))
    assert taken == pytest.approx(11 / 9, abs=1e-12)
    chosen = [(weight, acceptance_probability(p, q, token)) for token, weight in items(q)]
    one = sum(weight * taken for weight, taken in chosen)
    assert one + one * one == pytest.approx(10 / 9, abs=1e-12)
    for seed in range(4):  # and never less
        p_of, q_of = toy(seed), toy(seed + 100)
        block = sum(len(path) * weight for path, _, weight in block_outcomes(p_of, q_of, GAMMA))
        outcomes = recursive_outcomes(p_of, q_of, (1,) * GAMMA)
        assert block >= sum((len(emitted) - 1) * weight for emitted, weight in outcomes) - 1e-12


def test_a_draft_with_the_targets_distribution_is_accepted_as_a_whole() -> None:
    p = toy(2)
    assert {len(path): weight for path, _, weight in block_outcomes(p, p, 2) if weight > 1e-12}.keys() == {2}
    assert all(len(emitted) == 3 for emitted, weight in recursive_outcomes(p, p, (2, 1)) if weight > 1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_children_are_sampled_without_replacement(count: int) -> None:
    distribution, seeds = dist_of(0.6, 0, 0.3, 0.1), 4000
    found = Counter(sample_children(distribution, count, seed, 7, 0) for seed in range(seeds))
    expect_distribution(found, dict(ordered_draws(distribution, count)), seeds)
    assert sample_children(distribution, 9, 1, 7, 0) == sample_children(distribution, 3, 1, 7, 0)
    assert len({sample_children(dist_of(*[1] * 99), 3, 1, at, node) for at in range(9) for node in range(9)}) == 81


def sampled_chain(q: Model, seed: int, text: Text) -> SampledDraft:
    """A chain of `GAMMA` sampled tokens; `text` ends with the anchor."""
    tokens, distributions = list[int](), dict[int, Distribution]()
    for node in range(GAMMA):
        distributions[node] = q((*text, *tokens))
        tokens += sample_children(distributions[node], 1, seed, len(text), node)
    return SampledDraft(chain_tree(text[-1], tokens, [1.0] * GAMMA, Source.MODEL), distributions)


def processed(logits_after: Callable[[Text], Logits], params: SamplingParams) -> Model:
    """The distribution after temperature, filters and the repetition penalty of the sequence itself."""

    @cache
    def after(text: Text) -> Distribution:
        logits = logits_after(text)
        sampler = Sampler(params, logits.size)
        sampler.observe(text)
        return Distribution.of(sampler, logits)

    return after


@cache
def toy_logits(text: Text) -> Logits:
    return np.random.default_rng([5, *text]).normal(0, 1, V).astype(np.float32)


# A penalty this strong makes the distributions of different paths very different.
PENALIZED = SamplingParams(temperature=0.7, top_p=0.95, repeat_penalty=3.0)


def test_a_block_is_decided_by_its_probabilities_and_weights() -> None:
    """Every result, from the same random numbers and the acceptance probabilities that were checked above."""
    prompt, p, q = (0, 2), processed(toy_logits, PENALIZED), toy(11, holes=0.1)
    seen: Counter[int] = Counter()
    for seed in range(300):
        draft = sampled_chain(q, seed, prompt)
        drawn = tuple(draft.tree.tokens[1:].tolist())
        paths = [(*prompt, *drawn[:i]) for i in range(GAMMA + 1)]
        targets, drafts = [p(path) for path in paths], [q(path) for path in paths[:GAMMA]]
        weights, probabilities = block_acceptance(drawn, targets, drafts)
        left_out = seed % 3
        trials = uniforms_at(seed, left_out + len(prompt), GAMMA, Purpose.ACCEPT)
        taken = max((i + 1 for i in range(GAMMA) if trials[i] < probabilities[i]), default=0)
        rest = targets[taken] if taken == GAMMA else targets[taken].residual(drafts[taken], weights[taken])
        expected = VerifyResult(tuple(range(taken + 1)), rest.draw(uniform_at(seed, left_out + len(prompt) + taken)))

        sampler = Sampler(replace(PENALIZED, seed=seed, first_position=left_out), V)
        sampler.observe(prompt)
        logits = np.stack([toy_logits(path) for path in paths])
        assert verify_block(draft, logits, sampler, len(prompt), NOBODY, 9) == expected
        # The sampler has observed the prompt and the accepted tokens, and nothing else.
        np.testing.assert_array_equal(Distribution.of(sampler, logits[taken]).probs, targets[taken].probs)
        seen[taken] += 1
    assert min(seen[taken] for taken in range(GAMMA + 1)) > 10


# Edges.

EVEN = np.zeros((4, V), np.float32)


def sure_draft(tokens: Sequence[int]) -> SampledDraft:
    """A chain sampled from distributions as even as the target's, so that all of it is accepted."""
    tree = chain_tree(0, tokens, [1.0] * len(tokens), Source.MODEL)
    return SampledDraft(tree, {node: dist_of(*[1 / V] * V) for node in range(len(tokens))})


@pytest.mark.parametrize("verify", [verify_block, verify_recursive])
def test_end_tokens_and_limits_cut_accepted_paths(verify: Verifier) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), V)
    draft = sure_draft([2, 1, 2])
    assert verify(draft, EVEN, sampler, 1, NOBODY, 9).accepted_path == (0, 1, 2, 3)
    assert verify(draft, EVEN, sampler, 1, frozenset({1}), 9) == VerifyResult((0, 1), 1)
    assert verify(draft, EVEN, sampler, 1, frozenset({2}), 9) == VerifyResult((0,), 2)
    for max_tokens in (1, 2, 3, 4):
        assert verify(draft, EVEN, sampler, 1, NOBODY, max_tokens).accepted_path == tuple(range(max_tokens))


@pytest.mark.parametrize("verify", [verify_block, verify_recursive])
def test_without_draft_tokens_a_seed_gives_the_plain_output(verify: Verifier) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (1, V)).astype(np.float32)
    for seed in range(50):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), V)
        assert verify(sure_draft([]), logits, sampler, 6, NOBODY, 9) == VerifyResult((0,), sampler.choose(logits[0], 6))


@pytest.mark.parametrize("verify", [verify_block, verify_recursive])
def test_a_greedy_target_accepts_its_own_choices_only(verify: Verifier) -> None:
    logits = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0]], np.float32)
    sampler = Sampler(SamplingParams(), V)
    assert verify(sure_draft([1, 0, 2]), logits, sampler, 1, NOBODY, 9) == VerifyResult((0, 1, 2, 3), 1)
    assert verify(sure_draft([1, 2, 2]), logits, sampler, 1, NOBODY, 9) == VerifyResult((0, 1), 0)


def test_children_that_were_not_sampled_are_matched() -> None:
    """A table's candidate below a sampled token: the tree of a draft model, continued from a table."""
    sampler = Sampler(SamplingParams(temperature=1.0), V)
    tree = Tree.of([0, 2, 0, 1, 2], [-1, 0, 1, 1, 1], [1.0] * 5, [Source.MODEL, *[Source.RECYCLE] * 4])
    result = verify_recursive(SampledDraft(tree, {0: dist_of(1, 1, 1)}), EVEN[[0] * 5], sampler, 1, NOBODY, 9)
    chosen = sampler.choose(EVEN[0], 2)
    assert result == VerifyResult((0, 1, 2 + chosen), sampler.choose(EVEN[0], 3))
