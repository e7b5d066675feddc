"""Passes over long contexts: the model's own graph, the one for long contexts, and what is chosen.

Both graphs of one model of a known shape, with random weights, take turns at passes over 1, 2, 4 and 8 tokens after
filled caches. The third column is what a loaded model does, once it has measured both. The time that a context adds is
compared with reading its keys and values once at the memory bandwidth, which is measured in the same run. Prints a
table of medians, then one JSON line.

Examples: python benchmarks/long_context.py; python benchmarks/long_context.py --contexts 2048 --turns 25
          python benchmarks/long_context.py --contexts 32768 65536 131064 --turns 3
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from artifacts import bundle, with_context
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.bound_graph import BoundGraph
from edgerun.runtime.graph.graph_choice import ChosenGraphs, FurtherGraph
from edgerun.runtime.graph.graph_io import BASE_GRAPH
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.long_context.long_graph import LongContextGraph
from edgerun.runtime.measure.pass_timing import pad_cache
from edgerun.runtime.measure.system_load import LoadMeter
from shapes import SHAPES

_WIDTHS: Final = (1, 2, 4, 8)
_FORMS: Final = ("own", "long", "chosen")
_PAUSE_S: Final = 3e-3
"""Pause before each pass, until the threads of the other graph have ceased to spin."""


@dataclass(frozen=True)
class AtContext:
    """What was measured at one context."""

    context: int
    milliseconds: Mapping[str, Mapping[int, float]]
    """Median time of a pass, by graph and width."""
    ratios: Mapping[str, Mapping[int, float]]
    """Median of the ratios to the time of the model's own graph, by graph and width."""
    chosen: Mapping[int, str]
    """Which graph a loaded model chose, by width."""
    resident: int
    """Bytes of memory of this process: a session of each graph, and the cache."""
    others: float
    """Processors that other programs used meanwhile."""


def memory_bandwidth(threads: int) -> float:
    """Bytes a second at which so many threads read memory together: the best of several runs."""
    parts = [np.ones(48 << 20, np.float32) for _ in range(threads)]
    best = 0.0
    for _ in range(6):
        readers = [threading.Thread(target=part.max) for part in parts]
        started = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - started))
    return best


def time_passes(bound: Mapping[str, BoundGraph], turns: int) -> dict[str, dict[int, list[float]]]:
    """Seconds of passes by graph and width; they are not committed, so all are at one context."""
    times: dict[str, dict[int, list[float]]] = {name: {width: [] for width in _WIDTHS} for name in _FORMS}
    for turn in range(-2, turns):  # the first passes of a width bind its buffers, and measure what to choose
        for width in _WIDTHS:
            trees = bound["own"].graph_io.supports_trees
            mask = np.tri(width, dtype=np.bool_) if width > 1 and trees else None
            for name in _FORMS if turn % 2 else _FORMS[::-1]:
                time.sleep(_PAUSE_S)
                started = time.perf_counter()
                bound[name].forward(range(20, 20 + width), tree_mask=mask)
                if turn >= 0:
                    times[name][width].append(time.perf_counter() - started)
    return times


def measure(graphs: ChosenGraphs, further: LongContextGraph, context: int, turns: int) -> AtContext:
    """Time passes at a context."""
    arena = graphs.arena(context + max(_WIDTHS))
    bound: dict[str, BoundGraph] = {"own": graphs.bind(arena), "chosen": graphs.bind(arena)}
    bound["own"].prefers_base = True
    long = graphs.bind_further(further, arena)
    if long is None:
        raise SystemExit(f"the model has no graph for long contexts: {further.obstacle}")
    bound["long"] = long
    pad_cache(bound["own"], context)
    meter = LoadMeter()
    times = time_passes(bound, turns)
    others = meter.others() or 0.0
    chosen = {}
    for width in _WIDTHS:
        bound["chosen"].forward(range(20, 20 + width))
        chosen[width] = "own" if bound["chosen"].last_graph == BASE_GRAPH else "long"
    milliseconds = {name: {width: 1e3 * median(times[name][width]) for width in _WIDTHS} for name in _FORMS}
    ratios = {
        name: {width: median(np.divide(times[name][width], times["own"][width]).tolist()) for width in _WIDTHS}
        for name in ("long", "chosen")
    }
    return AtContext(context, milliseconds, ratios, chosen, psutil.Process().memory_info().rss, others)


def slopes(found: Sequence[AtContext]) -> dict[str, dict[int, float]]:
    """Milliseconds that 1,024 tokens of context add to a pass, between the shortest and the longest context."""
    first, last = found[0], found[-1]
    steps = (last.context - first.context) / 1024
    return {
        name: {width: (last.milliseconds[name][width] - first.milliseconds[name][width]) / steps for width in _WIDTHS}
        for name in _FORMS
    }


def show(found: Sequence[AtContext], read_ms: float, bandwidth: float) -> None:
    """Print a table."""
    table = Table(title="ms of a pass: own graph / long contexts / chosen (long to own, chosen to own)")
    table.add_column("context", justify="right")
    for width in _WIDTHS:
        table.add_column(f"{width} token{'s' if width > 1 else ''}", justify="right")
    table.add_column("MiB", justify="right")
    table.add_column("other load", justify="right")
    for each in found:
        cells = [
            " / ".join(f"{each.milliseconds[name][width]:.1f}" for name in _FORMS)
            + f" ({each.ratios['long'][width]:.2f}, {each.ratios['chosen'][width]:.2f})"
            for width in _WIDTHS
        ]
        table.add_row(str(each.context), *cells, f"{each.resident / 2**20:.0f}", f"{each.others:.1f}")
    if len(found) > 1:
        added = slopes(found)
        cells = [" / ".join(f"{added[name][width]:.2f}" for name in _FORMS) for width in _WIDTHS]
        table.add_row("per 1,024", *cells, "", "")
    Console().print(table)
    print(f"memory: {bandwidth / 1e9:.1f} GB/s; reading 1,024 tokens of keys and values once takes {read_ms:.2f} ms")


def load_cost(graph: FurtherGraph) -> tuple[float, int]:
    """Seconds to make and load a graph, and the private memory that its session takes."""
    process = psutil.Process()

    def private_bytes() -> int:
        info = process.memory_full_info()
        # Pages of the weights that two sessions map count as private to neither; on Linux PSS counts them once.
        return int(getattr(info, "pss", info.uss))

    before, started = private_bytes(), time.perf_counter()
    session = graph.load()
    seconds = time.perf_counter() - started
    taken = private_bytes() - before
    del session
    return seconds, taken


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--turns", type=int, default=9, help="turns at each context")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    longest = max(arguments.contexts) + max(_WIDTHS)
    opened = open_bundle(bundle(arguments.work, with_context(SHAPES[arguments.shape], longest), 128))
    # Threads that spin after a pass would take the cores from the other graph's pass.
    config = SessionConfig(cpu_device(), arguments.threads, shares_cores=True)
    graphs = open_graph(opened, config, cache=True)
    further = graphs.further[-1] if isinstance(graphs, ChosenGraphs) else None
    if not isinstance(graphs, ChosenGraphs) or not isinstance(further, LongContextGraph):
        raise SystemExit("the model has no graph for long contexts")
    seconds, taken = load_cost(further)
    found = [measure(graphs, further, context, arguments.turns) for context in sorted(arguments.contexts)]
    threads = arguments.threads or psutil.cpu_count(logical=False) or 1
    bandwidth = memory_bandwidth(threads)
    slot_bytes = sum(each.slot_bytes for each in graphs.graph_io.tensor_types)
    read_ms = 1e3 * 1024 * slot_bytes / bandwidth
    show(found, read_ms, bandwidth)
    print(f"making and loading the graph took {seconds:.2f} s, its session {taken / 2**20:.0f} MiB of memory")
    result = {
        "shape": arguments.shape,
        "contexts": [asdict(each) for each in found],
        "milliseconds_per_1024": slopes(found) if len(found) > 1 else None,
        "bandwidth": bandwidth,
        "milliseconds_to_read_1024": read_ms,
        "load_s": seconds,
        "session_bytes": taken,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
