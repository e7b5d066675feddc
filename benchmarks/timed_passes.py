"""Replays that charge passes their measured durations in place of running them.

The weights of a replay are random and the tokens of its answers are given, so all that a pass contributes is its
duration. `PassDurations` holds durations of both graphs by width and context, which are measured on the machine with
the model, in turn, and kept in a file. While passes are charged, none runs: a clock, which everything in the process
reads in place of the time, moves on by the duration of the pass. All else runs and takes the time that it takes:
binding, drafting, pruning, verification, compaction of the cache, learning.

The clock counts processor time of the thread, so other programs do not add to it by taking the processor. Between two
real passes the caches of the processor hold weights alone, and the host's time is several times longer than in a loop
(docs/decisions/0064-host-time.md). So every charged pass first reads a buffer that replaces what the caches hold, and
then writes the logits, which are the only thing that a real pass leaves there; neither is counted.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from rich.table import Table

import edgerun
from edgerun.runtime.graph.bound_graph import BoundGraph, NewTokens
from edgerun.runtime.graph.bound_session import BoundSession
from edgerun.runtime.graph.graph_choice import ChosenGraphs, ChosenSession
from edgerun.runtime.graph.graph_io import BASE_GRAPH
from edgerun.runtime.long_context.long_graph import LEAST_CONTEXT, LongContextGraph, _place
from edgerun.runtime.measure.pass_timing import pad_cache

_CONTEXTS: Final = (64, 256, 512, 1024, 2048, 4096)
"""Cached tokens at which passes are timed; the last is limited to what the context has room for."""
_WIDTHS: Final = (2, 3, 4, 5, 6, 8, 12, 16)
_SINGLES: Final = 2
"""Passes over one token that follow others in every turn, as in plain decoding."""
EVICTED_BYTES: Final = 4 << 20
"""Size of the buffer that is read after every charged pass: several times the second-level cache. One as large as the
third-level cache takes as long as a fifth of a pass, and changes the host's time little."""
_SETTLE_S: Final = 0.15
"""Pause before the passes of a graph: threads of the one before spin for 60 ms, and slow the passes of the other."""
_LEAST_RESIDUAL, _LARGEST_RESIDUAL = 5, 95
"""Percentiles between which the residuals of durations lie that are charged: others are disturbances."""


@dataclass
class PassDurations:
    """Seconds of passes, as they were measured.

    Attributes:
        samples: by graph, context and kind of pass: its width, or `1 again` for a pass over one token after another.
    """

    samples: dict[str, dict[int, dict[str, list[float]]]] = field(default_factory=dict)

    def add(self, graph: str, context: int, kind: str, seconds: float) -> None:
        """Add the duration of one pass."""
        self.samples.setdefault(graph, {}).setdefault(context, {}).setdefault(kind, []).append(seconds)

    @property
    def turns(self) -> int:
        """Number of times that every pass was measured."""
        return min(
            (len(row[str(_WIDTHS[0])]) for contexts in self.samples.values() for row in contexts.values()), default=0
        )

    def table(self, graph: str) -> Mapping[int, Mapping[str, float]]:
        """Median seconds by context and kind of pass."""
        return {
            context: {kind: statistics.median(each) for kind, each in row.items()}
            for context, row in sorted(self.samples[graph].items())
        }

    def residuals(self) -> list[float]:
        """Durations relative to the median of their kind, without the shortest and longest; their mean is 1."""
        ratios = [
            seconds / statistics.median(each)
            for contexts in self.samples.values()
            for row in contexts.values()
            for each in row.values()
            for seconds in each
        ]
        low, high = np.percentile(ratios, (_LEAST_RESIDUAL, _LARGEST_RESIDUAL))
        inner = [ratio for ratio in ratios if low <= ratio <= high]
        mean = statistics.fmean(inner)
        return [ratio / mean for ratio in inner]

    @classmethod
    def read(cls, path: Path) -> PassDurations:
        """Read what `write` wrote; nothing where there is no such file."""
        if not path.is_file():
            return cls()
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            {
                graph: {int(context): row for context, row in contexts.items()}
                for graph, contexts in data["seconds"].items()
            }
        )

    def write(self, path: Path) -> None:
        """Keep the durations in a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"seconds": self.samples}), encoding="utf-8")
        part.replace(path)


class _Curve:
    """Durations of one graph, linear between the widths and contexts that were measured."""

    def __init__(self, table: Mapping[int, Mapping[str, float]]) -> None:
        self._contexts = sorted(table)
        self._rows = [table[context] for context in self._contexts]

    def seconds(self, width: int, context: int, *, again: bool) -> float:
        """Seconds of a pass over `width` tokens; `again` if the one before was as wide."""
        last = len(self._contexts) - 1
        after = min(max(bisect_right(self._contexts, context), 1), last) if last else 0
        before = max(after - 1, 0)
        low, high = (self._at(index, width, again=again) for index in (before, after))
        if before == after:
            return low
        first, second = self._contexts[before], self._contexts[after]
        share = max((context - first) / (second - first), 0.0)
        return low + share * (high - low)

    def _at(self, index: int, width: int, *, again: bool) -> float:
        row = self._rows[index]
        if width == 1 and again:
            return row["1 again"]
        found = row.get(str(width))
        if found is not None:
            return found
        if width > _WIDTHS[-1]:  # a pass that reads a prompt, which no figure contains
            return row[str(_WIDTHS[-1])] * width / _WIDTHS[-1]
        above = next(each for each in _WIDTHS if each > width)
        below = max(each for each in (1, *_WIDTHS) if each < width)
        share = (width - below) / (above - below)
        return (1 - share) * row[str(below)] + share * row[str(above)]


def measure_durations(
    engine: edgerun.Engine, durations: PassDurations, seconds: float, progress: Callable[[str], None]
) -> None:
    """Measure whole turns of passes for about so many seconds, at least one, and add them to the durations.

    A turn has passes of all widths at all contexts in both graphs. The width changes from pass to pass, as it does when
    drafts are verified, and each is compared with passes over one token beside it.
    """
    margin = 2 * len(_WIDTHS) + _WIDTHS[-1] + _SINGLES + 2
    places = {
        context: _bound_graphs(engine, context)
        for context in {min(each, engine.context - margin) for each in _CONTEXTS}
    }
    taken: list[float] = []
    with _timed_sessions(taken):
        for graphs in places.values():
            for graph in graphs.values():
                for width in (*_WIDTHS, 1):
                    _run(graph, width)
        started = time.perf_counter()
        turn = 0
        while not turn or (turn + 1) / turn * (time.perf_counter() - started) < seconds:
            progress(f"durations of passes, turn {durations.turns + 1}")
            for context, graphs in places.items():
                for name in list(graphs) if turn % 2 else list(graphs)[::-1]:
                    graphs[name].arena.rewind_to(context)
                    _measure_turn(graphs[name], name, context, durations, taken, backwards=turn % 2 == 1)
            turn += 1


def _bound_graphs(engine: edgerun.Engine, context: int) -> dict[str, BoundGraph]:
    """The graphs that run passes at a context, over a cache of their own that is filled up to it.

    The cache has as many slots as a prompt of that length gives it: some graphs read all of them.
    """
    bound = engine.model.new_sequence().bound
    bound.arena.expect(context)
    pad_cache(bound, context)
    bound.prefers_base = True
    graphs = {BASE_GRAPH: bound}
    if isinstance(bound, ChosenSession) and context >= LEAST_CONTEXT:
        further = bound.further(LongContextGraph.name)
        if further is not None:
            graphs[LongContextGraph.name] = further
    return graphs


def _measure_turn(
    bound: BoundGraph, graph: str, context: int, durations: PassDurations, taken: list[float], *, backwards: bool
) -> None:
    """Run passes of all widths at one context. Each commits one slot, as lengths change in decoding."""

    def run(width: int, kind: str | None) -> None:
        _run(bound, width)
        bound.arena.commit(1)
        if kind is not None:
            durations.add(graph, context, kind, taken[-1])

    time.sleep(_SETTLE_S)
    run(1, None)
    for _ in range(_SINGLES):
        run(1, "1 again")
    for width in reversed(_WIDTHS) if backwards else _WIDTHS:
        run(width, str(width))
        run(1, "1")


def _run(bound: BoundGraph, width: int) -> None:
    mask = np.tri(width, dtype=np.bool_) if width > 1 and bound.graph_io.supports_trees else None
    bound.forward(list(range(width)), tree_mask=mask)


def durations_table(durations: PassDurations, shape: str) -> Table:
    """Table of the median durations."""
    table = Table(title=f"{shape}: milliseconds of a pass, median of {durations.turns} turns", title_justify="left")
    kinds = ("1 again", "1", *map(str, _WIDTHS))
    for name in ("graph", "context", *kinds):
        table.add_column(name, justify="right")
    for graph in durations.samples:
        for context, row in durations.table(graph).items():
            table.add_row(graph, str(context), *(f"{1e3 * row[kind]:.2f}" for kind in kinds))
    return table


@contextmanager
def _timed_sessions(taken: list[float]) -> Iterator[None]:
    """Append the seconds of every run of a session to a list during the block, without the time of binding."""
    original = BoundSession._run_session

    def run(bound: BoundSession) -> None:
        started = time.perf_counter()
        original(bound)
        taken.append(time.perf_counter() - started)

    BoundSession._run_session = run  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        BoundSession._run_session = original  # type: ignore[method-assign]


class ChargedPasses:
    """While `charging` an engine, its passes are charged their durations, and `time.perf_counter` counts them.

    Args:
        durations: durations of passes.
        engine: the engine.
        evicted_bytes: size of the buffer that is read after every pass; 0 to leave the processor's caches alone.
    """

    def __init__(self, durations: PassDurations, engine: edgerun.Engine, evicted_bytes: int = EVICTED_BYTES) -> None:
        self._engine: Final = engine
        self._curves: Final = {graph: _Curve(durations.table(graph)) for graph in durations.samples}
        self._residuals: Final = durations.residuals()
        self._random: Final = random.Random(0)
        shape = _WIDTHS[-1], engine.graph_io.vocab_size
        self._logits: Final = np.random.default_rng(0).standard_normal(shape, np.float32)
        self._evicted: Final = np.ones(max(evicted_bytes // 8, 1), np.int64)
        self._graphs: Final[dict[int, str]] = {}
        """Name of the graph by the identity of its session."""
        self._widths: Final[dict[int, int]] = {}
        """Width of the last pass by the identity of its binding."""
        self._charged = 0.0
        self._uncounted = 0.0

    def now(self) -> float:
        """Seconds of the thread's processor time outside passes, and of the passes."""
        return time.thread_time() - self._uncounted + self._charged

    @contextmanager
    def charging(self) -> Iterator[None]:
        """Charge passes and count them during the block."""
        run, measure, clock = BoundSession._run_session, LongContextGraph.measure, time.perf_counter

        thread = threading.get_ident()

        def charge(bound: BoundSession) -> None:
            if threading.get_ident() == thread:
                self._charge(bound)
            else:
                run(bound)

        def choose(graph: LongContextGraph, new: NewTokens, own: BoundSession, long: BoundSession) -> None:
            """Decide by the durations at once: a machine measures each range only once."""
            del long
            at = len(new.ids), own.arena.length
            both = (self._curves[name].seconds(*at, again=False) for name in (BASE_GRAPH, LongContextGraph.name))
            graph.times.seconds[_place(*at)] = next(both), next(both)

        BoundSession._run_session = charge  # type: ignore[method-assign, assignment]
        LongContextGraph.measure = choose  # type: ignore[method-assign, assignment]
        time.perf_counter = self.now
        try:
            yield
        finally:
            BoundSession._run_session = run  # type: ignore[method-assign]
            LongContextGraph.measure = measure  # type: ignore[method-assign]
            time.perf_counter = clock

    def _charge(self, bound: BoundSession) -> None:
        started = time.thread_time()
        width, context = bound._inputs.width, bound.arena.length
        again = self._widths.get(id(bound)) == width
        self._widths[id(bound)] = width
        seconds = self._curves[self._graph_of(bound)].seconds(width, context, again=again)
        self._charged += seconds * self._random.choice(self._residuals)
        logits = bound._logits
        rows = min(logits.count, len(self._logits))
        if width <= _WIDTHS[-1]:
            self._evicted.sum()
        logits._bound_logits[:rows] = self._logits[:rows]
        self._uncounted += time.thread_time() - started

    def _graph_of(self, bound: BoundSession) -> str:
        """Name of the graph that a binding runs; other graphs than the two read prompts only."""
        session = bound._session
        name = self._graphs.get(id(session))
        if name is None:
            graph = self._engine.model._open_graph()
            loaded = graph.loaded.get(LongContextGraph.name) if isinstance(graph, ChosenGraphs) else None
            is_long = loaded is not None and loaded._session is session
            name = self._graphs[id(session)] = LongContextGraph.name if is_long else BASE_GRAPH
        return name
