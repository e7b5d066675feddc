"""Measures pass cost: the seconds of a forward pass by its width.

Short passes of every width take turns over a cache that is filled with arbitrary values. A disturbance makes a pass
slower, never faster, so a low quantile is taken of every width: on a machine whose cores other processes use too, the
ratios repeat better than those of medians or of single turns. Turns keep the widths together, so that a slow spell
affects all of them. The width changes with every pass, as it does in decoding, so the times include the cost of that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ...models.bundle import Bundle
from ..graph.bound_session import BoundSession
from ..graph.session import SessionConfig
from ..speculation.pass_cost import PassCost
from .measurement_store import MeasurementStore, model_key
from .measuring_time import MeasuringTime

PASS_COSTS: Final = MeasurementStore("pass-cost", 1, PassCost.from_json)
"""Measured pass costs of models on this machine."""

WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Widths that are measured; the cost of those between is interpolated."""
MEASURING_SPEED: Final = "measuring the speed of this model"
"""Stage of a measurement that an answer waits for."""
TYPICAL_CONTEXT: Final = 256
"""Filled cache slots at which passes are timed: the first answers mostly stay below twice that."""

_FEWER_WIDTHS: Final = ((1, 2, 3, 4, 6, 8, 16), (1, 2, 4, 8))
"""Widths for slow models, whose passes of all widths would not fit the time budget."""
_POSITION_COST: Final = 0.3
"""Upper estimate of what a further position costs, in passes of width 1; it only decides how many widths to measure."""
_MIN_TURNS: Final = 2
_MAX_TURNS: Final = 60
"""Enough for models whose passes take less than a millisecond, where one interruption costs ten of them."""
_QUANTILE: Final = 0.2
_FILLER: Final = 0.01


def load_or_measure_pass_cost(
    bundle: Bundle,
    config: SessionConfig,
    bound: BoundSession,
    measuring: MeasuringTime | None = None,
) -> PassCost:
    """Return the stored pass cost of a model on a device, or measure it over `bound`'s arena and store it.

    Args:
        bundle: the model.
        config: how its graph runs.
        bound: the session and the arena to measure over.
        measuring: counts the time of a measurement and receives its progress.

    Raises:
        ContextError: the pass cost must be measured and the arena is full.
        EdgeError: ONNX Runtime failed.
    """
    key = model_key(bundle, config)
    cost = PASS_COSTS.load(key)
    if cost is None:
        with (measuring or MeasuringTime()).stage(MEASURING_SPEED) as progress:
            cost = measure_pass_cost(bound, progress=progress)
        PASS_COSTS.save(key, cost)
    return cost


def measure_pass_cost(
    bound: BoundSession,
    *,
    seconds_budget: float = 2.0,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> PassCost:
    """Measure the seconds of a pass by width and context.

    The arena's committed slots are untouched and its length is restored; slots beyond it are overwritten, and the arena
    may have grown.

    Args:
        bound: the session and the arena to run over.
        seconds_budget: approximate seconds for each context; slow models take as long as a few passes need.
        widths: numbers of positions of the passes, 1 among them; those that do not fit the context are left out.
        contexts: numbers of filled slots to measure at, none below the arena's length; by default the arena's length,
            or a typical one if that is larger.
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
    measured = {}
    try:
        for number, context in enumerate(wanted):

            def report(fraction: float, number: int = number) -> None:
                progress((number + fraction) / len(wanted))

            arena.reserve(context - arena.length + 1)
            pad_cache(bound, context)
            measured[context] = _measure(bound, widths, seconds_budget, report)
    finally:
        arena.rewind_to(length)
    return PassCost(measured)


def pad_cache(bound: BoundSession, slots: int) -> None:
    """Fill the cache with arbitrary values up to `slots`.

    Slots that were never written lie in one page of zeros that the whole cache shares, and would be read too fast.
    """
    bound.arena.pad_to(slots, _FILLER)


def time_pass(bound: BoundSession, width: int) -> float:
    """Return the seconds of a pass as verification runs it: logits of all positions, with a tree mask if supported."""
    tokens = np.arange(width) % bound.graph_io.input_vocab
    mask = np.tri(width, dtype=np.bool_) if width > 1 and bound.graph_io.supports_trees else None
    started = time.perf_counter()
    bound.forward(tokens, tree_mask=mask)
    return time.perf_counter() - started


def _measure(
    bound: BoundSession, widths: Sequence[int], seconds_budget: float, progress: Callable[[float], None]
) -> dict[int, float]:
    """Return the seconds by width at the arena's length."""
    room = bound.arena.limit - bound.arena.length
    chosen = [width for width in sorted(widths) if width <= room]
    started = time.perf_counter()
    time_pass(bound, chosen[-1])  # the widest first, so that buffers are allocated once
    single = min(time_pass(bound, 1) for _ in range(3))
    for fewer in _FEWER_WIDTHS:
        if _expected_turn_seconds(chosen, single) * (_MIN_TURNS + 1) > seconds_budget:
            chosen = [width for width in chosen if width in fewer]
    turns: list[list[float]] = []
    while len(turns) < _MAX_TURNS:
        spent = time.perf_counter() - started
        if len(turns) >= _MIN_TURNS and spent + _expected_turn_seconds(chosen, single) > seconds_budget:
            break
        progress(max(len(turns) / _MAX_TURNS, min(spent / max(seconds_budget, 1e-9), 1.0)))
        # Back and forth, so that no width always follows the same one.
        order = chosen if len(turns) % 2 else chosen[::-1]
        times = {width: time_pass(bound, width) for width in order}
        turns.append([times[width] for width in chosen])
    progress(1.0)
    return dict(zip(chosen, np.quantile(turns, _QUANTILE, axis=0).tolist(), strict=True))


def _expected_turn_seconds(widths: Sequence[int], single: float) -> float:
    """Estimate the seconds that one pass of every width takes, from those of a pass of width 1."""
    return single * sum(1 + _POSITION_COST * (width - 1) for width in widths)
