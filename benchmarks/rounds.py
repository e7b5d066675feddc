"""Fair comparison of running workers: in turn, in both orders, one at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeVar

import psutil

from processes import Worker

_Item = TypeVar("_Item")
_SETTLE_S: Final = 0.05
"""Pause before a measurement: onnxruntime's threads spin for some time after their last task."""


class IdleLoad:
    """Measures the fraction of a core that waiting workers use while others are measured."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._elapsed_s = 0.0

    @property
    def idle_core_share(self) -> float:
        """Processor time of all waiting workers divided by measured time."""
        return self._busy_s / self._elapsed_s if self._elapsed_s else 0.0

    def watch(self, waiting: Sequence[Worker], work: Callable[[], float]) -> float:
        """Run `work` and return its result."""
        processes = [psutil.Process(worker.pid) for worker in waiting]
        before = _processor_seconds(processes)
        started = time.perf_counter()
        result = work()
        self._elapsed_s += time.perf_counter() - started
        self._busy_s += _processor_seconds(processes) - before
        return result


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


Series = dict[str, list[float]]
"""Seconds by worker label, one value per round."""


def restarted(items: Sequence[_Item], restarts: int, start: Callable[[_Item], Worker]) -> Iterator[list[Worker]]:
    """Yield running workers of all items, started anew each time, and each time another one first.

    Memory placement changes the speed of a process by several per cent.
    """
    for restart in range(restarts):
        turn = restart % len(items)
        with ExitStack() as stack:
            yield [stack.enter_context(start(each)) for each in [*items[turn:], *items[:turn]]]


def alternate(
    workers: Sequence[Worker], rounds: int, measure: Callable[[Worker], float], idle_load: IdleLoad
) -> Series:
    """Measure every worker once per round, in the opposite order every other round."""
    series: Series = {worker.label: [] for worker in workers}
    for number in range(rounds):
        for worker in workers if number % 2 == 0 else reversed(workers):
            waiting = [other for other in workers if other is not worker]
            time.sleep(_SETTLE_S)
            series[worker.label].append(idle_load.watch(waiting, partial(measure, worker)))
    return series


def join(parts: Sequence[Series]) -> Series:
    """Concatenate series."""
    return {label: [value for part in parts for value in part[label]] for label in parts[0]}


def median_ratio(series: Series, label: str, base: str) -> float:
    """Median over the rounds of the ratio of `label`'s time to `base`'s."""
    return statistics.median(one / other for one, other in zip(series[label], series[base], strict=True))


def spread(series: Series, label: str, base: str) -> tuple[float, float]:
    """Lower and upper quartile of the ratios of which `median_ratio` is the median."""
    ratios = sorted(one / other for one, other in zip(series[label], series[base], strict=True))
    if len(ratios) == 1:
        return ratios[0], ratios[0]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return lower, upper
