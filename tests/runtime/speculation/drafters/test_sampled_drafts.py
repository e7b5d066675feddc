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
from edgerun.runtime.speculation.drafters.sampled import ModelDistributions, sample_children
from edgerun.runtime.speculation.drafters.stochastic_ngram import NgramDistributions, TargetNgrams
from edgerun.runtime.speculation.growth import TokenPrices
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.rounds import Round
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


def drafting(model: DraftModel, text: list[int], params: SamplingParams = SAMPLED, *, chain: bool) -> SampledSpeculator:
    sampling = DraftSampling.CHAIN if chain else DraftSampling.TREE
    speculator = SampledSpeculator(ModelDistributions(model), FixedCost(NEARLY_FREE), sampling, trees=True)
    speculator.start_answer(params)
    speculator.reset(text)
    speculator._sync_drafters()
    return speculator


def plain_distribution(graph: GraphSession, text: list[int], params: SamplingParams, head: int = V) -> Distribution:
    bound = graph.bind(graph.arena(64))
    sampler = Sampler(params, head)
    sampler.observe(text)
    return Distribution.of(sampler, bound.forward(text, logits_for=(len(text) - 1,))[0])


@pytest.mark.parametrize(("chain", "left_out"), [(True, 0), (False, 0), (True, 9)], ids=["chain", "tree", "shortened"])
def test_draft_tokens_are_sampled_from_the_distributions_on_their_own_paths(
    graphs: tuple[GraphSession, GraphSession], model: DraftModel, chain: bool, left_out: int
) -> None:
    text = [7, 12, 5]
    speculator = drafting(model, text, replace(SAMPLED, first_position=left_out), chain=chain)
    for new in ([3], [3, 9, 14], []):
        speculator._token_ids += new
        speculator._sync_drafters()
        text = [*text, *new]
        draft = speculator.sample(text[-1], FREE, 4)
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
        speculator = drafting(model, [7, 12, 5], replace(SAMPLED, seed=seed), chain=False)
        tree = speculator.sample(5, TokenPrices((0.05,) * 9, 0.0), 4).tree
        counts.add(int((tree.parents == 0).sum()))
    assert len(counts) == 1


def test_nothing_is_sampled_or_run_that_does_not_pay(model: DraftModel) -> None:
    speculator = drafting(model, [7, 12, 5], chain=True)
    for prices, max_depth in (
        (TokenPrices((1.0,) * 9, 0.0), 4),
        (TokenPrices((0.0,) * 9, 1e6), 4),
        (FREE, 0),
        (TokenPrices((), 0.0), 4),
    ):
        draft = speculator.sample(5, prices, max_depth)
        assert (len(draft.tree), draft.distributions) == (1, {})
    assert model.passes == 0
    assert len(speculator.sample(5, TokenPrices((0.3,) * 9, 0.0), 8).tree) < 9


def test_drafting_that_never_pays_is_tried_with_doubling_waits(model: DraftModel) -> None:
    speculator = drafting(model, [7, 12, 5], chain=True)
    tried = [at for at in range(200) if len(speculator.sample(5, TokenPrices((1.0,) * 9, 1.0), 4).tree) == 2]
    assert tried == [16, 49, 114]


def test_a_sequence_with_unknown_tokens_has_no_draft(graphs: tuple[GraphSession, GraphSession]) -> None:
    model = model_of(graphs[1], target_vocab=20)
    assert len(drafting(model, [7, 18], chain=False).sample(18, FREE, 4).tree) == 1
    assert len(drafting(model, [7, 5], chain=True).sample(5, FREE, 4).tree) == 5


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


def test_only_draft_tokens_that_were_tried_are_learned_from(model: DraftModel) -> None:
    speculator = drafting(model, [7, 12, 5], chain=False)
    logits = np.zeros((9, V), np.float32)

    def learned(path: tuple[int, ...]) -> tuple[float, ...]:
        """What is expected of the first three children after a draft of which a path is accepted, and of any first."""
        nonlocal distribution
        draft = speculator.sample(5, FREE, 1)
        assert (draft.tree.parents == 0).sum() >= 3
        distribution = draft.distributions[0]
        speculator._learn(Round(draft.tree), VerifyResult(path, 2), logits)
        return (*(speculator.prediction(distribution, rank).probability for rank in range(3)), speculator.mean_rate)

    distribution = Distribution(np.arange(2), np.full(2, 0.5))
    speculator.sample(5, FREE, 0)
    first, second, third, mean = learned((0, 1))
    assert (second, third, mean) == (second, second, pytest.approx(0.608))
    accepted, *others, mean = learned((0, 1))
    assert (accepted > first, others, mean > 0.608) == (True, [second, third], True)
    for _ in range(300):
        rejected, *others, mean = learned((0,))
    assert rejected < 0.1 < accepted
    assert others[0] == others[1] < second
    assert mean < 0.01
    before = others[0]
    for _ in range(300):
        _, later, *_ = learned((0, 2))
    assert later > 0.4 > before
    flat = Distribution(np.arange(9), np.full(9, 1 / 9))  # of another class
    assert speculator.prediction(flat, 0).probability == pytest.approx(0.3 + 0.65 * 0.15)


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
