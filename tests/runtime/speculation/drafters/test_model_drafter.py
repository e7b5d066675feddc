"""A draft model as a drafter."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.tree import Source


@pytest.fixture
def drafter(tiny_bundle: Path) -> DraftModel:
    graph = GraphSession(tiny_bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    return DraftModel(graph.bind(graph.arena(64)), PassCost({0: {1: 0.001, 2: 0.0015}}), 300)


def test_candidates_are_the_models_with_buckets_of_their_probability(drafter: DraftModel) -> None:
    assert drafter.source is Source.MODEL
    half = len(drafter.prior) // 2
    for text in ([20, 21], [30, 40, 50], [7], [200, 100]):
        drafter.reset(text)
        for state in (drafter.state(), drafter.after(drafter.state(), 9)):
            candidates = drafter.candidates(state)
            likely = drafter.top_tokens(state, 3)
            shown = [(token, p) for token, p in zip(*likely, strict=True) if p >= 0.02]
            assert [candidate.token for candidate in candidates] == [token for token, _ in shown]
            for rank, (candidate, (_, p)) in enumerate(zip(candidates, shown, strict=True)):
                assert (candidate.bucket >= half) == (rank > 0)
                # The prior of a class is its middle, which is at most half the widest class off.
                assert drafter.prior[candidate.bucket % half] == pytest.approx(p, abs=0.051)


def test_priors_are_probabilities_that_rise_with_the_class(drafter: DraftModel) -> None:
    half = len(drafter.prior) // 2
    assert all(0 < share < 1 for share in drafter.prior)
    for part in (drafter.prior[:half], drafter.prior[half:]):
        assert list(part) == sorted(part)


def test_candidates_cost_until_they_are_known(drafter: DraftModel) -> None:
    drafter.reset([20, 21])
    state = drafter.after(drafter.state(), 5)
    assert drafter.seconds(state) == drafter.cost.seconds(3, 0)
    assert drafter.take_seconds_spent() == 0
    drafter.candidates(state)
    assert drafter.seconds(state) == 0
    assert drafter.take_seconds_spent() > 0
    drafter.append(5)
    assert drafter.seconds(drafter.state()) == 0


def test_a_low_temperature_raises_the_first_candidate(drafter: DraftModel) -> None:
    drafter.reset([30, 40, 50])
    warm = drafter.candidates(())
    drafter.temperature = 0.2
    cold = drafter.candidates(())
    assert cold[0].token == warm[0].token
    assert cold[0].bucket > warm[0].bucket
