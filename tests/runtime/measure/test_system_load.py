"""How many processors other programs use, from recorded and synthetic times."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from edgerun.runtime.measure import system_load
from edgerun.runtime.measure.system_load import LoadMeter, ProcessorTimes, busy_seconds
from support.processes import read_times

LINUX = (
    {"user": 482.09, "nice": 341.6, "system": 108.62, "idle": 465.18, "iowait": 4.8, "irq": 0.0, "softirq": 0.32}
    | {"steal": 23.48, "guest": 100.0, "guest_nice": 50.0},
    {"user": 480.44, "nice": 402.99, "system": 136.43, "idle": 375.78, "iowait": 6.51, "irq": 0.07, "softirq": 5.06}
    | {"steal": 21.95, "guest": 0.12, "guest_nice": 0.03},
)
"""The times of a shared virtual machine with two processors."""
WINDOWS = ({"user": 10.0, "system": 5.0, "idle": 85.0, "interrupt": 1.0, "dpc": 0.5},)


def replay(*times: tuple[float, float, float]) -> Callable[[], ProcessorTimes]:
    """A reader of these times: elapsed, busy, own."""
    remaining: Iterator[tuple[float, float, float]] = iter(times)
    return lambda: next(remaining)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_load, "usable_physical_cores", lambda: 4)


def test_busy_times_of_the_processors_that_may_be_used() -> None:
    first = 482.09 + 341.6 + 108.62 + 0.32 + 23.48
    second = 480.44 + 402.99 + 136.43 + 0.07 + 5.06 + 21.95
    assert busy_seconds(LINUX, frozenset({0})) == pytest.approx(first)
    assert busy_seconds(LINUX, frozenset({1, 12})) == pytest.approx(second)
    assert busy_seconds(LINUX, None) == pytest.approx(first + second)
    assert busy_seconds(WINDOWS, None) == pytest.approx(15.0)


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


def test_moments_that_are_too_short_and_systems_that_tell_nothing_are_not_busy() -> None:
    assert not LoadMeter(4, replay((0.0, 0.0, 0.0), (0.03, 0.09, 0.03))).is_busy
    assert LoadMeter(4, replay((0.0, 0.0, 0.0), (1.0, 4.0, 1.0))).is_busy
    meter = LoadMeter(4, lambda: None)
    assert meter.others() is None
    assert not meter.is_busy
    meter.wait(0.0)


def test_this_system_tells_its_load() -> None:
    times = read_times()
    assert times is not None
    assert times[1] > 0
    others = LoadMeter(read=read_times).others()
    assert others is None or others >= 0
