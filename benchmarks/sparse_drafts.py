"""What drafts of the target itself over few of its cache slots gain at long contexts.

One model of a known shape, with random weights. After filled caches, passes over the whole cache (the graph that a
loaded model chooses) and draft passes over copied slots take turns; choosing and copying slots is timed too. From the
medians follows the speed over plain decoding by the share of draft tokens that are accepted: the best chain of a fixed
length, with the copies shared out. Prints tables, then one JSON line.

Example: python benchmarks/sparse_drafts.py --contexts 8192 16384 32512 --turns 5
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from artifacts import bundle
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.open_graph import open_graph
from edgerun.runtime.graph.session import DecoderGraph, SessionConfig
from edgerun.runtime.measure.pass_timing import pad_cache
from edgerun.runtime.speculation.drafters.sparse_cache import load_sparse_draft
from edgerun.runtime.speculation.pass_cost import PassCost
from shapes import SHAPES

_WIDTHS: Final = (1, 2, 3, 4, 5, 6, 8)
_ACCEPTED: Final = (0.7, 0.8, 0.85, 0.9, 0.95)
_REFRESH: Final = 32
"""Number of tokens between two choices of slots, as in `sparse_cache.py`."""
_VOCABULARY: Final = 20_000
"""Number of different tokens of the text whose pairs are looked up."""


@dataclass(frozen=True)
class AtContext:
    """What was measured at one context, in milliseconds."""

    context: int
    passes: dict[int, float]
    """Median of passes over the whole cache, by width."""
    draft: float
    """Median of draft passes over one token."""
    draft_ratio: float
    """Median of the ratios of a draft pass to a plain pass."""
    copy: float
    """Choosing slots and copying them."""


def measure(graph: DecoderGraph, context: int, turns: int) -> AtContext:
    """Time passes at a context."""
    arena = graph.arena(context + 64)
    bound = graph.bind(arena)
    pad_cache(bound, context)
    new = load_sparse_draft(graph, PassCost({1024: {1: 1e-3}}))
    if isinstance(new, str):
        raise SystemExit(f"the model cannot draft so: {new}")
    draft = new()
    draft.attach(arena)
    text = np.random.default_rng(0).integers(5, _VOCABULARY, context + 1).tolist()
    times: dict[int, list[float]] = {width: [] for width in _WIDTHS}
    steps: list[float] = []
    copies: list[float] = []
    for turn in range(-3, turns):  # the first passes bind buffers, and measure what to choose
        draft.reset(text)
        started = time.perf_counter()
        draft._copy_slots()
        copied = time.perf_counter() - started
        draft.logits(())
        before = time.perf_counter()
        for path in ((7,), (7, 8), (7, 8, 9)):
            draft.logits(path)
        step = (time.perf_counter() - before) / 3
        for width in _WIDTHS:
            started = time.perf_counter()
            bound.forward(range(20, 20 + width))
            if turn >= 0:
                times[width].append(time.perf_counter() - started)
        if turn >= 0:
            copies.append(copied)
            steps.append(step)
    passes = {width: 1e3 * median(found) for width, found in times.items()}
    ratio = median((np.array(steps) / np.array(times[1])).tolist())
    return AtContext(context, passes, 1e3 * median(steps), ratio, 1e3 * median(copies))


def gain(found: AtContext, accepted: float) -> tuple[float, int]:
    """Speed over plain decoding with chains of the best length, and that length; 1 and 0 where none pays."""
    plain, best = found.passes[1], (1.0, 0)
    for length in range(1, max(_WIDTHS)):
        tokens = sum(accepted**depth for depth in range(length + 1))
        verify = float(np.interp(length + 1, list(found.passes), list(found.passes.values())))
        round_ms = verify + length * found.draft + tokens * found.copy / _REFRESH
        best = max(best, (tokens * plain / round_ms, length))
    return best


def show(found: Sequence[AtContext]) -> None:
    """Print tables."""
    table = Table(title="ms of a pass over the whole cache, of a draft pass, and of choosing and copying slots")
    for name in ("context", *map(str, _WIDTHS), "draft", "draft to plain", "copy"):
        table.add_column(name, justify="right")
    for each in found:
        cells = [f"{each.passes[width]:.1f}" for width in _WIDTHS]
        table.add_row(str(each.context), *cells, f"{each.draft:.1f}", f"{each.draft_ratio:.2f}", f"{each.copy:.1f}")
    gains = Table(title="speed over plain decoding by the share of accepted draft tokens (length of the chain)")
    for name in ("context", *map(str, _ACCEPTED)):
        gains.add_column(name, justify="right")
    for each in found:
        gains.add_row(str(each.context), *("{:.2f} ({})".format(*gain(each, share)) for share in _ACCEPTED))
    console = Console(width=130)
    console.print(table)
    console.print(gains)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16384, 32512])
    parser.add_argument("--turns", type=int, default=7, help="turns at each context")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    opened = open_bundle(bundle(arguments.work, SHAPES[arguments.shape], 128))
    graph = open_graph(opened, SessionConfig(cpu_device(), arguments.threads), cache=True)
    found = [measure(graph, context, arguments.turns) for context in sorted(arguments.contexts)]
    show(found)
    print(
        json.dumps(
            {"benchmark": "sparse_drafts", "shape": arguments.shape, "contexts": [asdict(each) for each in found]}
        )
    )


if __name__ == "__main__":
    main()
