"""Beam search finds the best of all answers, and what its definition says with few beams; one pass a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import edgerun
from edgerun import Engine, InputError
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.strategies.beams import BeamSearch
from support.enumeration import SixTokens, steps_of
from support.layout_reference import Decoder
from support.layouts import LAYOUTS, write_layout
from support.tiny_models import write_bundle


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_enough_beams_find_the_best_of_all_answers(six: SixTokens, six_engine: Engine, length_penalty: float) -> None:
    ranked = sorted(six.answers(3), key=lambda each: -each[1] / len(each[0]) ** length_penalty)
    search = BeamSearch(20, 64, 1, 0.0, length_penalty)
    steps_of(six_engine, search, most_tokens=3)
    assert [path.tokens for path in search.found[:19]] == [tokens for tokens, _ in ranked[1:20]]


def beams_by_definition(
    logprobs: Callable[[tuple[int, ...]], npt.NDArray[np.float64]], size: int, groups: int, penalty: float, length: int
) -> list[tuple[int, ...]]:
    """The beams of `length` tokens, the best first, in the plainest form: on log-probabilities of whole sequences."""
    beams: list[list[tuple[tuple[int, ...], float]]] = [[((), 0.0)] for _ in range(groups)]
    for _ in range(length):
        taken: Counter[int] = Counter()
        for group, running in enumerate(beams):
            found = [
                ((*path, token), total + logprob - penalty * taken[token])
                for path, total in running
                for token, logprob in enumerate(logprobs(path))
            ]
            beams[group] = sorted(found, key=lambda each: -each[1])[:size]
            taken.update(path[-1] for path, _ in beams[group])
    ranked = sorted((each for running in beams for each in running), key=lambda each: -each[1])
    return [tokens for tokens, _ in ranked]


@pytest.mark.parametrize(("groups", "penalty"), [(1, 0.0), (3, 0.0), (3, 0.7)])
def test_few_beams_are_those_of_the_definition(six: SixTokens, six_engine: Engine, groups: int, penalty: float) -> None:
    expected = beams_by_definition(six.logprobs, 2, groups, penalty, 4)
    search = BeamSearch(2 * groups, 2 * groups, groups, penalty, 1.0)
    (_, first) = steps_of(six_engine, search, eos=(), most_tokens=4)
    assert [first.tokens, *(path.tokens for path in search.found)] == expected
    assert (len(set(expected)) > 2) == bool(penalty) or groups == 1


@pytest.mark.parametrize("layout", ["optimum-bias-mask", "optimum-bool-mask"])
def test_beams_over_caches_that_graphs_return_longer(tmp_path: Path, layout: str) -> None:
    prompt = [7, 30, 12, 9]

    def logprobs(path: tuple[int, ...]) -> npt.NDArray[np.float64]:
        logits = Decoder.of(LAYOUTS[layout]).forward([*prompt, *path])[-1].astype(np.float64)
        return logits - np.log(np.exp(logits).sum())

    expected = beams_by_definition(cache(logprobs), 3, 1, 0.0, 8)
    with edgerun.load(write_layout(tmp_path, LAYOUTS[layout]), threads=1) as engine:
        search = BeamSearch(3, 3, 1, 0.0, 1.0)
        (_, first) = steps_of(engine, search, prompt, eos=(), most_tokens=8)
    assert [first.tokens, *(path.tokens for path in search.found)] == expected
    assert len({tokens[:4] for tokens in expected}) > 1


def test_a_token_takes_one_pass_over_the_beams_and_the_end_of_the_text_is_not_part_of_it(
    six_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[int] = []
    run = BoundSession.run

    def counted(self: BoundSession, new: object) -> object:
        widths.append(len(new.ids))
        return run(self, new)

    monkeypatch.setattr(BoundSession, "run", counted)
    search = BeamSearch(4, 4, 1, 0.0, 0.0)
    prefill, step = steps_of(six_engine, search, most_tokens=8)
    assert widths[0] == 4
    assert len(widths) - 1 == step.target_passes <= 7
    assert set(widths[1:]) <= {1, 2, 3, 4}
    assert max(widths) == 4
    assert prefill.target_passes == 1
    assert (step.tokens, step.finish) == ((), edgerun.FinishReason.STOP)


def test_the_context_ends_beams(tmp_path: Path) -> None:
    six = SixTokens(tmp_path, seed=4)
    with edgerun.load(six.bundle, threads=1, context=16) as engine:
        search = BeamSearch(3, 3, 1, 0.0, 1.0)
        (_, step) = steps_of(engine, search, eos=(), most_tokens=50)
        assert step.finish is edgerun.FinishReason.LENGTH
        # Three beams that have nothing in common but the prompt of four tokens leave room for four tokens each.
        assert 4 <= len(step.tokens) <= 12


def test_answers_come_with_log_probabilities_and_any_other_answer_beside_them_is_the_same(engine: Engine) -> None:
    options = {"num_beams": 4, "n": 3, "max_tokens": 10, "raw": True, "logprobs": 0}
    alone = engine.generate("the sea", **options)
    totals = [choice.stats.logprob_totals for choice in alone.choices]
    means = [each.total / each.tokens for each in totals]
    assert means == sorted(means, reverse=True)
    greedy = engine.generate("the sea", max_tokens=10, raw=True, logprobs=0)
    assert means[0] >= greedy.stats.logprob_totals.mean
    first = engine.stream("the sea", **options)
    second = engine.stream("on the other thing", max_tokens=20, raw=True)
    second.start()
    chunks = [next(first)]
    next(second)
    chunks += first
    again = edgerun.Reply.of(chunks)
    assert [each.text for each in again.choices] == [each.text for each in alone.choices]
    drafted = engine.generate("the sea", **options, speculation=edgerun.Speculation.OFF)
    assert [each.text for each in drafted.choices] == [each.text for each in alone.choices]


def test_beams_follow_a_grammar_and_fewer_answers_than_wanted_are_an_error(engine: Engine) -> None:
    formats = edgerun.ResponseFormat.choice(["the sea", "then", "on the other"])
    options = {"num_beams": 8, "raw": True, "response_format": formats, "length_penalty": 0.0}
    reply = engine.generate("the sea and ", **options, n=8)
    assert {each.text for each in reply.choices} == {"the sea", "then", "on the other"}
    with pytest.raises(InputError, match="answers are possible"):
        engine.generate("the sea and ", **options | {"num_beams": 64, "response_format": formats}, n=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 5, "num_beams": 4}, "n is 5 and num_beams is 4"),
        ({"num_beams": 4, "beam_groups": 3}, "beam_groups is 3"),
        ({"num_beams": 4, "temperature": 0.5}, "num_beams and temperature are both given"),
        ({"num_beams": 4, "exact": True}, "num_beams and exact are both given"),
        ({"num_beams": 4, "best_of": 8}, "num_beams and best_of are both given"),
        ({"num_beams": 65}, "num_beams is 65"),
    ],
)
def test_what_does_not_go_together_is_refused(engine: Engine, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate("the sea", **options)


def test_a_conversation_goes_on_after_beams_as_after_any_answer(engine: Engine) -> None:
    session = engine.session()
    first = session.send("the sea", num_beams=4, max_tokens=6)
    second = session.send("and the sand", max_tokens=6)
    messages = [
        {"role": "user", "content": "the sea"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and the sand"},
    ]
    assert second.text == engine.generate(messages, max_tokens=6).text


def test_a_cancelled_search_leaves_a_cache_that_the_next_answer_can_use(engine: Engine) -> None:
    sequence = engine.model.new_sequence()
    prompt = engine.tokenizer.encode("the sea and the sand", add_special_tokens=True)
    options = edgerun.GenerateOptions(num_beams=4, max_tokens=40, raw=True)
    stream = engine.answer(prompt, options, sequence)
    passes = 0
    run = type(sequence.bound).run

    def cancelling(self: BoundSession, new: object) -> object:
        nonlocal passes
        passes += 1
        if passes == 5:
            stream.cancel()
        return run(self, new)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundSession, "run", cancelling)
        reply = edgerun.Reply.of(stream)
    assert reply.finish_reason is edgerun.FinishReason.CANCELLED
    assert 5 <= passes <= 6
    assert sequence.arena.length <= len(prompt)
    after = edgerun.Reply.of(engine.answer(prompt, edgerun.GenerateOptions(max_tokens=6, raw=True), sequence))
    assert after.text == engine.generate("the sea and the sand", raw=True, max_tokens=6).text


def test_a_model_with_states_is_refused(tmp_path: Path) -> None:
    with (
        edgerun.load(write_bundle(tmp_path, "lfm2"), threads=1) as hybrid,
        pytest.raises(InputError, match="takes no tree mask"),
    ):
        hybrid.generate("the sea", num_beams=2, raw=True)
