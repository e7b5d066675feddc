"""Probabilities from evidence: they become what really happens, and stay numbers whatever happens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.runtime.speculation.learned_rates import Mixer
from edgerun.runtime.speculation.tree import Source
from support.nightly import examples

A, B, C = Source.SUFFIX, Source.NGRAM, Source.RECYCLE
PRIORS = {A: (0.1, 0.5, 0.9), B: (0.3, 0.6), C: (0.05,)}


def cells(mixer: Mixer, source: Source) -> list[tuple[int, int]]:
    """All evidence of a source: for the token it proposes, and against others."""
    buckets = range(len(PRIORS[source]))
    return [(int(source), bucket) for bucket in buckets] + [
        (int(source), mixer.objection_cell(source, bucket)) for bucket in buckets
    ]


def test_a_single_source_starts_with_its_prior() -> None:
    mixer = Mixer(PRIORS)
    for source, shares in PRIORS.items():
        for bucket, share in enumerate(shares):
            assert mixer.predict([(source, bucket)]).probability == pytest.approx(share)
            assert mixer.acceptance_rate(source, bucket) == pytest.approx(share)
    # Cells against a token are cells of their own.
    assert len({cell for _, cell in cells(mixer, A)}) == 6


@pytest.mark.parametrize("frequency", [0.05, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("bucket", [0, 2])
def test_a_bucket_learns_the_acceptance_rate_of_its_candidates(frequency: float, bucket: int) -> None:
    mixer, draw = Mixer(PRIORS), random.Random(1)
    seen = []
    for _ in range(4000):
        prediction = mixer.predict([(A, bucket)])
        seen.append(prediction.probability)
        mixer.learn(prediction, draw.random() < frequency)
    assert sum(seen[-2000:]) / 2000 == pytest.approx(frequency, abs=0.03)
    # The other buckets know nothing of it.
    assert mixer.acceptance_rate(A, 1) == pytest.approx(0.5)
    assert mixer.acceptance_rate(B, 0) == pytest.approx(0.3)


def test_two_independent_sources_that_agree_are_more_reliable_than_one() -> None:
    """The next token is one of two; each source proposes it with probability 0.8, independently of the other."""
    mixer, draw = Mixer({A: (0.5,), B: (0.5,)}), random.Random(3)
    agreed: list[tuple[float, bool]] = []
    against_each_other: list[tuple[float, bool]] = []
    for _ in range(20_000):
        first, second = draw.random() < 0.8, draw.random() < 0.8
        if first == second:
            prediction = mixer.predict([(A, 0), (B, 0)])
            mixer.learn(prediction, first)
            agreed.append((prediction.probability, first))
        else:
            for evidence, right in (
                ([(A, 0), (B, mixer.objection_cell(B, 0))], first),
                ([(A, mixer.objection_cell(A, 0)), (B, 0)], second),
            ):
                prediction = mixer.predict(evidence)
                mixer.learn(prediction, right)
                against_each_other.append((prediction.probability, right))
    for outcomes, truth in ((agreed, 0.64 / 0.68), (against_each_other, 0.5)):
        late = outcomes[len(outcomes) // 2 :]
        assert sum(right for _, right in late) / len(late) == pytest.approx(truth, abs=0.02)
        assert sum(probability for probability, _ in late) / len(late) == pytest.approx(truth, abs=0.04)


def test_a_redundant_source_adds_nothing() -> None:
    """Two sources that always agree: the probability becomes that of one, not the product of both."""
    mixer, draw = Mixer({A: (0.5,), B: (0.5,)}), random.Random(4)
    late = []
    for step in range(12_000):
        prediction = mixer.predict([(A, 0), (B, 0)])
        if step > 8000:
            late.append(prediction.probability)
        mixer.learn(prediction, draw.random() < 0.75)
    assert sum(late) / len(late) == pytest.approx(0.75, abs=0.03)


@given(
    st.dictionaries(st.sampled_from(list(Source)), st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1),
    st.data(),
)
@settings(max_examples=examples(40))
def test_probabilities_stay_between_0_and_1(priors, data) -> None:
    mixer = Mixer(priors)
    sources = sorted(priors)
    for _ in range(data.draw(st.integers(1, 10))):
        speaking = data.draw(st.lists(st.sampled_from(sources), min_size=1, unique=True))
        evidence = []
        for source in speaking:
            bucket = data.draw(st.integers(0, len(priors[source]) - 1))
            evidence.append((source, mixer.objection_cell(source, bucket) if data.draw(st.booleans()) else bucket))
        prediction = mixer.predict(evidence)
        assert 0 < prediction.probability < 1
        for _ in range(data.draw(st.sampled_from([1, 300]))):
            mixer.learn(prediction, data.draw(st.booleans()))
        assert 0 < mixer.predict(evidence).probability < 1
