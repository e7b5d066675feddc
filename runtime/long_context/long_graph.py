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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ...models.bundle import Bundle
from ...models.json_file import Count, Positive
from ..graph.bound_graph import NewTokens
from ..graph.bound_session import BoundSession
from ..graph.graph_choice import FurtherGraph
from ..graph.session import GraphSession
from ..measure.measurement_store import MeasurementStore, model_key
from ..measure.system_load import take_turns
from ..speculation.pass_cost import BUCKET_ENDS

LEAST_CONTEXT: Final = 1024
"""Cached tokens from which on the graph may run a pass; below, attention takes a small part of it."""
WIDTHS: Final = (1, 2, 4, 8, 16, 64, 128)
"""Upper ends of the ranges of widths that are measured together; wider passes are the model's own graph's."""
_NARROW: Final = 16
_LARGEST_BIAS: Final = 1 << 20
"""New tokens times cached ones of the largest pass over more than 16: its bias has as many numbers for each query head
of a group."""
_WORTH: Final = 0.97
"""Time relative to the model's own graph below which the graph is used."""
_TURNS: Final = 3
"""Turns to measure at least; further ones follow while the time lasts."""
_MAX_TURNS: Final = 11
_SECONDS_BUDGET: Final = 0.5
_SLOW_TURN_S: Final = 1.0
"""Seconds after which no further turn begins: somebody waits for a prompt whose passes are slow."""
_MAX_DISTURBED: Final = 3
"""Processes that measure a pass at most if other programs disturb every time: a busy machine may always be busy."""
_PAUSE_S: Final = 0.08
"""Pause before each pass of this graph that is timed, until the threads of the model's own have ceased to spin, which
takes up to 60 ms: after 30 ms a pass still took 48 ms in place of 27. Its own threads stop at the end of a pass."""


@dataclass
class MeasuredPasses:
    """Seconds of passes of both graphs, by place: ranges of contexts and of widths; see `_place`."""

    seconds: dict[str, tuple[Positive, ...]] = field(default_factory=dict)
    """Seconds of the model's own graph, and of the graph for long contexts."""
    disturbed: dict[str, Count] = field(default_factory=dict)
    """How often a pass was measured, where other programs disturbed every measurement."""

    def __post_init__(self) -> None:
        if not self.disturbed.keys() <= self.seconds.keys() or any(len(each) != 2 for each in self.seconds.values()):
            raise ValueError("the times of a pass are missing")

    def add(self, place: str, seconds: tuple[float, float], *, busy: bool) -> None:
        """Add a measurement; `busy` where other programs used the processor meanwhile."""
        disturbed = self.disturbed.pop(place, 0)
        if busy:
            self.disturbed[place] = disturbed + 1
            if disturbed:
                # A disturbance makes a pass slower, never faster.
                seconds = min(seconds[0], self.seconds[place][0]), min(seconds[1], self.seconds[place][1])
        self.seconds[place] = seconds

    def is_faster(self, place: str) -> bool | None:
        """Whether the graph for long contexts is the faster one; None where that was not measured."""
        found = self.seconds.get(place)
        return None if found is None else found[1] < _WORTH * found[0]


LONG_CONTEXT_TIMES: Final = MeasurementStore("long-context", 2, MeasuredPasses)
"""Which graph runs passes over long contexts, by model, machine and number of threads."""


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
        self._own: Final = own
        self._key: Final = model_key(bundle, own.config)
        self._stores: Final = cache
        stored = LONG_CONTEXT_TIMES.load(self._key) if cache else None
        self.times: Final = stored or MeasuredPasses()
        self._again: Final = {place for place, number in self.times.disturbed.items() if number < _MAX_DISTURBED}
        """What is measured once more, although it was measured before."""

    def takes(self, new: NewTokens, base: int) -> bool | None:
        """Whether it runs a pass; None where that is still to be measured."""
        width = len(new.ids)
        if base < LEAST_CONTEXT or width > WIDTHS[-1] or self.obstacle is not None:
            return False
        if width > _NARROW and base * width > _LARGEST_BIAS:
            return False
        place = _place(width, base)
        return None if place in self._again else self.times.is_faster(place)

    def load(self) -> GraphSession | None:
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
        return self._own.beside(self._graph, model)

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

        # The first passes of a width bind its buffers, which is nothing beside a pass that takes so long.
        seconds, busy = take_turns(
            [own_pass, long_pass],
            self._own.config.threads,
            least=_TURNS,
            most=_MAX_TURNS,
            seconds=_SECONDS_BUDGET,
            longest=_SLOW_TURN_S,
        )
        # Where states are recomputed, tokens ran once more in each of these passes, and will in the pass itself.
        arena.replayed = replayed
        place = _place(len(new.ids), arena.length)
        self._again.discard(place)
        # Also while a machine is busy some turns run undisturbed.
        self.times.add(place, (min(seconds[0]), min(seconds[1])), busy=busy)
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
