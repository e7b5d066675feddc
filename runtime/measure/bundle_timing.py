"""How long passes of several models take: the same passes of each, in turn.

A machine that other programs use too, or that gets hot, changes speed by more than what is to be measured. So the
models take turns of a few passes, in the opposite order every other time, and of every kind of pass the faster third is
averaged: what disturbs a pass makes it slower, never faster. A turn begins with a pause, since the threads of the model
before still spin, and with passes that do not count, since the caches still hold that one's weights.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np

from ...models.bundle import GRAPH_NAME, Bundle, open_bundle
from ...models.cache import cache_folder
from ..devices.providers import choose_device
from ..graph.bound_session import BoundSession
from ..graph.metadata import metadata_of
from ..graph.prepacked import should_prepack
from ..graph.session import GraphSession, SessionConfig, write_prepacked

PASSES: Final = 5
"""Of a kind in a turn."""
FIRST_PASSES: Final = 2
"""Of a turn, which do not count."""
_SETTLE_S: Final = 0.02
_CONTEXT: Final = 256
"""Committed rows that every pass reads, as in the measurements of a model that is used."""
_FILLER: Final = 0.01
_FASTER: Final = 3
"""One pass in so many counts."""


class BundleStopwatch:
    """Times passes of bundles with onnxruntime on this machine's CPU; a `Stopwatch` for the exporter."""

    def __init__(self, threads: int = 0) -> None:
        """`threads`: 0 for one per physical core."""
        self._config = SessionConfig(choose_device("cpu"), threads)

    def __call__(self, bundles: Sequence[Path], rows: Sequence[int], rounds: int) -> list[Mapping[int, float]]:
        """Seconds of a pass by its rows, for each bundle; see `Stopwatch`.

        Raises:
            BundleError: one of them is damaged, or no model that edge-run can decode with.
            EdgeError: ONNX Runtime failed.
        """
        with packed_graphs(bundles) as graphs:
            bound = [ready(GraphSession(graph, self._config, metadata_of(bundle)), bundle) for bundle, graph in graphs]
            times = take_turns(bound, rows, rounds)
        return [{each: undisturbed(passes) for each, passes in of_one.items()} for of_one in times]


@contextmanager
def packed_graphs(bundles: Sequence[Path]) -> Iterator[list[tuple[Bundle, Path]]]:
    """Bundles, and for each the graph as it is loaded when it is used: where it is large, packed for this machine.

    The packed twins are not those of the cache, which would give up other models for them, and go with the block.

    Raises:
        BundleError: one of them is damaged.
    """
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="timing-", dir=cache_folder()) as folder:
        graphs = []
        for number, path in enumerate(bundles):
            bundle = open_bundle(path)
            graph = bundle.graph
            if should_prepack(bundle):
                graph = Path(folder) / str(number) / GRAPH_NAME
                graph.parent.mkdir()
                write_prepacked(bundle.graph, graph)
            graphs.append((bundle, graph))
        yield graphs


def ready(session: GraphSession, bundle: Bundle) -> BoundSession:
    """The session over a cache of as many rows as a usual conversation has."""
    bound = session.bind(session.arena(bundle.context or 2 * _CONTEXT))
    # Rows never written lie in one page of zeros that the whole cache shares, and would be read too fast.
    bound.arena.pad_to(min(_CONTEXT, bound.arena.limit // 2), _FILLER)
    return bound


def take_turns(bound: Sequence[BoundSession], rows: Sequence[int], rounds: int) -> list[dict[int, list[float]]]:
    """Seconds of `rounds` turns of each session: by rows, `PASSES` to a turn. `FIRST_PASSES` before them are left out.

    Raises:
        ContextError: a pass does not fit the context.
        EdgeError: ONNX Runtime failed.
    """
    times: list[dict[int, list[float]]] = [{each: [] for each in rows} for _ in bound]
    for number in range(rounds):
        order = range(len(bound)) if number % 2 == 0 else reversed(range(len(bound)))
        for which in order:
            time.sleep(_SETTLE_S)
            for _ in range(FIRST_PASSES):
                one_pass(bound[which], rows[0])
            for width in rows:
                times[which][width] += [one_pass(bound[which], width) for _ in range(PASSES)]
    return times


def one_pass(bound: BoundSession, rows: int) -> float:
    """Seconds of a pass as verification runs it: logits of all rows, and a tree mask where there are several."""
    tokens = np.arange(rows) % bound.graph_io.input_vocab
    mask = np.tri(rows, dtype=np.bool_) if rows > 1 and bound.graph_io.supports_trees else None
    started = time.perf_counter()
    bound.forward(tokens, tree_mask=mask)
    return time.perf_counter() - started


def faster(seconds: Sequence[float]) -> list[int]:
    """Which passes were not disturbed, as far as one can tell: a third of them, by index."""
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    return order[: -(-len(order) // _FASTER)]


def undisturbed(seconds: Sequence[float]) -> float:
    """Mean of the passes that were not disturbed."""
    return fmean(seconds[each] for each in faster(seconds))
