"""The graph for long contexts as a further graph: which passes it takes, as measured on this machine.

A choice holds for a range of contexts and of widths. It is made before the first such pass runs: both graphs run that
pass a few times over its own cache, which takes a few times as long as the pass itself. So a loaded model follows one
rule from the first pass to the last, whatever was drafted, and the ranges of contexts are the buckets of `PassCost`,
whose estimates see one graph in each.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Final

from ...models.bundle import Bundle
from ..graph.bound_graph import NewTokens
from ..graph.bound_session import BoundSession
from ..graph.graph_choice import FurtherGraph
from ..graph.session import GraphSession
from ..measure.measurement_store import MeasurementStore, model_key
from ..measure.system_load import GraphTimes
from ..speculation.pass_cost import BUCKET_ENDS

LEAST_CONTEXT: Final = 1024
"""Cached tokens from which on the graph may run a pass; below, attention takes a small part of it."""
WIDTHS: Final = (1, 2, 4, 8, 16, 64)
"""Upper ends of the ranges of widths that are measured together; wider passes are the model's own graph's."""
_LARGEST_BIAS: Final = 1 << 21
"""New tokens times cached ones of the largest pass: its bias has as many numbers for each query head of a group."""
_WORTH: Final = 0.97
"""Time relative to the model's own graph below which the graph is used."""
_PAUSE_S: Final = 0.08
"""Pause before each pass of this graph that is timed, until the threads of the model's own have ceased to spin, which
takes up to 60 ms: after 30 ms a pass still took 48 ms in place of 27. Its own threads stop at the end of a pass."""


LONG_CONTEXT_TIMES: Final = MeasurementStore("long-context", 2, GraphTimes)
"""Times of passes over long contexts (`_place`) in both graphs, by model, machine and number of threads."""


class LongContextGraph(FurtherGraph):
    """The graph for passes over long contexts.

    Args:
        bundle: the model.
        graph: the file from which its own graph was loaded, which extends its cache in place.
        own: that graph.
        cache: whether measurements are read from disk and kept there.

    Attributes:
        obstacle: why the model can have no such graph; None if it can, or if that is not known yet.
        times: what was measured.
    """

    name = "long context"
    shares_passes = True

    def __init__(self, bundle: Bundle, graph: Path, own: GraphSession, *, cache: bool) -> None:
        self.obstacle: str | None = None
        self._graph: Final = graph
        self._threads: Final = own.config.threads
        self._key: Final = model_key(bundle, own.config)
        self._stores: Final = cache
        stored = LONG_CONTEXT_TIMES.load(self._key) if cache else None
        self.times: Final = stored or GraphTimes()
        self._again: Final = self.times.doubtful
        """What is measured once more, although it was measured before."""

    def takes(self, new: NewTokens, base: int) -> bool | None:
        """Whether it runs a pass; None where that is still to be measured."""
        width = len(new.ids)
        if not LEAST_CONTEXT <= base <= _LARGEST_BIAS // width or width > WIDTHS[-1] or self.obstacle is not None:
            return False
        place = _place(width, base)
        found = None if place in self._again else self.times.seconds.get(place)
        return None if found is None else found[1] < _WORTH * found[0]

    def load(self, base: GraphSession) -> GraphSession | None:
        """Make the graph and load it; None if the model's attention cannot be expressed so.

        Raises:
            BundleError: it cannot be loaded.
        """
        # Importing protobuf takes 28 ms.
        from ...models.onnx_file.graph_editor import CannotRewriteError  # noqa: PLC0415 -- see above
        from .dense_attention import long_context_graph  # noqa: PLC0415 -- see above

        try:
            model = long_context_graph(self._graph)
        except CannotRewriteError as error:
            self.obstacle = str(error)
            return None
        return base.beside(self._graph, model)

    def measure(self, new: NewTokens, own: BoundSession, long: BoundSession, drop: Callable[[], None]) -> None:
        """Time a pass in both graphs, over the cache that it has to read; the faster one runs it from now on.

        What was measured while other programs used the processor is kept as doubtful: a few later processes measure it
        again.

        Args:
            new: the tokens of the pass.
            own: the model's own graph, bound to the arena.
            long: this graph, bound to the same arena.
            drop: gives back the memory of the weights that were read.

        Raises:
            ContextError: the tokens do not fit the context.
            EdgeError: ONNX Runtime failed.
        """
        arena = own.arena
        replayed = arena.replayed

        def own_pass() -> float:
            drop()
            return _time_pass(own, new)

        def long_pass() -> float:
            drop()
            time.sleep(_PAUSE_S)
            return _time_pass(long, new)

        place = _place(len(new.ids), arena.length)
        # The first passes of a width bind its buffers, which is nothing beside a pass that takes so long.
        self.times.measure(place, own_pass, long_pass, self._threads)
        # Where states are recomputed, tokens ran once more in each of these passes, and will in the pass itself.
        arena.replayed = replayed
        self._again.discard(place)
        if self._stores:
            LONG_CONTEXT_TIMES.save(self._key, self.times)


def _place(width: int, base: int) -> str:
    """The number of the range of contexts of a pass, and the upper end of its range of widths."""
    return f"{bisect_left(BUCKET_ENDS, base)}/{WIDTHS[bisect_left(WIDTHS, width)]}"


def _time_pass(bound: BoundSession, new: NewTokens) -> float:
    bound.run(new)  # maps the weights again
    started = time.perf_counter()
    bound.run(new)
    return time.perf_counter() - started
