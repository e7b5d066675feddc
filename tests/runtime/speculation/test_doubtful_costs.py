"""Pass costs that a busy machine measured, in real sessions: learned from answers, measured again at the next load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import edgerun
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.pass_timing import PASS_COSTS
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.pass_cost import Doubt, PassCost

ABSURD = {1: 5.0, 2: 400.0, 4: 500.0, 8: 2000.0}
"""Seconds by width; those of the tiny model are below a millisecond, on a busy machine some milliseconds."""
POSSIBLE = 0.5
DRAFTERS = Speculation.parse("suffix,recycle")


@pytest.fixture
def set_busy(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Callable[[bool], None]:
    """Lets other programs use the processor, or none."""
    return lambda busy: monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: busy))


def store(bundle: Path, cost: PassCost) -> Callable[[], PassCost | None]:
    """Store a cost for one thread; returns what reads it again."""
    key = model_key(open_bundle(bundle), SessionConfig(choose_device("cpu"), 1))
    PASS_COSTS.save(key, cost)

    return lambda: PASS_COSTS.load(key)


def answer_until_observed(engine: edgerun.Engine, passes: int) -> PassCost:
    cost = engine.model.drafters.pass_cost()
    for number in range(40):
        engine.generate(f"the day {number} the day", raw=True, max_tokens=60, speculation=DRAFTERS)
        if cost.observed >= passes:
            return cost
    raise AssertionError(f"only {cost.observed} passes were observed")


def test_costs_of_a_busy_machine_follow_answers_and_are_measured_again(
    tiny_bundle: Path, set_busy: Callable[[bool], None]
) -> None:
    stored = store(tiny_bundle, PassCost({512: ABSURD}, Doubt.BUSY))
    set_busy(True)
    with edgerun.load(tiny_bundle, threads=1) as engine:
        learned = answer_until_observed(engine, 30)
        assert (learned.curve(0, 8) < POSSIBLE).all()
        assert learned.doubt is Doubt.BUSY
    assert stored().seconds(1, 0) > 1, "what a busy machine teaches is not kept"
    set_busy(False)
    with edgerun.load(tiny_bundle, threads=1) as engine:
        engine.generate("the", raw=True, max_tokens=4)
    assert stored().measurements == 2
    assert stored().doubt is not Doubt.BUSY
    assert (stored().curve(0, 8) < POSSIBLE).all()


def test_costs_that_answers_contradict_are_marked_and_measured_again(
    tiny_bundle: Path, set_busy: Callable[[bool], None]
) -> None:
    stored = store(tiny_bundle, PassCost({512: {1: 5.0, 2: 6.0, 8: 9.0}}))
    set_busy(True)
    with edgerun.load(tiny_bundle, threads=1) as engine:
        answer_until_observed(engine, 100)
    assert stored().doubt is None, "a busy machine contradicts nothing"
    set_busy(False)
    with edgerun.load(tiny_bundle, threads=1) as engine:
        assert answer_until_observed(engine, 100).doubt is Doubt.OUTDATED
        assert stored().doubt is Doubt.OUTDATED
    with edgerun.load(tiny_bundle, threads=1) as engine:
        engine.generate("the", raw=True, max_tokens=4)
    assert stored().measurements == 2
    assert (stored().curve(0, 8) < POSSIBLE).all()
