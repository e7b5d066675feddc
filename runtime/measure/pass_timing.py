"""Measures t(m): short passes of every width in turn, over a context of arbitrary rows.

What disturbs a pass makes it slower, never faster, so of every width a low quantile is taken: on a machine whose cores
other processes use too, the ratios repeat better than those of medians or of single turns. Turns keep the widths
together, so that a slow spell touches all of them, and the widths change with every pass, as they do when decoding, so
the cost of changing is in the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ..graph.bound_session import BoundSession
from ..speculation.pass_cost import PassCost

WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16)
"""Rows of the passes that are measured; those between are interpolated."""

_FEWER: Final = ((1, 2, 3, 4, 6, 8, 16), (1, 2, 4, 8))
"""For slow models, whose passes of all widths would not fit the budget."""
_ROW: Final = 0.3
"""What one more row costs at most, in passes of one row: a guess that only decides how many widths are measured."""
_FEWEST_TURNS: Final = 2
_ENOUGH_TURNS: Final = 60
"""Enough for models whose passes take less than a millisecond, where one interruption costs ten of them."""
_QUANTILE: Final = 0.2
_TYPICAL_CONTEXT: Final = 256
"""Where a shorter arena is measured: the first answers mostly stay below twice that."""
_FILLER: Final = 0.01


def calibrate(
    bound: BoundSession,
    *,
    seconds_budget: float = 2.0,
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> PassCost:
    """Measure t(m) on this session.

    The arena's committed rows are untouched and its length is restored; rows beyond are overwritten, and it may have
    grown.

    Args:
        bound: the session and the arena to run over.
        seconds_budget: about how long each context may take; slow models take as long as a few passes need.
        widths: rows of the passes, 1 among them; the ones that do not fit the context are left out.
        contexts: committed rows to measure at, none below the arena's; its own or a typical one when None.
        progress: told the fraction done.

    Raises:
        ContextError: a context leaves no room for a pass.
        EdgeError: ONNX Runtime failed.
    """
    arena = bound.arena
    length = arena.length
    typical = max(length, min(_TYPICAL_CONTEXT, arena.limit // 2))
    wanted = [typical] if contexts is None else sorted(contexts)
    if wanted[0] < length or 1 not in widths:
        raise ValueError(f"contexts {wanted} and widths {widths}: none may be below {length}, and 1 row is needed")
    measured = {}
    try:
        for number, context in enumerate(wanted):

            def partly(fraction: float, number: int = number) -> None:
                progress((number + fraction) / len(wanted))

            arena.reserve(context - arena.length + 1)
            # Rows never written lie in one page of zeros that the whole cache shares, and would be read too fast.
            arena.pad_to(context, _FILLER)
            measured[context] = _measure(bound, widths, seconds_budget, partly)
    finally:
        arena.rewind_to(length)
    return PassCost(measured)


def _measure(
    bound: BoundSession, widths: Sequence[int], seconds_budget: float, progress: Callable[[float], None]
) -> dict[int, float]:
    """Seconds by width at the arena's length."""
    room = bound.arena.limit - bound.arena.length
    chosen = [width for width in sorted(widths) if width <= room]
    started = time.perf_counter()
    _pass(bound, chosen[-1])  # the widest first: buffers are made once
    one = min(_pass(bound, 1) for _ in range(3))
    for fewer in _FEWER:
        if _turn(chosen, one) * (_FEWEST_TURNS + 1) > seconds_budget:
            chosen = [width for width in chosen if width in fewer]
    turns: list[list[float]] = []
    while len(turns) < _ENOUGH_TURNS:
        spent = time.perf_counter() - started
        if len(turns) >= _FEWEST_TURNS and spent + _turn(chosen, one) > seconds_budget:
            break
        progress(max(len(turns) / _ENOUGH_TURNS, min(spent / max(seconds_budget, 1e-9), 1.0)))
        # Back and forth, so that no width always follows the same one.
        order = chosen if len(turns) % 2 else chosen[::-1]
        times = {width: _pass(bound, width) for width in order}
        turns.append([times[width] for width in chosen])
    progress(1.0)
    return dict(zip(chosen, np.quantile(turns, _QUANTILE, axis=0).tolist(), strict=True))


def _turn(widths: Sequence[int], one: float) -> float:
    """Seconds that a pass of every width takes, at a guess."""
    return one * sum(1 + _ROW * (width - 1) for width in widths)


def _pass(bound: BoundSession, width: int) -> float:
    """Seconds of one pass as verification runs it: logits of all rows, and a tree mask where there is one."""
    tokens = np.arange(width) % bound.graph_io.vocab_size
    mask = np.tri(width, dtype=np.bool_) if width > 1 and bound.graph_io.supports_trees else None
    started = time.perf_counter()
    bound.forward(tokens, tree_mask=mask)
    return time.perf_counter() - started
