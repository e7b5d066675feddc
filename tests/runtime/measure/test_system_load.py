"""How many processors other programs use, from recorded and synthetic times."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from edgerun.runtime.measure import system_load
from edgerun.runtime.measure.system_load import LoadMeter, ProcessorTimes, linux_busy_ticks, read_times

STAT = """cpu  96254 74459 24505 84097 1131 0 539 4544 0 0
cpu0 48209 34160 10862 46518 480 0 32 2348 0 0
cpu1 48044 40299 13643 37578 651 7 506 2195 12 3
cpu12 5 0 0 90 0 0 0 0 0 0
intr 1 2 3
ctxt 37
"""
"""The times of a shared virtual machine: user, nice, system, idle, iowait, irq, softirq, steal, guests."""


def replay(*times: tuple[float, float, float]) -> Callable[[], ProcessorTimes]:
    """A reader of these times: elapsed, busy, own."""
    remaining: Iterator[tuple[float, float, float]] = iter(times)
    return lambda: ProcessorTimes(*next(remaining))


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_load, "usable_physical_cores", lambda: 4)


def test_busy_ticks_of_the_processors_that_may_be_used() -> None:
    first = 48209 + 34160 + 10862 + 32 + 2348
    assert linux_busy_ticks(STAT, frozenset({0})) == first
    assert linux_busy_ticks(STAT, frozenset({0, 12})) == first + 5
    assert linux_busy_ticks(STAT, None) == first + 48044 + 40299 + 13643 + 7 + 506 + 2195 + 5


@pytest.mark.parametrize(
    ("threads", "busy_s", "own_s", "others", "is_busy"),
    [
        (4, 8.0, 7.9, 0.05, False),  # all cores compute for this process
        (4, 8.0, 5.0, 1.5, True),  # two programs take three eighths of them
        (2, 7.9, 4.0, 1.95, False),  # the cores that this process leaves unused are enough for the others
        (1, 8.0, 1.2, 3.4, True),
        (2, 8.0, 8.0, 2.0, False),  # other work of this process counts like that of another program
        (3, 8.0, 8.0, 1.0, False),
        (4, 7.0, 7.5, 0.0, False),  # ticks are coarse
    ],
)
def test_load_of_other_programs(threads: int, busy_s: float, own_s: float, others: float, is_busy: bool) -> None:
    times = ((10.0, 50.0, 3.0), (12.0, 50.0 + busy_s, 3.0 + own_s))
    assert LoadMeter(threads, replay(*times)).others() == pytest.approx(others)
    assert LoadMeter(threads, replay(*times)).is_busy is is_busy


def test_a_moment_is_too_short_to_tell() -> None:
    assert not LoadMeter(4, replay((0.0, 0.0, 0.0), (0.03, 0.09, 0.03))).is_busy
    assert LoadMeter(4, replay((0.0, 0.0, 0.0), (1.0, 4.0, 1.0))).is_busy


def test_systems_that_tell_nothing_are_not_busy() -> None:
    meter = LoadMeter(4, lambda: None)
    assert meter.others() is None
    assert not meter.is_busy
    meter.wait(0.0)


def test_this_system_tells_its_load() -> None:
    times = read_times()
    assert times is not None
    assert times.busy > 0
    others = LoadMeter().others()
    assert others is None or others >= 0
