"""CNTP and AdaDec choose what their definitions say, and change nothing where the model is certain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun import Engine, InputError
from edgerun.runtime.sampling.sampler import SamplingParams, uniform_at
from edgerun.runtime.strategies.trials import TrialSearch
from support.enumeration import PROMPT, SixTokens, steps_of

LENGTH, COUNT, TEMPERATURE, SEED, MOST = 4, 3, 1.6, 7, 14
THRESHOLD = 0.25
MARK = 1
"""The token with which trials end."""
DIGITS = edgerun.ResponseFormat.regex("[0-9.]{50}")
"""Texts of which every character is a token."""
Next = Callable[[tuple[int, ...], int], int]


def entropy(logprobs: np.ndarray) -> float:
    return -float(np.exp(logprobs) @ logprobs)


def drawn(six: SixTokens, path: tuple[int, ...], number: int) -> int:
    """The token of a trial after a path."""
    weights = np.exp(six.logprobs(path) / TEMPERATURE)
    uniform = uniform_at(SEED, len(PROMPT) + len(path) | number << 64)
    return int(np.searchsorted(np.cumsum(weights / weights.sum()), uniform, side="right"))


def expected(six: SixTokens, *, sampled: bool) -> tuple[tuple[int, ...], int]:
    """The whole answer by the definition, and the number of uncertain places."""
    text: tuple[int, ...] = ()
    uncertain = 0
    while len(text) < MOST:
        if entropy(six.logprobs(text)) <= THRESHOLD:
            text += (drawn(six, text, 0) if sampled else int(six.logprobs(text).argmax()),)
            continue
        uncertain += 1
        trials = []
        for number in range(COUNT):
            trial: tuple[int, ...] = ()
            while len(trial) < LENGTH and trial[-1:] != (MARK,) and len(text + trial) < MOST:
                ranked = np.argsort(-six.logprobs(text + trial))
                rank = 0 if trial else number
                trial += (drawn(six, text + trial, number) if sampled else int(ranked[rank]),)
            logprobs = [six.logprobs(text + trial[:place])[token] for place, token in enumerate(trial)]
            trials.append((float(np.mean(logprobs)), trial))
        best = max(trials, key=lambda each: each[0])[1]
        text += best if sampled else best[:1]
    return text, uncertain


@pytest.mark.parametrize("sampled", [True, False])
def test_the_likeliest_trial_goes_on(six: SixTokens, six_engine: Engine, sampled: bool) -> None:
    search = TrialSearch(THRESHOLD, COUNT, LENGTH, lambda token: token == MARK, sampled)
    sampling = SamplingParams(temperature=TEMPERATURE, seed=SEED) if sampled else SamplingParams()
    steps = steps_of(six_engine, search, eos=(), most_tokens=MOST, sampling=sampling)
    text, uncertain = expected(six, sampled=sampled)
    assert tuple(token for step in steps for token in step.tokens) == text
    assert 2 <= uncertain < MOST


def test_a_certain_model_answers_as_without_trials(engine: Engine) -> None:
    sampled = {"raw": True, "temperature": 1.3, "seed": 4, "max_tokens": 12}
    assert (
        engine.generate("the sea", cntp=True, entropy=50.0, **sampled).text
        == engine.generate("the sea", **sampled).text
    )
    greedy = {"raw": True, "max_tokens": 12, "temperature": 0.0}
    reply = engine.generate("the sea", adadec=True, entropy=50.0, **greedy)
    assert reply.text == engine.generate("the sea", **greedy).text
    assert reply.stats.target_passes == 12


@pytest.mark.parametrize("name", ["cntp", "adadec"])
def test_trials_are_the_same_in_a_batch_with_a_grammar_and_streamed(engine: Engine, name: str) -> None:
    options = {name: True, "raw": True, "max_tokens": 12, "entropy": 0.5}
    if name == "cntp":
        options |= {"temperature": 1.2, "seed": 3}
        alone = [engine.generate("the sea", **options | {"seed": 3 + number}).text for number in range(3)]
        assert [each.text for each in engine.generate("the sea", n=3, **options).choices] == alone
    listed = engine.generate("the sea", logprobs=0, **options)
    assert len(listed.logprobs) == listed.stats.text_tokens
    chunks = list(engine.stream("the sea", **options))
    assert "".join(chunk.text for chunk in chunks) == listed.text
    grammar = edgerun.ResponseFormat.regex("(the|sea|and| ){9}")
    reply = engine.generate("the sea", **options | {"max_tokens": 60}, response_format=grammar)
    assert set(reply.text.replace("the", "").replace("sea", "").replace("and", "")) <= {" "}
    assert reply.finish_reason is edgerun.FinishReason.STOP


def test_a_stop_sequence_inside_a_trial_leaves_a_cache_to_go_on_from(engine: Engine) -> None:
    options = {"raw": True, "temperature": 1.2, "seed": 3, "cntp": True, "entropy": 0.5, "max_tokens": 30}
    whole = engine.generate("the sea", **options).text
    stop = whole[len(whole) // 2]
    assert engine.generate("the sea", stop=stop, **options).text == whole[: whole.index(stop)]
    plain = {"raw": True, "max_tokens": 5}
    with edgerun.load(engine.bundle.folder, threads=1) as fresh:
        after = whole[: whole.index(stop)]
        assert engine.generate("the sea" + after, **plain).text == fresh.generate("the sea" + after, **plain).text


def test_sampled_trials_need_a_temperature(engine: Engine) -> None:
    with pytest.raises(InputError, match="trials are sampled, and there is no temperature"):
        engine.generate("the sea", cntp=True, temperature=0.0)


def test_an_uncertain_model_tries_what_a_format_allows(engine: Engine) -> None:
    """Also where the format allows fewer tokens than there are trials."""
    options = {"raw": True, "adadec": True, "entropy": 0.0, "trials": 8}
    for text in (["the", "sea"], ["sand"]):
        assert engine.generate("the sea", response_format=edgerun.ResponseFormat.choice(text), **options).text in text


@pytest.mark.parametrize(
    "options",
    [
        {"cntp": True, "entropy": 0.0, "temperature": 1.0, "seed": 1, "response_format": DIGITS},
        {"extract": "the sand in the sea"},
    ],
)
def test_other_requests_may_copy_the_cache_between_two_pieces(tiny_bundle: Path, options: dict[str, Any]) -> None:
    """What continues the answer so far is answered as by a model that has not read it yet."""
    prompt, later, text = "the sea and the sand and the sea", {"raw": True, "max_tokens": 4, "logprobs": 0}, ""
    with edgerun.load(tiny_bundle, threads=1) as engine, edgerun.load(tiny_bundle, threads=1) as fresh:
        for chunk in engine.stream(prompt, raw=True, max_tokens=60, **options):
            text += chunk.text
            found, expected = (each.generate(f"{prompt}{text} sea", **later) for each in (engine, fresh))
            assert [each.logprob for each in found.logprobs] == pytest.approx(
                [each.logprob for each in expected.logprobs], abs=1e-4
            )
    assert text


def test_a_certain_model_has_the_surprise_that_mirostat_keeps(engine: Engine) -> None:
    options = {"raw": True, "temperature": 2.0, "seed": 1, "max_tokens": 12}
    options["strategies"] = [edgerun.strategy("mirostat", tau=1.0, eta=1.0)]
    plain = engine.generate("the sea", **options)
    assert engine.generate("the sea", cntp=True, entropy=50.0, **options).text == plain.text
