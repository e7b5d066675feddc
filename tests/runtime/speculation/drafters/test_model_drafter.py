"""A draft model among the predictors."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.speculation.drafters.draft_model import DraftModel
from edgerun.runtime.speculation.drafters.model import ModelDrafter
from edgerun.runtime.speculation.pass_cost import PassCost
from edgerun.runtime.speculation.tree import Source


@pytest.fixture
def predictor(tiny_bundle: Path) -> ModelDrafter:
    graph = GraphSession(tiny_bundle / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    return ModelDrafter(DraftModel(graph.bind(graph.arena(64)), PassCost({0: {1: 0.001, 2: 0.0015}}), 300))


def test_guesses_are_the_models_and_their_buckets_tell_how_likely(predictor: ModelDrafter) -> None:
    assert predictor.source is Source.MODEL
    half = len(predictor.prior) // 2
    for text in ([20, 21], [30, 40, 50], [7], [200, 100]):
        predictor.reset(text)
        for state in (predictor.state(), predictor.after(predictor.state(), 9)):
            candidates = predictor.candidates(state)
            likely = predictor.model.top_tokens(state, 3)
            shown = [(token, p) for token, p in zip(*likely, strict=True) if p >= 0.02]
            assert [candidate.token for candidate in candidates] == [token for token, _ in shown]
            for rank, (candidate, (_, p)) in enumerate(zip(candidates, shown, strict=True)):
                assert (candidate.bucket >= half) == (rank > 0)
                # The prior of a class is its middle, which is at most half the widest class off.
                assert predictor.prior[candidate.bucket % half] == pytest.approx(p, abs=0.051)


def test_priors_are_probabilities_that_rise_with_the_class(predictor: ModelDrafter) -> None:
    half = len(predictor.prior) // 2
    assert all(0 < share < 1 for share in predictor.prior)
    for part in (predictor.prior[:half], predictor.prior[half:]):
        assert list(part) == sorted(part)


def test_asking_costs_until_the_answer_is_known(predictor: ModelDrafter) -> None:
    predictor.reset([20, 21])
    state = predictor.after(predictor.state(), 5)
    assert predictor.seconds(state) == predictor.model.cost.seconds(3, 0)
    assert predictor.take_seconds_spent() == 0
    predictor.candidates(state)
    assert predictor.seconds(state) == 0
    assert predictor.take_seconds_spent() > 0
    predictor.append(5)
    assert predictor.seconds(predictor.state()) == 0


def test_a_cold_model_is_surer_of_its_first_guess(predictor: ModelDrafter) -> None:
    predictor.reset([30, 40, 50])
    warm = predictor.candidates(())
    predictor.temperature = 0.2
    cold = predictor.candidates(())
    assert cold[0].token == warm[0].token
    assert cold[0].bucket > warm[0].bucket
