"""Memory, speed and quality of an int8 KV cache against a float cache.

Both forms of one model of a known shape, with random weights, read the same random tokens. At each context they take
turns, in both orders, at passes over 1, 2, 4 and 8 tokens, and the logits of the next tokens are compared. Memory is
the size of the caches' buffers, and what the process has more in private memory once they are filled. For trained
models (`--model`), the logits are compared over texts that the model writes itself. Prints tables of medians, then one
JSON line.

Examples: python benchmarks/kv_int8.py; python benchmarks/kv_int8.py --contexts 512 2048 --model models/my-model
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import edgerun
from artifacts import bundle
from edgerun import Engine
from edgerun.runtime.graph.bound_graph import BoundGraph
from edgerun.runtime.measure.logit_quality import LogitQuality, measure_cache_quality
from edgerun.runtime.measure.self_text import sample_texts
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.prefill import prefill
from shapes import SHAPES

_WIDTHS: Final = (1, 2, 4, 8)
_COMPARED: Final = 32
"""Tokens after each context whose logits are compared, one pass each."""
_FORMATS: Final = ("float", "int8")


@dataclass(frozen=True)
class AtContext:
    """What was measured at one context."""

    context: int
    milliseconds: Mapping[str, Mapping[int, float]]
    """Median time of a pass, by format and width."""
    ratios: Mapping[int, float]
    """Median of the ratios of passes with an int8 cache to those with a float cache, by width."""
    mean_kl: float
    top1_agreement: float
    others: float
    """Processors that other programs used meanwhile."""


@dataclass(frozen=True)
class CacheMemory:
    """Memory of a cache filled to a context."""

    context: int
    buffer_bytes: int
    private_bytes: int
    """Growth of the process's private memory."""


def log_probs(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 [V] of logits [V]."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def measure(bound: Mapping[str, BoundGraph], contexts: Sequence[int], turns: int, seed: int) -> list[AtContext]:
    """Read random tokens with both forms, and measure at each context."""
    vocab_size = bound["float"].graph_io.vocab_size
    tokens = np.random.default_rng(seed).integers(10, vocab_size, contexts[-1] + _COMPARED).tolist()
    found = []
    for context in contexts:
        for each in bound.values():
            prefill(each, tokens[:context])
        meter = LoadMeter()
        times = time_passes(bound, turns)
        others = meter.others() or 0.0
        kl, agrees = [], []
        for token in tokens[context : context + _COMPARED]:
            both = {}
            for name, each in bound.items():
                both[name] = log_probs(each.forward((token,))[0])
                each.arena.commit(1)
            kl.append(float(np.sum(np.exp(both["float"]) * (both["float"] - both["int8"]))))
            agrees.append(bool(both["float"].argmax() == both["int8"].argmax()))
        ratios = {width: median(np.divide(times["int8"][width], times["float"][width]).tolist()) for width in _WIDTHS}
        medians = {
            name: {width: 1e3 * median(seconds) for width, seconds in by_width.items()}
            for name, by_width in times.items()
        }
        found.append(AtContext(context, medians, ratios, float(np.mean(kl)), float(np.mean(agrees)), others))
    return found


def time_passes(bound: Mapping[str, BoundGraph], turns: int) -> dict[str, dict[int, list[float]]]:
    """Seconds of passes by format and width; they are not committed, so all are at one context."""
    times: dict[str, dict[int, list[float]]] = {name: {width: [] for width in _WIDTHS} for name in _FORMATS}
    for turn in range(-2, turns):  # the first passes of a width bind its buffers
        for width in _WIDTHS:
            for name in _FORMATS if turn % 2 else _FORMATS[::-1]:
                started = time.perf_counter()
                bound[name].forward(range(20, 20 + width))
                if turn >= 0:
                    times[name][width].append(time.perf_counter() - started)
    return times


def memory(engine: Engine, context: int) -> CacheMemory:
    """Fill a cache of an engine to a context; its values are arbitrary."""
    process = psutil.Process()
    arena = engine.model.new_sequence().arena
    before = process.memory_full_info().uss
    arena.pad_to(context, 1.0)
    return CacheMemory(context, arena.nbytes, process.memory_full_info().uss - before)


def trained(path: Path, tokens: int) -> LogitQuality:
    """Compare the caches of a trained model over texts that it writes."""
    with edgerun.load(path, kv="int8", draft=None) as engine:
        texts = [text.tolist() for text in sample_texts(path, tokens, min(512, engine.context - 1), 99)]
        return measure_cache_quality(engine.model.new_sequence().bound, engine.model.with_float_cache(), texts)


def show(at_contexts: Sequence[AtContext], memories: Mapping[str, Sequence[CacheMemory]]) -> None:
    """Print tables."""
    console = Console()
    speed = Table(title="ms of a pass: float / int8 (int8 to float)")
    speed.add_column("context", justify="right")
    for width in _WIDTHS:
        speed.add_column(f"{width} token{'s' if width > 1 else ''}", justify="right")
    for name in ("mean KL", "top-1", "other load"):
        speed.add_column(name, justify="right")
    for each in at_contexts:
        cells = [
            f"{each.milliseconds['float'][width]:.1f} / {each.milliseconds['int8'][width]:.1f} "
            f"({each.ratios[width]:.2f})"
            for width in _WIDTHS
        ]
        quality = (f"{each.mean_kl:.2g}", f"{each.top1_agreement:.1%}", f"{each.others:.1f}")
        speed.add_row(str(each.context), *cells, *quality)
    sizes = Table(title="MiB of a cache: buffers (growth of private memory)")
    sizes.add_column("context", justify="right")
    for name in _FORMATS:
        sizes.add_column(name, justify="right")
    for pair in zip(*(memories[name] for name in _FORMATS), strict=True):
        cells = [f"{each.buffer_bytes / 2**20:.1f} ({each.private_bytes / 2**20:.1f})" for each in pair]
        sizes.add_row(str(pair[0].context), *cells)
    console.print(speed)
    console.print(sizes)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--turns", type=int, default=15, help="turns at each context")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--model", type=Path, action="append", default=[], help="a trained model; may be repeated")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens that a trained model writes")
    arguments = parser.parse_args()
    contexts = sorted(arguments.contexts)
    path = bundle(arguments.work, SHAPES[arguments.shape], 128)
    limit = contexts[-1] + 2 * _COMPARED
    engines = {
        name: edgerun.load(path, kv=name, draft=None, context=limit, threads=arguments.threads) for name in _FORMATS
    }
    memories = {name: [memory(engine, context) for context in contexts] for name, engine in engines.items()}
    bound = {name: engine.model.new_sequence().bound for name, engine in engines.items()}
    at_contexts = measure(bound, contexts, arguments.turns, 0)
    show(at_contexts, memories)
    qualities = {model.name: trained(model, arguments.tokens) for model in arguments.model}
    for name, quality in qualities.items():
        print(
            f"{name}: mean KL {quality.mean_kl:.3g}, 99 % below {quality.p99_kl:.3g}, top-1 agreement "
            f"{quality.top1_agreement:.2%} over {quality.positions} positions of texts of up to {quality.longest} "
            "tokens"
        )
    result: dict[str, Any] = {
        "shape": arguments.shape,
        "contexts": [asdict(each) for each in at_contexts],
        "memory": {name: [asdict(each) for each in found] for name, found in memories.items()},
        "trained": {name: asdict(quality) for name, quality in qualities.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
