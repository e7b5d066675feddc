"""A small model that was trained to fill in the middle fills gaps of programs that it has not seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("support.tiny_models", reason="needs the export extra")

import edgerun
from edgerun import Engine, FinishReason
from support.infill_grammar import Hole, held_out
from support.tiny_models import exported

CHECKPOINT = Path(__file__).resolve().parents[1] / "support" / "infill-model"


@pytest.fixture(scope="module")
def holes() -> list[Hole]:
    return held_out(120)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with edgerun.load(exported(CHECKPOINT, tmp_path_factory.mktemp("trained") / "model"), threads=1) as engine:
        yield engine


def filled(engine: Engine, holes: list[Hole], least: float = 0.0, *, suffix: bool = True) -> list[str]:
    """The whole suggestions for holes; empty where one is cut because it is not confident."""
    found = []
    for each in holes:
        reply = engine.complete(each.prefix, each.suffix if suffix else "", max_tokens=16, least_confidence=least)
        complete = reply.finish_reason is FinishReason.STOP and reply.text.endswith("\n")
        found.append(reply.text if complete else "")
    return found


def right(found: list[str], holes: list[Hole]) -> int:
    return sum(text == each.line for text, each in zip(found, holes, strict=True))


def test_most_gaps_are_filled_from_both_sides(trained: Engine, holes: list[Hole]) -> None:
    certain = [each for each in holes if each.is_certain]
    assert right(filled(trained, certain), certain) >= 0.9 * len(certain)
    assert right(filled(trained, certain, suffix=False), certain) < 0.6 * len(certain)


def test_confidence_tells_lines_that_follow_from_those_that_do_not(trained: Engine, holes: list[Hole]) -> None:
    everything = filled(trained, holes)
    sure = filled(trained, holes, 0.8)
    shown = sum(map(bool, sure))
    assert right(everything, holes) < 0.95 * len(holes)
    assert right(sure, holes) >= 0.95 * shown
    assert right(sure, holes) >= 0.9 * right(everything, holes)


def test_the_three_likeliest_beginnings_are_three_lines(trained: Engine, holes: list[Hole]) -> None:
    first = next(each for each in holes if each.is_certain)
    choices = [choice.text for choice in trained.complete(first.prefix, first.suffix, 3, max_tokens=16).choices]
    assert choices[0] == first.line
    assert len(set(choices)) == 3
