"""Best-first search finds what enumerating all answers finds, with fewer passes than there are answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest

import edgerun
from edgerun import ContextError, Engine, InputError, ResponseFormat
from edgerun.runtime.strategies.best_first import BestFirst
from support.enumeration import EOS, SixTokens, steps_of

MOST = 5
"""Tokens of an answer, its end included."""
CHOICES = ["the sea", "then", "the other thing", "t", "on that"]


def total(six: SixTokens, tokens: Sequence[int]) -> float:
    return float(sum(six.logprobs(tuple(tokens[:place]))[token] for place, token in enumerate(tokens)))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_best_passages_of_a_document_are_found(six: SixTokens, six_engine: Engine, seed: int) -> None:
    document = np.random.default_rng(seed).integers(1, 6, 40).tolist()
    spans = {tuple(document[i : i + size]) for i in range(len(document)) for size in range(1, MOST)}
    ranked = sorted(((*span, EOS) for span in spans), key=lambda tokens: -total(six, tokens))
    starts: defaultdict[int, list[int]] = defaultdict(list)
    for place, token in enumerate(document, 1):
        starts[token].append(place)
    search = BestFirst(12, [*document, -1], starts, anywhere=True)
    (_, step) = steps_of(six_engine, search, most_tokens=MOST)
    assert [(*step.tokens, EOS), *(path.tokens for path in search.found)] == ranked[:12]
    assert step.target_passes < len(spans) / 2


def test_the_best_of_a_list_are_found(six: SixTokens, six_engine: Engine) -> None:
    texts = [(1, 2), (1, 2, 3), (5, 5), (4,), (1,), (5, 5, 1, 1), (2, 4, 4)]
    tokens: list[int] = []
    starts: defaultdict[int, list[int]] = defaultdict(list)
    for text in texts:
        starts[text[0]].append(len(tokens) + 1)
        tokens += [*text, -1]
    ranked = sorted(((*text, EOS) for text in texts), key=lambda each: -total(six, each))
    search = BestFirst(len(texts), tokens, starts, anywhere=False)
    (_, step) = steps_of(six_engine, search, most_tokens=9)
    assert [(*step.tokens, EOS), *(path.tokens for path in search.found)] == ranked


def test_choices_are_ranked_by_the_probability_of_the_whole_answer(engine: Engine) -> None:
    options = {"raw": True, "response_format": ResponseFormat.choice(CHOICES), "best_first": True, "logprobs": 1}
    found = engine.generate("the sea and ", n=len(CHOICES), **options).choices
    encoded = [[*engine.tokenizer.encode_plain(each), 0] for each in CHOICES]
    scores = engine.rank("the sea and ", encoded, edgerun.GenerateOptions(raw=True))
    assert [each.text for each in found] == [CHOICES[score.index] for score in scores]
    totals = [each.stats.logprob_totals.total for each in found]
    assert totals == pytest.approx([score.logprob for score in scores], abs=1e-3)
    assert all(len(token.top) == 1 for each in found for token in each.logprobs)
    with pytest.raises(InputError, match="5 answers are possible"):
        engine.generate("the sea and ", n=6, **options)


def test_the_answer_is_in_the_document_and_a_context_that_is_too_short_is_an_error(engine: Engine) -> None:
    document = "on the other thing, the sea and the sand. that was then"
    reply = engine.generate("the sea", raw=True, extract=document, n=5)
    assert all(each.text and each.text in document for each in reply.choices)
    assert len({each.text for each in reply.choices}) == 5
    with pytest.raises(ContextError, match="fills the context"):
        engine.generate("the sea " * 40, raw=True, extract=document * 9, n=128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_first": True}, "best_first searches a list of choices"),
        ({"best_first": True, "response_format": ResponseFormat.regex("a")}, "best_first searches a list"),
        ({"extract": "a", "response_format": ResponseFormat.regex("a")}, "best_first searches a list"),
        (
            {"best_first": True, "response_format": ResponseFormat.choice(CHOICES), "answer_start": "t"},
            "best_first and answer_start are both given",
        ),
        ({"extract": ""}, "document to extract from is empty"),
        ({"extract": "a", "temperature": 1.0}, "extract and temperature are both given"),
        ({"extract": "a", "repeat_penalty": 1.2}, "extract and repeat_penalty are both given"),
        ({"extract": "a", "ignore_eos": True}, "extract and ignore_eos are both given"),
        ({"extract": "a", "num_beams": 2}, "num_beams and extract are both given"),
    ],
)
def test_what_does_not_go_together_is_refused(engine: Engine, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.generate("the sea", **options)
