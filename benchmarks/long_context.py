"""Long contexts: what passes cost there, and what drafts of the target over few of its cache slots gain.

Without `--text`, both graphs of one model of a known shape, with random weights, take turns at passes over 1 to 8
tokens after filled caches; the third column is what a loaded model does, once it has measured both. The time that a
context adds is compared with reading its keys and values once at the memory bandwidth, which is measured in the same
run. Draft passes over few slots take turns with them, and from the medians follows the speed over plain decoding by the
share of draft tokens that are accepted: the best chain of a fixed length, with the copies shared out.

With `--text`, texts are decoded after long contexts: plainly, with `suffix` and `edit`, and with `sparse` as well.
With `--accepted own` the model answers by itself, once after a text and once after the beginning of a passage that is
to be copied, and the answers must be equal. With a number, the weights are random and the text is given, so every pass
costs what it costs and what repeats is found; the logits of draft passes are replaced by ones that have the recorded
token with a probability p and are right in the share p of all positions, p being the number on average. With 0 they
stay random, with -1 they are certain of a wrong token.

Prints tables, then one JSON line.

Examples: python benchmarks/long_context.py; python benchmarks/long_context.py --contexts 8192 16384 32512
          python benchmarks/long_context.py --model DIR --text aider_sessions.md --contexts 8192 32000 --accepted 0.9 -1
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
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.long_context.long_graph import LongContextGraph
from edgerun.runtime.measure.pass_timing import pad_cache
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.speculation.drafters.sparse_cache import load_sparse_draft
from edgerun.runtime.speculation.pass_cost import PassCost
from long_answers import CLASSES, answers, show_answers
from shapes import SHAPES

_WIDTHS: Final = (1, 2, 3, 4, 6, 8)
_FORMS: Final = ("own", "long", "chosen")
_PAUSE_S: Final = 3e-3
"""Pause before each pass, until the threads of the other graph have ceased to spin."""
_ACCEPTED: Final = (0.7, 0.8, 0.85, 0.9, 0.95)
_REFRESH: Final = 32
"""Number of tokens between two choices of slots, as in `sparse_cache.py`."""


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
    draft: float
    """Median time of a draft pass over one token."""
    copy: float
    """Median time of choosing slots and copying them."""
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


def time_drafts(bound: BoundGraph, graphs: ChosenGraphs, turns: int) -> tuple[float, float]:
    """Median milliseconds of a draft pass, and of choosing and copying slots, in turns with passes that verify."""
    new = load_sparse_draft(graphs, PassCost({1024: {1: 1e-3}}))
    if isinstance(new, str):
        raise SystemExit(f"the model cannot draft so: {new}")
    draft = new()
    draft.attach(bound.arena)
    text = np.random.default_rng(0).integers(5, 20_000, bound.arena.length + 1).tolist()
    found = []
    for _ in range(turns + 2):
        bound.forward((20, 21))
        started = time.perf_counter()
        draft.reset(text)
        draft._copy_slots()
        copied = time.perf_counter()
        draft.logits(())  # runs behind other work, as the passes of a round do not
        before = time.perf_counter()
        for path in ((7,), (7, 8), (7, 8, 9)):
            draft.logits(path)
        found.append(((time.perf_counter() - before) / 3, copied - started))
    step, copy = 1e3 * np.median(found[2:], axis=0)
    return float(step), float(copy)


def gain(found: AtContext, accepted: float) -> tuple[float, int]:
    """Speed over plain decoding with chains of the best length, and that length; 1 and 0 where none pays."""
    passes, best = found.milliseconds["chosen"], (1.0, 0)
    for length in range(1, max(_WIDTHS)):
        tokens = sum(accepted**depth for depth in range(length + 1))
        verify = float(np.interp(length + 1, list(passes), list(passes.values())))
        round_ms = verify + length * found.draft + tokens * found.copy / _REFRESH
        best = max(best, (tokens * passes[1] / round_ms, length))
    return best


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
    drafting = time_drafts(bound["chosen"], graphs, turns)
    return AtContext(context, milliseconds, ratios, chosen, psutil.Process().memory_info().rss, *drafting, others)


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
    gains = Table(title="speed over plain decoding by the share of accepted draft tokens (length of the chain)")
    for name in ("context", "draft ms", "copy ms", *map(str, _ACCEPTED)):
        gains.add_column(name, justify="right")
    for each in found:
        cells = ["{:.2f} ({})".format(*gain(each, share)) for share in _ACCEPTED]
        gains.add_row(str(each.context), f"{each.draft:.1f}", f"{each.copy:.1f}", *cells)
    for shown in (table, gains):
        Console(width=170).print(shown)
    print(f"memory: {bandwidth / 1e9:.1f} GB/s; reading 1,024 tokens of keys and values once takes {read_ms:.2f} ms")


def load_cost(graph: FurtherGraph, base: GraphSession) -> tuple[float, int]:
    """Seconds to make and load a graph, and the private memory that its session takes."""
    process = psutil.Process()

    def private_bytes() -> int:
        info = process.memory_full_info()
        # Pages of the weights that two sessions map count as private to neither; on Linux PSS counts them once.
        return int(getattr(info, "pss", info.uss))

    before, started = private_bytes(), time.perf_counter()
    session = graph.load(base)
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
    parser.add_argument("--model", type=Path, help="a bundle with a real tokenizer, for --text")
    parser.add_argument("--text", type=Path, nargs="+", help="decode these texts")
    parser.add_argument("--accepted", nargs="+", choices=CLASSES, default=["0.9", "-1"])
    parser.add_argument("--tokens", type=int, default=120, help="tokens of an answer")
    parser.add_argument("--answers", type=int, default=3, help="answers of each text")
    parser.add_argument("--fresh", action="store_true", help="forget what was learned before every answer")
    parser.add_argument("--minutes", type=float, default=60.0)
    arguments = parser.parse_args()
    if arguments.text is not None:
        rows = answers(arguments)
        show_answers(rows)
        print(json.dumps({"benchmark": "long_context", "rows": rows}))
    else:
        passes(arguments)


def passes(arguments: argparse.Namespace) -> None:
    """Time passes of a shape."""
    longest = max(arguments.contexts) + max(_WIDTHS)
    opened = open_bundle(bundle(arguments.work, with_context(SHAPES[arguments.shape], longest), 128))
    # Threads that spin after a pass would take the cores from the other graph's pass.
    config = SessionConfig(cpu_device(), arguments.threads, shares_cores=True)
    graphs = open_graph(opened, config, cache=True)
    further = graphs.further[-1] if isinstance(graphs, ChosenGraphs) else None
    if not isinstance(graphs, ChosenGraphs) or not isinstance(further, LongContextGraph):
        raise SystemExit("the model has no graph for long contexts")
    seconds, taken = load_cost(further, graphs.base)
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
