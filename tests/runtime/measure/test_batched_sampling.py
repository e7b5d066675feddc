"""Texts sampled in shared passes equal those sampled alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgerun
from edgerun.runtime.measure.text_sampler import BatchedSampler
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams

tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")

END_TOKENS = frozenset(range(40))


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path):
    with edgerun.load(tiny_bundle, cache=False, draft=None) as loaded:
        yield loaded


def sampled(engine, prompts: Sequence[list[int]], batch_size: int) -> list[tuple[list[int], int | None]]:
    sampler = BatchedSampler(engine.model, 30, sliding_windows=False)
    assert sampler.batch_size == 8
    seeds = count(5)
    texts = [
        text
        for start in range(0, len(prompts), batch_size)
        for text in sampler.sample(prompts[start : start + batch_size], 30, END_TOKENS, seeds)
    ]
    return [(text.tokens, text.end) for text in texts]


@settings(max_examples=15)
@given(
    prefix=st.lists(st.integers(0, 299), max_size=5),
    rests=st.lists(st.lists(st.integers(0, 299), max_size=29), min_size=1, max_size=8),
)
def test_texts_are_the_same_alone_and_in_a_batch(engine, prefix: list[int], rests: list[list[int]]) -> None:
    prompts = [[*prefix, *rest][:30] or [7] for rest in rests]
    texts = sampled(engine, prompts, 8)
    assert texts == sampled(engine, prompts, 1)
    for prompt, (text, end) in zip(prompts, texts, strict=True):
        assert text[: len(prompt)] == prompt
        assert (end is None) == (len(text) == 30)
        assert end is None or end in END_TOKENS


def test_the_same_prompt_is_continued_differently_by_each_seed(engine) -> None:
    texts = sampled(engine, [[50, 60]] * 8, 8)
    assert len({tuple(text) for text, _ in texts}) > 3


@pytest.mark.parametrize(
    ("windows", "overrides", "batch_size"),
    [(True, {}, 1), (False, {}, 8), (False, {"max_position_embeddings": 64}, 2)],
)
def test_the_batch_size_depends_on_windows_and_context(tmp_path: Path, windows, overrides, batch_size: int) -> None:
    with edgerun.load(tiny.write_bundle(tmp_path, **overrides), cache=False, draft=None) as engine:
        assert BatchedSampler(engine.model, 30, sliding_windows=windows).batch_size == batch_size
        assert BatchedSampler(engine.model, 200, sliding_windows=windows).batch_size == 1


def test_a_model_without_trees_continues_one_text_at_a_time(tmp_path: Path) -> None:
    prompts = [[50, 60, 70], [50, 60, 80], [7]]
    with edgerun.load(tiny.write_bundle(tmp_path, "qwen3_5_text"), cache=False, draft=None) as engine:
        sampler = BatchedSampler(engine.model, 30, sliding_windows=False)
        assert sampler.batch_size == 1
        for seed, prompt in enumerate(prompts):
            (text,) = sampler.sample([prompt], 30, END_TOKENS, iter([seed]))
            assert len(text.tokens) > len(prompt)
            bound = engine.model.new_sequence().bound
            again = Sampler(SamplingParams(temperature=1.0, seed=seed), bound.graph_io.vocab_size)
            found: list[int] = []
            for read, token in enumerate(text.tokens, 1):
                logits = bound.forward((token,))[0]
                bound.arena.commit(1)
                if len(prompt) <= read < 30:
                    found.append(again.choose(logits, read))
            expected = [*text.tokens[len(prompt) :], *([] if text.end is None else [text.end])]
            assert found == expected
