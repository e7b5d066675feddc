"""Answers are grouped by text or by a regular expression, and groups have the probability of their answers."""

from __future__ import annotations

import math

import pytest

from edgerun import Engine, InputError
from edgerun.runtime.strategies.vote import by_vote

ANSWERS = {
    0: ("a long way: 7", math.log(0.20)),
    1: ("so it is 8", math.log(0.25)),
    2: ("first 8, and then 7", math.log(0.10)),
    3: ("so it is 8", math.log(0.25)),
    4: ("no number", math.log(0.05)),
}


def test_groups_have_the_sum_of_the_probabilities_of_different_texts() -> None:
    votes = by_vote(ANSWERS, r"\d")
    # 0.20 + 0.10 for 7; the text with 8 was sampled twice and counts once.
    assert list(votes) == [0, 1, 4, 2, 3]
    assert [round(math.exp(each), 6) for each in votes.values()] == [0.3, 0.25, 0.05, 0.3, 0.25]
    assert list(by_vote(ANSWERS, None)) == [1, 0, 2, 4, 3]
    assert list(by_vote({0: ("x a=1", -1.0), 1: ("y a=2", -2.0), 2: ("z a=2", -1.2)}, r"a=(\d)")) == [2, 0, 1]
    assert by_vote({}, None) == {}
    # Probabilities of long texts are below the smallest float.
    assert by_vote({0: ("a", -2000.0), 1: ("b", -2001.0)}, r"\w$|^")[1] == -2001.0


def test_an_engine_elects_what_the_samples_say(engine: Engine) -> None:
    options = {"raw": True, "temperature": 1.5, "seed": 11, "max_tokens": 3, "logprobs": 0}
    samples = engine.generate("the sea", **options, n=12).choices
    sampled = {i: (each.text, each.stats.logprob_totals.total) for i, each in enumerate(samples)}
    for expression in (None, "^."):
        votes = by_vote(sampled, expression)
        reply = engine.generate("the sea", **options, n=2, best_of=12, vote=True, vote_by=expression)
        assert [each.text for each in reply.choices] == [samples[number].text for number in list(votes)[:2]]
        report = reply.stats.best_of
        assert [each.seed for each in report.candidates if each.choice == 0] == [11 + next(iter(votes))]
        assert [each.vote_logprob for each in report.candidates] == pytest.approx(
            [votes[number] for number in range(12)], abs=1e-4
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vote": True}, "best_of is not above n"),
        ({"vote_by": "a", "n": 4, "best_of": 4}, "best_of is not above n"),
        ({"vote_by": "(", "best_of": 4}, "vote_by is"),
    ],
)
def test_what_cannot_be_a_vote_is_refused(engine: Engine, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate("the sea", **options)
