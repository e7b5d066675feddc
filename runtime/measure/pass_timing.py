"""Measures pass cost: the seconds of a forward pass by its width.

Short passes of every width take turns over a cache that is filled with arbitrary values. A disturbance makes a pass
slower, never faster, so a low quantile is taken of every width: on a machine whose cores other processes use too, the
ratios repeat better than with medians or single turns. Turns keep the widths together, so that a slow spell
affects all of them. The width changes with every pass, as it does in decoding, so the times include the cost of that.

Where other programs take the cores all the time, wide passes come out far too expensive: on 2 cores with 1.5 of them in
use, a pass of width 4 took 18 ms beside 1.6 of width 1, in place of 3. Such a measurement is repeated, with a pause
before every pass, because a system gives a core to a thread that has slept. What stays disturbed is marked as doubtful
and measured again when the model is next loaded on an idle machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import numpy as np

from ...models.bundle import Bundle
from ...models.progress import Progress, silent
from ..graph.bound_graph import BoundGraph
from ..graph.session import SessionConfig
from ..speculation.pass_cost import POSITION_COST, Doubt, PassCost, is_plausible
from .measurement_store import MeasurementStore, model_key
from .system_load import LoadMeter, take_turns

PASS_COSTS: Final = MeasurementStore("pass-cost", 2, PassCost.from_json, PassCost.to_json)
"""Measured pass costs of models on this machine."""

WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Widths that are measured; the cost of those between is interpolated."""
MEASURING_SPEED: Final = "measuring the speed of this model"
"""Stage of a measurement that an answer waits for."""
SECONDS_BUDGET: Final = 2.0
"""Approximate seconds to measure at one context."""
TYPICAL_CONTEXT: Final = 256
"""Filled cache slots at which passes are timed: the first answers mostly stay below twice that."""

_FEWER_WIDTHS: Final = ((1, 2, 3, 4, 6, 8, 16), (1, 2, 4, 8))
"""Widths for slow models, whose passes of all widths would not fit the time budget."""
_FEWEST_WIDTHS: Final = ((1, 2, 4), (1, 2))
"""Widths for devices that would take longer than `_LONGEST_S` for those."""
_LONGEST_S: Final = 10.0
"""Seconds after which a measurement ends with the turns that it has: a pass on a slow device, such as an emulated GPU,
takes seconds, and longer when the device compiles for a width."""
_SLOW_PASS_S: Final = 0.5
"""Seconds of a pass of width 1 above which a device counts as slow."""
_MIN_TURNS: Final = 2
_MAX_TURNS: Final = 60
"""Enough for models whose passes take less than a millisecond, where one interruption costs ten of them."""
_QUANTILE: Final = 0.2
_ATTEMPTS: Final = 3
"""How often a context is measured at most, if other programs disturb it."""
_PAUSE_S: Final = 2e-3
"""Pause before the passes of further attempts; with 10 ms, fewer turns fit and the times are the same."""
_MAX_MEASUREMENTS: Final = 8
"""How often doubtful costs of a model are measured before they are left as they are: each takes seconds."""
_OBSERVED_LOAD_S: Final = 0.25
"""Seconds for which the load is observed before doubtful costs are measured again."""
_FILLER: Final = 0.01


class MeasuringTime:
    """Adds up the seconds of measurements that an answer waits for, and reports their progress.

    Args:
        progress: receives the stage and the fraction that is done.
    """

    def __init__(self, progress: Progress = silent) -> None:
        self._progress = progress
        self.seconds = 0.0
        """Seconds that measurements have taken so far."""

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[float], None]]:
        """Count the time of the block; yields a function that reports the fraction of it that is done, 0 to 1."""
        started = time.perf_counter()
        self._progress(name, 0.0)
        try:
            yield lambda fraction: self._progress(name, fraction)
            self._progress(name, 1.0)
        finally:
            self.seconds += time.perf_counter() - started


def load_or_measure_pass_cost(
    bundle: Bundle,
    config: SessionConfig,
    bound: BoundGraph,
    measuring: MeasuringTime | None = None,
    *,
    cache: bool = True,
    meter: LoadMeter | None = None,
    stage: str = MEASURING_SPEED,
    seconds_budget: float = SECONDS_BUDGET,
    widths: Sequence[int] = WIDTHS,
) -> PassCost:
    """Return the stored pass cost of a model on a device, or measure it over `bound`'s arena and store it.

    A doubtful cost is measured again if the machine is idle.

    Args:
        bundle: the model.
        config: how its graph is run.
        bound: the session and arena to run over.
        measuring: counts the time of a measurement and receives its progress.
        cache: whether a cost that is on disk is used, and a measured one kept there.
        meter: has measured the load of other programs for some time; None to measure it now if necessary.
        stage: what is shown during a measurement.
        seconds_budget, widths: as for `measure_pass_cost`.

    Raises:
        ContextError: the pass cost must be measured and the arena is full.
        EdgeError: ONNX Runtime failed.
    """
    key = model_key(bundle, config)
    stored = PASS_COSTS.load(key) if cache else None
    if stored is not None and stored.stairs != _stairs_of(bound, widths):
        stored = None  # of graphs of other widths
    if stored is not None:
        if stored.doubt is None or stored.measurements >= _MAX_MEASUREMENTS:
            return stored
        meter = meter or LoadMeter(config.threads)
        meter.wait(_OBSERVED_LOAD_S)
        if meter.is_busy:
            return stored
    with (measuring or MeasuringTime()).stage(stage) as progress:
        cost = measure_pass_cost(
            bound,
            seconds_budget=seconds_budget,
            widths=widths,
            threads=config.threads,
            progress=progress,
        )
    if stored is not None:
        cost = _measured_again(stored, cost)
    if cache:
        PASS_COSTS.save(key, cost)
    return cost


def _measured_again(stored: PassCost, cost: PassCost) -> PassCost:
    """Combine doubtful costs with those that were measured afterwards, at one context.

    Contexts that were measured before are left out: they inherit the new shape, and learn their level from passes.
    """
    measured = cost.measured
    if cost.doubt is Doubt.BUSY:
        # Both were disturbed, so the shorter time is nearer to the true one.
        before = stored.measured
        measured = {
            end: {width: min(seconds, before.get(end, {}).get(width, seconds)) for width, seconds in times.items()}
            for end, times in measured.items()
        }
    return PassCost(measured, cost.doubt, stored.measurements + 1, stairs=cost.stairs is not None)


def measure_pass_cost(
    bound: BoundGraph,
    *,
    seconds_budget: float = SECONDS_BUDGET,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] | None = None,
    threads: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> PassCost:
    """Measure the seconds of a pass by width and context.

    The arena's committed slots are untouched and its length is restored; slots beyond it are overwritten, and the arena
    may have grown.

    Args:
        bound: the session and the arena to run over.
        seconds_budget: approximate seconds for each context; slow models take as long as a few passes need. A
            measurement that other programs disturb is repeated, which takes as long again at most.
        widths: numbers of positions of the passes, 1 among them; those that do not fit the context are left out. Where
            shapes are fixed, the graph's own widths up to the largest of these are measured instead.
        contexts: numbers of filled slots to measure at, none below the arena's length; by default the arena's length,
            or a typical one if that is larger.
        threads: number of threads of the session; 0 for the default.
        progress: receives the fraction done, 0 to 1.

    Raises:
        ContextError: a context leaves no room for a pass.
        EdgeError: ONNX Runtime failed.
    """
    arena = bound.arena
    length = arena.length
    typical = max(length, min(TYPICAL_CONTEXT, arena.limit // 2))
    wanted = [typical] if contexts is None else sorted(contexts)
    if wanted[0] < length or 1 not in widths:
        raise ValueError(f"contexts {wanted} must not be below {length}, and widths {widths} must contain 1")
    stairs = _stairs_of(bound, widths)
    measured, busy = {}, False
    try:
        for number, context in enumerate(wanted):

            def report(fraction: float, number: int = number) -> None:
                progress((number + fraction) / len(wanted))

            arena.reserve(context - arena.length + 1)
            pad_cache(bound, context)
            measured[context], disturbed = _measure(bound, stairs or widths, seconds_budget, threads, report)
            busy |= disturbed
    finally:
        arena.rewind_to(length)
    return PassCost(measured, Doubt.BUSY if busy else None, stairs=stairs is not None)


def _stairs_of(bound: BoundGraph, widths: Sequence[int]) -> tuple[int, ...] | None:
    """The widths to measure where shapes are fixed: the graph's own up to the largest of `widths`; else None."""
    own = bound.graph_io.widths
    return None if own is None else tuple(width for width in own if width <= max(widths))


def pad_cache(bound: BoundGraph, slots: int) -> None:
    """Fill the cache with arbitrary values up to `slots`.

    Slots that were never written lie in one page of zeros that the whole cache shares, and would be read too fast.
    """
    bound.arena.pad_to(slots, _FILLER)


def time_pass(bound: BoundGraph, width: int) -> float:
    """Return the seconds of a pass as verification runs it: logits of all positions, with a tree mask if supported."""
    tokens = np.arange(width) % bound.graph_io.input_vocab
    mask = np.tri(width, dtype=np.bool_) if width > 1 and bound.graph_io.supports_trees else None
    started = time.perf_counter()
    bound.forward(tokens, tree_mask=mask)
    return time.perf_counter() - started


def _measure(
    bound: BoundGraph,
    widths: Sequence[int],
    seconds_budget: float,
    threads: int,
    progress: Callable[[float], None],
) -> tuple[dict[int, float], bool]:
    """Return the seconds by width at the arena's length, and whether other programs disturbed every attempt."""
    times: dict[int, float] = {}
    started, budget = time.perf_counter(), seconds_budget
    for attempt in range(_ATTEMPTS):

        def report(fraction: float, attempt: int = attempt) -> None:
            progress(0.9 + 0.1 * (attempt - 1 + fraction) / (_ATTEMPTS - 1) if attempt else 0.9 * fraction)

        if attempt == 1:
            budget = min(seconds_budget, time.perf_counter() - started) / (_ATTEMPTS - 1)
        found, busy = _attempt(bound, widths, budget, threads, _PAUSE_S if attempt else 0.0, report)
        # Not every system tells what other programs do.
        if not busy and is_plausible(found):
            progress(1.0)
            return found, False
        times |= {width: min(seconds, times.get(width, seconds)) for width, seconds in found.items()}
        if found[1] > _SLOW_PASS_S:
            break
    progress(1.0)
    return times, True


def _attempt(
    bound: BoundGraph,
    widths: Sequence[int],
    seconds_budget: float,
    threads: int,
    pause_s: float,
    progress: Callable[[float], None],
) -> tuple[dict[int, float], bool]:
    """Return the seconds by width of one attempt, and whether other programs disturbed it."""
    room = bound.arena.limit - bound.arena.length
    chosen = [width for width in sorted(widths) if width <= room]
    # Where shapes are fixed, all widths are measured, and the first pass of each loads its graph.
    is_fixed = bound.graph_io.widths is not None
    for width in chosen if is_fixed else ():
        time_pass(bound, width)
    first = [time_pass(bound, 1)]
    if first[0] > _SLOW_PASS_S:  # once more: the device may have compiled
        first.append(time_pass(bound, 1))
    if not is_fixed:
        chosen = _affordable(chosen, min(first), seconds_budget)
    first.append(time_pass(bound, chosen[-1]))  # the widest first, so that buffers are allocated once
    if min(first) <= _SLOW_PASS_S:
        first += [time_pass(bound, 1) for _ in range(3)]
        if not is_fixed:
            chosen = _affordable(chosen, min(first), seconds_budget)

    def paused_pass(width: int) -> float:
        if pause_s:
            time.sleep(pause_s)
        return time_pass(bound, width)

    turns, busy = take_turns(
        [partial(paused_pass, width) for width in chosen],
        threads,
        least=_MIN_TURNS,
        most=_MAX_TURNS,
        seconds=seconds_budget - sum(first),
        longest=_LONGEST_S - sum(first),
        progress=progress,
    )
    return dict(zip(chosen, np.quantile(turns, _QUANTILE, axis=1).tolist(), strict=True)), busy


def _affordable(widths: Sequence[int], single: float, seconds_budget: float) -> list[int]:
    """The widths to measure where a pass of width 1 takes `single` seconds."""
    chosen = list(widths)
    for tiers, limit in ((_FEWER_WIDTHS, seconds_budget), (_FEWEST_WIDTHS, _LONGEST_S)):
        for fewer in tiers:
            turn_s = single * sum(1 + POSITION_COST * (width - 1) for width in chosen)
            if turn_s * (_MIN_TURNS + 1) > limit:
                chosen = [width for width in chosen if width in fewer]
    return chosen
