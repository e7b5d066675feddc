"""Probes a foreign graph for properties that its inputs do not declare.

Declared shapes and the files beside a graph often say nothing, or something wrong, about three properties: whether its
cache may be extended in place, whether it computes the logits of all tokens, and whether several new tokens may follow
cached ones. So `probe` runs a short token sequence in one pass, in two passes, and token by token, which must all give
the same logits. A graph that does so under no assumption is rejected, because it would run and produce nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, TypeAlias

import numpy as np

from ...errors import BundleError, EdgeError
from .bound_session import BoundSession
from .graph_io import CacheMode, Floats, GraphIO, LogitsMode

_NUM_TOKENS: Final = 6
_CONTEXT: Final = 64
_TOKEN_STRIDE: Final = 7919
"""Difference between consecutive token ids of the probe, which spreads them over the vocabulary."""
_TOLERANCE: Final = 0.1
"""Largest difference between logits of the same token, in standard deviations of its logits. Rounding gives up to
0.02 if activations are rounded to 8 bits; a wrong cache gives more than 1."""
_SHARED_SCALE_TOLERANCE: Final = 0.75
"""The tolerance if one scale is chosen for all tokens of a pass (DynamicQuantizeLinear), so that they affect each
other."""

BindGraph: TypeAlias = Callable[[GraphIO, int], BoundSession]
"""Binds the graph under an assumed `GraphIO`, with a cache for a context of the given number of tokens."""


@dataclass(frozen=True)
class ProbeResult:
    """What running a graph showed."""

    cache_mode: CacheMode
    logits_mode: LogitsMode
    supports_wide_passes: bool


def probe(graph_io: GraphIO, bind: BindGraph, where: str, *, may_be_in_place: bool, shared_scales: bool) -> ProbeResult:
    """Run a graph to find out its cache mode, its logits mode, and whether it supports wide passes.

    Args:
        graph_io: inputs and outputs as introspection found them.
        bind: binds the graph under an assumption.
        where: names the file in errors.
        may_be_in_place: whether to try a cache that is extended in place.
        shared_scales: whether the tokens of a pass are quantized with one scale and so affect each other.

    Raises:
        BundleError: under no assumption does the graph give the same logits in one pass and in several.
    """
    tolerance = _SHARED_SCALE_TOLERANCE if shared_scales else _TOLERANCE
    # Graphs with states cannot be upgraded.
    upgrade = "" if graph_io.states else "upgrade it with edge-run export, or "
    hint = f"{upgrade}choose another variant of the model"
    failures: list[EdgeError] = []
    runs = False
    for assumed in _assumptions(graph_io, may_be_in_place):
        try:
            limit = min(_CONTEXT, assumed.capacity or _CONTEXT)
            supports_wide_passes = _supports_wide_passes(bind(assumed, limit), tolerance)
        except EdgeError as error:
            failures.append(error)
            continue
        runs = True
        if supports_wide_passes is not None:
            return ProbeResult(assumed.cache_mode, assumed.logits_mode, supports_wide_passes)
    if failures and not runs:
        raise BundleError(f"{where}: {failures[-1].what}", hint) from failures[-1]
    raise BundleError(
        f"{where} gives other logits for the same tokens in several passes than in one: "
        "its cache does not work as its inputs declare",
        hint,
    )


def _assumptions(graph_io: GraphIO, may_be_in_place: bool) -> Iterator[GraphIO]:
    """What the graph may be, most capable first."""
    try_both = may_be_in_place and graph_io.capacity is None
    cache_modes = [CacheMode.IN_PLACE, CacheMode.GROWING] if try_both else [graph_io.cache_mode]
    own = graph_io.logits_mode
    logits_modes = [own, LogitsMode.LAST] if own is LogitsMode.ALL else [own]
    for cache_mode, logits_mode in product(cache_modes, logits_modes):
        yield replace(graph_io, cache_mode=cache_mode, logits_mode=logits_mode)


def _supports_wide_passes(bound: BoundSession, tolerance: float) -> bool | None:
    """Whether several new tokens may follow cached ones; None if even single ones give other logits than one pass.

    Raises:
        EdgeError: the graph did not run.
    """
    arena, half = bound.arena, _NUM_TOKENS // 2
    vocab_size = bound.graph_io.vocab_size
    token_ids = (np.arange(_NUM_TOKENS) * _TOKEN_STRIDE + 1) % vocab_size
    one_pass = _last_logits(bound, token_ids)
    bound.forward(token_ids[:half], logits_for=(half - 1,))
    arena.commit(half)
    two_passes = _last_logits(bound, token_ids[half:])
    leak = 0.0
    if bound.graph_io.logits_mode is not LogitsMode.LAST:
        # Logits of a token must not depend on the tokens after it.
        original = bound.forward(token_ids[half:], logits_for=(0,))[0].copy()
        changed = token_ids[half:].copy()
        changed[1:] = (changed[1:] + 1) % vocab_size
        leak = _difference(bound.forward(changed, logits_for=(0,))[0], original)
    for token in token_ids[half:]:
        stepwise = _last_logits(bound, (token,))
        arena.commit(1)
    # Comparisons with NaN are false.
    if not _difference(stepwise, one_pass) <= tolerance:
        return None
    return _difference(two_passes, stepwise) <= tolerance and leak <= tolerance


def _last_logits(bound: BoundSession, token_ids: np.typing.ArrayLike) -> Floats:
    """Logits of the last token of a pass, `[V]`."""
    logits: Floats = bound.forward(token_ids, logits_for=(np.size(token_ids) - 1,))[0].copy()
    return logits


def _difference(first: Floats, second: Floats) -> float:
    """The largest difference in standard deviations of `second`; NaN if either holds NaN."""
    with np.errstate(all="ignore"):  # damaged weights can give any value
        spread = float(second.std(dtype=np.float64))
        return float(np.abs(first - second).max()) / spread if spread else float("nan")
