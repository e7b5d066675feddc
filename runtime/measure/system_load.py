"""Measuring beside other programs: what is compared takes turns, and the load of the others is measured.

The system counts the busy time of its processors, and the process its own; the difference belongs to other programs. On
Linux it agrees within a few hundredths with the time that the kernel says the threads of a measurement waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Final, TypeAlias, TypeVar

import psutil

from ...models.json_file import Count, Positive
from ..devices.processor import allowed_cpus, default_threads, usable_physical_cores

_FREE_CORES: Final = 0.25
"""Processors that other programs may use beyond those that a measurement leaves unused: an idle desktop does."""
_FREE_SHARE: Final = 0.1
"""The same as a share of the measurement's threads, whichever is more."""
_TICK_ERROR_S: Final = 0.02
"""Error of the times of one processor: most systems count them in ticks of 10 to 16 ms."""

_NOT_BUSY: Final = frozenset({"idle", "iowait", "guest", "guest_nice", "interrupt", "dpc"})
"""Times that are idle, or part of another one (on Windows interrupts and deferred calls are part of the system's)."""

_TURNS: Final = 3
"""Turns to measure at least; further ones follow while the time lasts."""
_MAX_TURNS: Final = 11
_SECONDS_BUDGET: Final = 0.5
_SLOW_TURN_S: Final = 1.0
"""Seconds after which no further turn begins: somebody may wait for a prompt whose passes are slow."""
_MAX_DISTURBED: Final = 3
"""Processes that measure a pass at most if other programs disturb every time: a busy machine may always be busy."""

_ResultT = TypeVar("_ResultT")


def take_turns(
    runs: Sequence[Callable[[], _ResultT]],
    threads: int = 0,
    *,
    least: int,
    most: int,
    seconds: float = inf,
    longest: float = inf,
    progress: Callable[[float], None] = lambda _: None,
) -> tuple[list[list[_ResultT]], bool]:
    """Measure several things in turns, back and forth, so that a slow spell of the machine affects all of them.

    Args:
        runs: each measures one of them once.
        threads: number of threads that they compute with; 0 for `default_threads`.
        least: number of turns to take.
        most: maximum number of turns.
        seconds: approximate seconds for all turns, if `least` turns take no longer.
        longest: seconds after which no further turn begins, even if fewer than `least` were taken.
        progress: receives the fraction done, 0 to 1, before every run; it may wait, and what it raises ends the turns.

    Returns:
        What each run returned in every turn, and whether other programs took processors meanwhile.
    """
    meter, started = LoadMeter(threads), perf_counter()
    results: list[list[_ResultT]] = [[] for _ in runs]
    for turn in range(most):
        spent = perf_counter() - started
        if turn and (spent > longest or (turn >= least and spent * (1 + 1 / turn) > seconds)):
            break
        for number in range(len(runs)):
            which = -1 - number if turn % 2 else number
            progress(min(max((turn + number / len(runs)) / most, spent / max(seconds, 1e-9)), 1.0))
            results[which].append(runs[which]())
    progress(1.0)
    return results, meter.is_busy


@dataclass
class GraphTimes:
    """Seconds of passes in both, by a name for what passes they are."""

    seconds: dict[str, tuple[Positive, ...]] = field(default_factory=dict)
    """Seconds in the first graph, the model's own, and in the other one."""
    disturbed: dict[str, Count] = field(default_factory=dict)
    """How often passes were measured, where other programs disturbed every measurement."""

    def __post_init__(self) -> None:
        if not self.disturbed.keys() <= self.seconds.keys() or any(len(each) != 2 for each in self.seconds.values()):
            raise ValueError("the times of a pass are missing")

    @property
    def doubtful(self) -> set[str]:
        """The passes that a later process should measure again, because other programs disturbed every measurement."""
        return {name for name, number in self.disturbed.items() if number < _MAX_DISTURBED}

    def measure(
        self,
        name: str,
        own: Callable[[], float],
        further: Callable[[], float],
        threads: int = 0,
        progress: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Time passes in both graphs, in turns: the fastest of each count.

        Args:
            name: what passes they are.
            own: runs one in the first graph, and returns its seconds.
            further: the same in the other graph.
            threads: number of threads of the sessions; 0 for the default.
            progress: receives the fraction done, 0 to 1, before every run; it may wait, and what it raises ends this.
        """
        times, busy = take_turns(
            [own, further],
            threads,
            least=_TURNS,
            most=_MAX_TURNS,
            seconds=_SECONDS_BUDGET,
            longest=_SLOW_TURN_S,
            progress=progress,
        )
        # Also while a machine is busy some turns run undisturbed, and a disturbance makes a pass slower, never faster.
        seconds = [min(each) for each in times]
        disturbed = self.disturbed.pop(name, 0)
        if busy:
            self.disturbed[name] = disturbed + 1
            if disturbed:
                seconds = [*map(min, seconds, self.seconds[name])]
        self.seconds[name] = tuple(seconds)


ProcessorTimes: TypeAlias = tuple[float, float, float]
"""Seconds since some moment: elapsed, had by all programs together on the processors that this process may use, and had
by this process."""


class LoadMeter:
    """Measures the load of other programs from its creation on.

    Args:
        threads: number of threads that this process computes with meanwhile; 0 for `default_threads`.
        read: reads the times; None where the system does not tell them.
    """

    def __init__(self, threads: int = 0, read: Callable[[], ProcessorTimes | None] | None = None) -> None:
        self._threads = threads or default_threads()
        self._read = read_times if read is None else read
        self._start = self._read()

    def others(self) -> float | None:
        """Mean number of processors that other programs used; None where the system does not tell it."""
        return self._others()[0]

    @property
    def is_busy(self) -> bool:
        """Whether other programs took processors that the threads need; False where the system does not tell."""
        others, elapsed = self._others()
        if others is None:
            return False
        cores = usable_physical_cores()
        unused = max(cores - self._threads, 0)
        return others > unused + max(_FREE_CORES, _FREE_SHARE * self._threads) + _TICK_ERROR_S * cores / elapsed

    def wait(self, seconds: float) -> None:
        """Wait until the meter has run for so many seconds: the shorter the time, the less is known about the load."""
        time.sleep(max(seconds - self._others()[1], 0.0))

    def _others(self) -> tuple[float | None, float]:
        """What `others` returns, and the seconds since this meter was made."""
        now = self._read()
        if self._start is None or now is None or now[0] <= self._start[0]:
            return None, 0.0
        elapsed, busy, own = (after - before for before, after in zip(self._start, now, strict=True))
        # What this process computes besides its own measurement disturbs it like another program.
        return max(busy - min(own, self._threads * elapsed), 0.0) / elapsed, elapsed


def read_times() -> ProcessorTimes | None:
    """Read the times of the system and of this process; None where the system does not tell them."""
    try:
        processors = [times._asdict() for times in psutil.cpu_times(percpu=True)]
    except (OSError, RuntimeError):  # a sandbox without these times
        return None
    return perf_counter(), busy_seconds(processors, allowed_cpus()), time.process_time()


def busy_seconds(processors: Sequence[Mapping[str, float]], allowed: frozenset[int] | None) -> float:
    """Sum the busy times of some processors, None for all.

    Args:
        processors: the times of each, by what it did, as `psutil.cpu_times` names it. Time that a hypervisor gave to
            other guests (`steal`) counts as busy; the time of own guests is part of the user time.
        allowed: numbers of the processors that count.
    """
    return sum(
        seconds
        for number, times in enumerate(processors)
        for name, seconds in times.items()
        if name not in _NOT_BUSY and (allowed is None or number in allowed)
    )
