"""Sampled drafts have the draft model's distributions, and output verified with them the target's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from edgerun.runtime.decode import DecodeLimits, decode
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.sampling.distribution import Distribution
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.choice import DraftSampling
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.sampled import (
    AcceptanceEstimate,
    ModelDistributions,
    SampledDrafter,
    sample_children,
)
from edgerun.runtime.speculation.drafters.stochastic_ngram import NgramDistributions, TargetNgrams
from edgerun.runtime.speculation.growth import TokenPrices
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.sampled_speculator import SampledSpeculator
from edgerun.runtime.speculation.tree import Source
from edgerun.runtime.speculation.verification import VerifyResult
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.chi_square import expect_distribution, sequences
from support.emulated_graph import EmulatedGraph, Floats, Text
from support.tiny_models import write_bundle

V = 16
SAMPLED = SamplingParams(temperature=1.5, top_k=5, repeat_penalty=1.3, seed=3)
FREE = TokenPrices((0.0,) * 7, 0.0)
"""Token positions and passes that cost nothing: everything that can be accepted pays."""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> tuple[GraphSession, GraphSession]:
    """A target and a draft of 16 tokens with different random weights."""

    def session(seed: int) -> GraphSession:
        bundle = write_bundle(tmp_path_factory.mktemp("pair"), seed=seed, vocab_size=V)
        return GraphSession(bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))

    return session(21), session(22)


@pytest.fixture
def model(graphs: tuple[GraphSession, GraphSession]) -> DraftModel:
    return model_of(graphs[1])


def model_of(graph: GraphSession, target_vocab: int = V, target_ids=None) -> DraftModel:
    bound = graph.bind(graph.arena(64))
    return DraftModel(bound, PassCost({0: {1: 0.001, 2: 0.0015}}), target_vocab, target_ids)


def plain_distribution(graph: GraphSession, text: list[int], params: SamplingParams, head: int = V) -> Distribution:
    bound = graph.bind(graph.arena(64))
    sampler = Sampler(params, head)
    sampler.observe(text)
    return Distribution.of(sampler, bound.forward(text, logits_for=(len(text) - 1,))[0])


@pytest.mark.parametrize(("chain", "left_out"), [(True, 0), (False, 0), (True, 9)], ids=["chain", "tree", "shortened"])
def test_draft_tokens_are_sampled_from_the_distributions_on_their_own_paths(
    graphs: tuple[GraphSession, GraphSession], model: DraftModel, chain: bool, left_out: int
) -> None:
    drafter = SampledDrafter(ModelDistributions(model), replace(SAMPLED, first_position=left_out))
    text = [7, 12, 5]
    drafter.reset(text)
    for new in ([3], [3, 9, 14], []):
        drafter.append(new)
        text = [*text, *new]
        draft = drafter.sample(text[-1], FREE, 4, chain=chain)
        tree = draft.tree
        assert tree.is_chain == chain
        assert len(tree) == (5 if chain else 7)
        assert set(tree.source[1:].tolist()) == {Source.MODEL}
        for node, distribution in draft.distributions.items():
            path = tree.tokens[list(tree.path_to(node))[1:]].tolist()
            expected = plain_distribution(graphs[1], [*text, *path], SAMPLED)
            np.testing.assert_array_equal(distribution.ids, expected.ids)
            np.testing.assert_allclose(distribution.probs, expected.probs, atol=1e-4)
            children = tree.tokens[tree.parents == node].tolist()
            position = left_out + len(text)
            assert tuple(children) == sample_children(distribution, len(children), SAMPLED.seed, position, node)
        assert {int(parent) for parent in tree.parents[1:]} == set(draft.distributions)


def test_the_number_of_children_does_not_depend_on_the_sampled_tokens(model: DraftModel) -> None:
    counts = set()
    for seed in range(20):
        drafter = SampledDrafter(ModelDistributions(model), replace(SAMPLED, seed=seed))
        drafter.reset([7, 12, 5])
        tree = drafter.sample(5, TokenPrices((0.05,) * 9, 0.0), 4, chain=False).tree
        counts.add(int((tree.parents == 0).sum()))
    assert len(counts) == 1


def test_nothing_is_sampled_or_run_that_does_not_pay(model: DraftModel) -> None:
    drafter = SampledDrafter(ModelDistributions(model), SAMPLED)
    drafter.reset([7, 12, 5])
    for prices, max_depth in (
        (TokenPrices((1.0,) * 9, 0.0), 4),
        (TokenPrices((0.0,) * 9, 1e6), 4),
        (FREE, 0),
        (TokenPrices((), 0.0), 4),
    ):
        draft = drafter.sample(5, prices, max_depth, chain=True)
        assert (len(draft.tree), draft.distributions) == (1, {})
    assert model.passes == 0
    assert len(drafter.sample(5, TokenPrices((0.3,) * 9, 0.0), 8, chain=True).tree) < 9


def test_drafting_that_never_pays_is_tried_with_doubling_waits(model: DraftModel) -> None:
    drafter = SampledDrafter(ModelDistributions(model), SAMPLED)
    drafter.reset([7, 12, 5])
    tried = [at for at in range(200) if len(drafter.sample(5, TokenPrices((1.0,) * 9, 1.0), 4, chain=True).tree) == 2]
    assert tried == [16, 49, 114]


def test_a_sequence_with_unknown_tokens_has_no_draft(graphs: tuple[GraphSession, GraphSession]) -> None:
    drafter = SampledDrafter(ModelDistributions(model_of(graphs[1], target_vocab=20)), SAMPLED)
    drafter.reset([7, 18])
    assert len(drafter.sample(18, FREE, 4, chain=False).tree) == 1
    drafter.reset([7, 5])
    assert len(drafter.sample(5, FREE, 4, chain=True).tree) == 5


def test_distributions_of_a_head_with_other_ids_are_in_target_ids(
    graphs: tuple[GraphSession, GraphSession], model: DraftModel
) -> None:
    """The same model with permuted ids gives the same probabilities."""
    names = np.random.default_rng(1).permutation(30)[:V].astype(np.int32)
    plain, renamed = ModelDistributions(model), ModelDistributions(model_of(graphs[1], 30, names))
    plain.start(SAMPLED)
    renamed.start(SAMPLED)
    for text in ([7, 12, 5], [7, 7, 7, 2]):
        plain.reset(text)
        renamed.reset(names[text].tolist())
        for path in ((), (3,), (3, 9)):
            expected, distribution = plain.distribution(path), renamed.distribution(tuple(names[list(path)].tolist()))
            assert (np.diff(distribution.ids) > 0).all()
            for token in range(V):
                assert distribution.probability(int(names[token])) == pytest.approx(
                    expected.probability(token), abs=1e-5
                )


def test_acceptance_is_learned() -> None:
    estimate = AcceptanceEstimate()
    sure, unsure = Distribution(np.arange(2), np.array([0.95, 0.05])), Distribution(np.arange(4), np.full(4, 0.25))
    assert estimate.rate(sure, 0) > estimate.rate(unsure, 0) > estimate.rate(unsure, 1)
    before = [estimate.rate(sure, 0), estimate.rate(unsure, 1), estimate.mean]
    for _ in range(300):
        estimate.learn(sure, 0, False)
        estimate.learn(unsure, 1, True)
    assert estimate.rate(sure, 0) < 0.1 < before[0]
    assert estimate.rate(unsure, 1) > 0.9 > before[1]
    assert estimate.mean < 0.01 < before[2]
    assert estimate.rate(unsure, 0) == AcceptanceEstimate().rate(unsure, 0)


def test_only_draft_tokens_that_were_tried_are_learned_from(model: DraftModel) -> None:
    drafter = SampledDrafter(ModelDistributions(model), SAMPLED)
    drafter.reset([7, 12, 5])
    draft = drafter.sample(5, FREE, 1, chain=False)
    first, second, third = (drafter.estimate.rate(draft.distributions[0], rank) for rank in range(3))
    assert (draft.tree.parents == 0).sum() >= 3
    assert second == third
    drafter.learn(draft, VerifyResult((0, 1), 2), np.zeros((2, V), np.float32))
    assert drafter.estimate.rate(draft.distributions[0], 0) > first
    assert drafter.estimate.rate(draft.distributions[0], 1) == second
    drafter.learn(draft, VerifyResult((0,), 2), np.zeros((1, V), np.float32))
    assert drafter.estimate.rate(draft.distributions[0], 1) < second


@cache
def target_logits(text: Text) -> Floats:
    return np.random.default_rng([5, *text]).normal(0, 1, V).astype(np.float32)


@cache
def draft_logits(text: Text) -> Floats:
    return (target_logits(text) + np.random.default_rng([6, *text]).normal(0, 0.7, V)).astype(np.float32)


@pytest.mark.parametrize("sampling", [DraftSampling.CHAIN, DraftSampling.TREE, DraftSampling.NGRAM])
@pytest.mark.parametrize("seeds", [500, pytest.param(5000, marks=pytest.mark.nightly)])
def test_sequences_have_the_targets_distribution(sampling: DraftSampling, seeds: int) -> None:
    """Sequences of up to five tokens, in as many rounds as they take; drafts stop where they pay."""
    prompt, length, end = [7, 12, 5], 5, 3
    params = SamplingParams(temperature=1.0, top_k=2, repeat_penalty=1.3)

    def after(new: Text) -> Distribution:
        sampler = Sampler(params, V)
        sampler.observe_prompt(prompt)
        sampler.observe(new)
        return Distribution.of(sampler, target_logits((*prompt, *new)))

    model = DraftModel(EmulatedGraph(draft_logits, V, 64), FixedCost({64: {1: 1e-6, 16: 1.1e-6}}), V)
    ngrams = sampling is DraftSampling.NGRAM
    source = NgramDistributions(TargetNgrams()) if ngrams else ModelDistributions(model)
    speculator = SampledSpeculator(source, FixedCost(NEARLY_FREE), sampling, trees=True)
    found, exact, rounds, produced = Counter[Text](), Counter[Text](), 0, 0
    for text, weight in sequences(after, length).items():
        exact[text[: text.index(end)] if end in text else text] += weight
    for seed in range(seeds):
        sampler = Sampler(replace(params, seed=seed), V)
        speculator.start_answer(sampler.params)
        limits = DecodeLimits(length, frozenset({end}))
        steps = list(decode(EmulatedGraph(target_logits, V, 64), prompt, sampler, limits, speculator))
        found[tuple(token for step in steps for token in step.tokens)] += 1
        rounds += len(steps)
        produced += sum(step.produced for step in steps)
    assert rounds < 0.9 * produced
    expect_distribution(found, exact, seeds)
