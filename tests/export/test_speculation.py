"""Plans ranked by what they are expected to do beside a draft."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.export import WeightFormat
from edgerun.export.allocation.costs import cost_of
from edgerun.export.allocation.format_candidates import chosen_linears, with_embedding
from edgerun.export.allocation.linear_times import LinearTimes, kind_of
from edgerun.export.allocation.speculation import (
    Candidate,
    DraftSpeed,
    SpeculativeCosts,
    expected_tokens,
    fastest,
    speculation,
)
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from support.tiny_models import write_checkpoint

TWO, FOUR, EIGHT = WeightFormat(2, 64), WeightFormat(4, 64), WeightFormat(8, 64)
MILLISECONDS: Mapping[WeightFormat, Mapping[int, float]] = {
    TWO: {1: 1.0, 4: 4.0},
    FOUR: {1: 1.5, 4: 3.0},
    EIGHT: {1: 2.5, 4: 2.8},
}
"""A row more costs least with 8 bits."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    return read_config(write_checkpoint(tmp_path_factory.mktemp("shape")))


@pytest.fixture(scope="module")
def times(config: DecoderConfig) -> LinearTimes:
    kinds = {kind_of(linear.name) for linear in chosen_linears(config)}
    linears = {(kind, form): each for kind in kinds for form, each in MILLISECONDS.items()}
    return LinearTimes(config, linears, {1: 0.5, 4: 0.5})


def uniform(config: DecoderConfig, form: WeightFormat) -> dict[str, WeightFormat]:
    return with_embedding(config, {linear.name: form for linear in chosen_linears(config)})


@given(st.floats(0, 1), st.integers(0, 8), st.integers(0, 99))
def test_expected_tokens_are_those_of_rounds_played(agreement: float, candidates: int, seed: int) -> None:
    drawn = random.Random(seed)
    rounds = 4000
    total = 0
    for _ in range(rounds):
        right = 0
        while right < candidates and drawn.random() < agreement:
            right += 1
        total += 1 + right
    assert expected_tokens(agreement, candidates) == pytest.approx(total / rounds, abs=0.05 * (1 + candidates))


@given(st.floats(0, 1), st.floats(0.01, 5), st.floats(0, 3))
def test_the_number_of_guesses_is_the_best_one(agreement: float, row: float, step: float) -> None:
    draft = DraftSpeed(agreement, step)
    best = speculation(lambda rows: 1 + row * (rows - 1), draft)
    for candidates in range(12):
        tokens = sum(agreement**depth for depth in range(candidates + 1))
        assert 1e3 * tokens / (1 + row * candidates + candidates * step) <= best.tokens_per_second * (1 + 1e-9)
    assert best.tokens_per_second >= 1e3 * (1 - 1e-9)


def test_a_draft_that_is_never_right_is_not_asked() -> None:
    assert speculation(lambda rows: 1.0, DraftSpeed(0.0, 0.0)).candidates == 0
    with pytest.raises(ValueError, match="no share"):
        speculation(lambda rows: 1.0, DraftSpeed(1.5, 0.1))


def test_the_best_width_depends_on_the_draft(config: DecoderConfig, times: LinearTimes) -> None:
    plans = {form: uniform(config, form) for form in MILLISECONDS}
    good, bad = DraftSpeed(0.9, 0.1), DraftSpeed(0.05, 1.0)
    assert fastest(times, [Candidate(plan, 0.1, bad) for plan in plans.values()], 0.1).plan == plans[TWO]  # type: ignore[union-attr]
    assert fastest(times, [Candidate(plan, 0.1, good) for plan in plans.values()], 0.1).plan == plans[EIGHT]  # type: ignore[union-attr]
    assert fastest(times, [Candidate(plans[TWO], 0.2, good), Candidate(plans[FOUR], 0.1, good)], 0.1) == Candidate(
        plans[FOUR], 0.1, good
    )
    assert fastest(times, [Candidate(plans[TWO], 0.2, good)], 0.1) is None


@pytest.mark.parametrize("candidates", [0, 1, 3, 5])
def test_costs_of_plans_are_what_a_token_takes(config: DecoderConfig, times: LinearTimes, candidates: int) -> None:
    draft = DraftSpeed(0.8, 0.3)
    plan = uniform(config, FOUR)
    plan["layers.1.down"] = EIGHT
    spent = times.milliseconds(plan, candidates + 1) + candidates * draft.milliseconds
    expected = spent / expected_tokens(draft.agreement, candidates)
    assert cost_of(plan, SpeculativeCosts(times, draft, candidates), config) == pytest.approx(expected)
