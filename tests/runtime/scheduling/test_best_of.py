"""The best of several answers by mean log-probability, and which of them are stopped early."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun import Engine, FinishReason, InputError, Reply
from edgerun.runtime.result import BestOf
from edgerun.runtime.sampling.logprobs import NO_LOGPROBS
from edgerun.runtime.scheduling.several_answers import EarlyStop

PROMPT = "the other thing"
SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 7}


def ranked_alone(engine: Engine, count: int, **options: Any) -> list[Reply]:
    """The answers of single requests with successive seeds, the one with the largest mean log-probability first."""
    seed = options.pop("seed")
    replies = [engine.generate(PROMPT, seed=seed + index, logprobs=0, **options) for index in range(count)]
    return sorted(replies, key=lambda reply: -(reply.stats.mean_logprob or 0))


def choice_of(reply: Reply) -> BestOf:
    assert reply.stats.best_of is not None
    return reply.stats.best_of


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_eos": True}, {"stop": "e"}, {"logprobs": 2}, {"exact": True}, {"temperature": 0.5, "top_k": 4}],
    ids=str,
)
def test_the_best_answers_are_those_of_single_requests(engine: Engine, options: dict[str, Any]) -> None:
    options = SAMPLED | options
    expected = ranked_alone(engine, 8, **{key: value for key, value in options.items() if key != "logprobs"})
    reply = engine.generate(PROMPT, n=3, best_of=8, **options)
    assert [choice.text for choice in reply.choices] == [each.text for each in expected[:3]]
    means = [choice.stats.mean_logprob for choice in reply.choices]
    # Passes of another width differ in the last bits, and drafts depend on what was seen before.
    assert means == pytest.approx([each.stats.mean_logprob for each in expected[:3]], abs=1e-4)
    found = choice_of(reply)
    assert [each.seed for each in found.candidates] == list(range(7, 15))
    shown = sorted(
        ((each.choice, each.mean_logprob) for each in found.candidates if each.choice is not None), key=lambda it: it[0]
    )
    assert shown == list(enumerate(means))
    assert all(choice.stats.best_of is None for choice in reply.alternatives)
    assert all(bool(choice.logprobs) == ("logprobs" in options) for choice in reply.choices)


def test_the_mean_is_that_of_the_tokens_that_were_generated(engine: Engine) -> None:
    reply = engine.generate(PROMPT, best_of=3, logprobs=0, ignore_eos=True, **SAMPLED)
    listed = [token.logprob for token in reply.logprobs]
    assert len(listed) == reply.stats.completion_tokens == 24
    assert reply.stats.mean_logprob == pytest.approx(sum(listed) / 24)


def test_the_end_of_an_answer_counts(engine: Engine) -> None:
    options = SAMPLED | {"logit_bias": dict.fromkeys(engine.tokenizer.eos, 5.0)}
    replies = ranked_alone(engine, 8, **options)
    ended = [reply for reply in replies if reply.finish_reason is FinishReason.STOP]
    assert len(ended) > 1
    assert [choice.text for choice in engine.generate(PROMPT, best_of=8, n=2, **options).choices] == [
        reply.text for reply in replies[:2]
    ]
    for reply in ended:
        assert reply.stats.logprob_totals.tokens == reply.stats.completion_tokens == len(reply.logprobs) + 1
        assert reply.stats.logprob_totals.total < sum(token.logprob for token in reply.logprobs)


def test_answers_that_cannot_win_are_stopped(engine: Engine) -> None:
    options = SAMPLED | {"max_tokens": 60, "ignore_eos": True}
    found = choice_of(engine.generate(PROMPT, best_of=16, **options))
    assert found.stopped
    assert found.most_tokens == 60
    spent = sum(each.tokens for each in found.candidates)
    assert found.saved_tokens == 16 * 60 - spent
    assert found.discarded_tokens == spent - 60
    best = max(each.mean_logprob for each in found.candidates if each.finish_reason is not None)
    for each in found.candidates:
        if each.finish_reason is None:
            # What it had after its last pass but one could still win, or it would have been stopped then.
            assert each.mean_logprob * each.tokens < best * 60
    bolder = choice_of(engine.generate(PROMPT, best_of=16, early_stop=0.8, **options))
    assert sum(each.tokens for each in bolder.candidates) < spent


def test_without_a_limit_only_statistics_stop_an_answer() -> None:
    exact, bold = EarlyStop(1, 1.0, None), EarlyStop(1, 0.9, None)
    finished = NO_LOGPROBS.plus([-0.1, -0.3] * 20)
    losing = NO_LOGPROBS.plus([-3.0] * 30)
    for rule in (exact, bold):
        assert not rule.stops(losing)
        rule.add_finished(finished)
    assert not exact.stops(losing)
    assert bold.stops(losing)
    assert not bold.stops(NO_LOGPROBS.plus([-3.0] * 15)), "too few tokens"
    assert not bold.stops(NO_LOGPROBS.plus([-0.1] * 30)), "it is better than the best"


def test_a_certain_answer_is_not_made_up_for() -> None:
    rule = EarlyStop(1, 0.9, 100)
    rule.add_finished(NO_LOGPROBS.plus([0.0] * 20))
    assert rule.stops(NO_LOGPROBS.plus([0.0] * 20 + [-math.inf]))
    assert not rule.stops(NO_LOGPROBS.plus([0.0] * 20))


@pytest.mark.parametrize("confidence", [0.6, 0.9])
def test_a_stopped_answer_would_seldom_have_won(confidence: float) -> None:
    """Tokens as good as those of the answer to beat: the case that the bound is made for."""
    rng = np.random.default_rng(4)
    length = 120
    stopped = lost = 0
    for _ in range(400):
        finished, tokens = -rng.exponential(0.7, length), -rng.exponential(0.7, length)
        rule = EarlyStop(1, confidence, length)
        # The answer to beat has the mean of the distribution.
        rule.add_finished(NO_LOGPROBS.plus((finished * 0.7 / -finished.mean()).tolist()))
        seen = NO_LOGPROBS
        for count, token in enumerate(tokens.tolist(), 1):
            seen = seen.plus([token])
            if count < length and rule.stops(seen):
                stopped += 1
                lost += tokens.mean() > -0.7
                break
    assert stopped > 40
    assert lost <= (1 - confidence) * 400


def test_a_cancelled_choice_returns_the_best_so_far(engine: Engine) -> None:
    """First the best of those that have ended, then what there is of others."""
    options = SAMPLED | {"ignore_eos": True}
    generate, ended = engine.model.generate, 0

    def counted(*arguments: Any) -> Any:
        nonlocal ended
        yield from generate(*arguments)
        ended += 1
        if ended == 2:
            stream.cancel()

    engine.model.generate = counted  # type: ignore[method-assign]
    stream = engine.stream(PROMPT, n=3, best_of=8, **options)
    reply = Reply.of(stream)
    engine.model.generate = generate  # type: ignore[method-assign]
    whole = [each for each in choice_of(reply).candidates if each.finish_reason is FinishReason.LENGTH]
    assert 2 <= len(whole) < 8
    best = sorted(whole, key=lambda each: -each.mean_logprob)[:3]
    expected = [engine.generate(PROMPT, **options | {"seed": each.seed}).text for each in best]
    assert [choice.text for choice in reply.choices][: len(best)] == expected
    assert {choice.finish_reason for choice in reply.choices} == {FinishReason.CANCELLED}
    assert engine.activity().active == 0


def test_the_prompt_is_counted_as_read_once(tiny_bundle: Path) -> None:
    with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
        reply = engine.generate(PROMPT, best_of=6, **SAMPLED)
        assert reply.stats.reused_tokens == 0
        assert engine.generate(PROMPT, best_of=6, **SAMPLED).text == reply.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 0}, "best_of is 0; it must be between 1 \\(n\\) and 128"),
        ({"best_of": 129}, "best_of is 129; it must be between 1 \\(n\\) and 128"),
        ({"best_of": 2, "n": 3}, "best_of is 2; it must be between 3 \\(n\\) and 128"),
        ({"early_stop": 0.4}, "early_stop is 0.4; it must be between 0.5 and 1"),
        ({"early_stop": math.nan}, "early_stop is nan; it must be"),
    ],
)
def test_impossible_choices_are_refused(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate(PROMPT, **options)
