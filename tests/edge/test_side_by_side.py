"""Texts sampled in shared passes are those that each would have been alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgerun
from edgerun.runtime.measure.batched_sampling import SideBySide

tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")

ENDS = frozenset(range(40))


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path):
    with edgerun.load(tiny_bundle, cache=False, draft=None) as loaded:
        yield loaded


def written(engine, prompts: Sequence[list[int]], together: int) -> list[tuple[list[int], int | None]]:
    beside = SideBySide(engine, 30)
    assert beside.together == 8
    seeds = count(5)
    texts = [
        text
        for start in range(0, len(prompts), together)
        for text in beside.continued(prompts[start : start + together], 30, ENDS, seeds)
    ]
    return [(text.tokens, text.end) for text in texts]


@settings(max_examples=15)
@given(
    shared=st.lists(st.integers(0, 299), max_size=5),
    rests=st.lists(st.lists(st.integers(0, 299), max_size=29), min_size=1, max_size=8),
)
def test_alone_and_together(engine, shared: list[int], rests: list[list[int]]) -> None:
    prompts = [[*shared, *rest][:30] or [7] for rest in rests]
    texts = written(engine, prompts, 8)
    assert texts == written(engine, prompts, 1)
    for prompt, (text, end) in zip(prompts, texts, strict=True):
        assert text[: len(prompt)] == prompt
        assert (end is None) == (len(text) == 30)
        assert end is None or end in ENDS


def test_the_same_beginning_goes_on_differently(engine) -> None:
    texts = written(engine, [[50, 60]] * 8, 8)
    assert len({tuple(text) for text, _ in texts}) > 3


@pytest.mark.parametrize(
    ("family", "overrides", "together"),
    [("mistral", {}, 1), ("qwen2", {}, 8), ("llama", {"max_position_embeddings": 64}, 2)],
)
def test_how_many_there_is_room_for(tmp_path: Path, family: str, overrides, together: int) -> None:
    with edgerun.load(tiny.write_bundle(tmp_path, family, **overrides), cache=False, draft=None) as engine:
        assert SideBySide(engine, 30).together == together
        assert SideBySide(engine, 200).together == 1
