"""Memory, speed and quality of KV caches in 8 and 4 bits against a float cache.

All forms of one model of a known shape, with random weights, read the same random tokens. At each context they take
turns, in both orders, at passes over 1, 2, 4 and 8 tokens, and the logits of the next tokens are compared. Memory is
the size of the caches' buffers, and what the process has more in private memory once they are filled. For trained
models (`--model`), the logits are compared over texts that the model writes itself. Prints tables of medians, then one
JSON line.

Examples: python benchmarks/kv_quantized.py; python benchmarks/kv_quantized.py --contexts 512 2048 --model my-model
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
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
from edgerun.runtime.measure.logit_quality import LogitQuality, measure_quality
from edgerun.runtime.measure.self_text import sample_texts
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.prefill import prefill
from shapes import SHAPES

_WIDTHS: Final = (1, 2, 4, 8)
_COMPARED: Final = 32
"""Tokens after each context whose logits are compared, one pass each."""
_FORMATS: Final = ("float", "int8", "int4")
_QUANTIZED: Final = _FORMATS[1:]


@dataclass(frozen=True)
class AtContext:
    """What was measured at one context."""

    context: int
    milliseconds: Mapping[str, Mapping[int, float]]
    """Median time of a pass, by format and width."""
    ratios: Mapping[str, Mapping[int, float]]
    """Median of the ratios of passes with a quantized cache to those with a float cache, by format and width."""
    mean_kl: Mapping[str, float]
    top1_agreement: Mapping[str, float]
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
    """Read random tokens with all forms, and measure at each context."""
    vocab_size = bound["float"].graph_io.vocab_size
    tokens = np.random.default_rng(seed).integers(10, vocab_size, contexts[-1] + _COMPARED).tolist()
    found = []
    for context in contexts:
        for each in bound.values():
            prefill(each, tokens[:context])
        meter = LoadMeter()
        times = time_passes(bound, turns)
        others = meter.others() or 0.0
        kl: dict[str, list[float]] = {name: [] for name in _QUANTIZED}
        agrees: dict[str, list[float]] = {name: [] for name in _QUANTIZED}
        for token in tokens[context : context + _COMPARED]:
            found_log_probs = {}
            for name, each in bound.items():
                found_log_probs[name] = log_probs(each.forward((token,))[0])
                each.arena.commit(1)
            expected = found_log_probs["float"]
            for name in _QUANTIZED:
                kl[name].append(float(np.sum(np.exp(expected) * (expected - found_log_probs[name]))))
                agrees[name].append(bool(expected.argmax() == found_log_probs[name].argmax()))
        ratios = {
            name: {width: median(np.divide(times[name][width], times["float"][width]).tolist()) for width in _WIDTHS}
            for name in _QUANTIZED
        }
        medians = {
            name: {width: 1e3 * median(seconds) for width, seconds in by_width.items()}
            for name, by_width in times.items()
        }
        mean_kl, top1 = ({name: float(np.mean(each)) for name, each in values.items()} for values in (kl, agrees))
        found.append(AtContext(context, medians, ratios, mean_kl, top1, others))
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


def trained(path: Path, kv: str, tokens: int) -> LogitQuality:
    """Compare a quantized cache of a trained model with its float cache over texts that it writes."""
    with edgerun.load(path, kv=kv, draft=None) as engine:
        texts = [text.tolist() for text in sample_texts(path, tokens, min(512, engine.context - 1), 99)]
        return measure_quality(engine.model.new_sequence().bound, engine.model.with_float_cache(), texts)


def show(at_contexts: Sequence[AtContext], memories: Mapping[str, Sequence[CacheMemory]]) -> None:
    """Print tables."""
    console = Console()
    speed = Table(title="ms of a pass, float / quantized (quantized to float)")
    speed.add_column("context", justify="right")
    speed.add_column("format")
    for width in _WIDTHS:
        speed.add_column(f"{width} token{'s' if width > 1 else ''}", justify="right")
    for name in ("mean KL", "top-1", "other load"):
        speed.add_column(name, justify="right")
    for each, kv in product(at_contexts, _QUANTIZED):
        plain, quantized = each.milliseconds["float"], each.milliseconds[kv]
        cells = [f"{plain[width]:.1f} / {quantized[width]:.1f} ({each.ratios[kv][width]:.2f})" for width in _WIDTHS]
        quality = (f"{each.mean_kl[kv]:.2g}", f"{each.top1_agreement[kv]:.1%}", f"{each.others:.1f}")
        speed.add_row(str(each.context), kv, *cells, *quality)
    sizes = Table(title="MiB of a cache: buffers (growth of private memory)")
    sizes.add_column("context", justify="right")
    for name in _FORMATS:
        sizes.add_column(name, justify="right")
    for row in zip(*(memories[name] for name in _FORMATS), strict=True):
        cells = [f"{each.buffer_bytes / 2**20:.1f} ({each.private_bytes / 2**20:.1f})" for each in row]
        sizes.add_row(str(row[0].context), *cells)
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
        # Threads that sleep between passes leave the cores to the engine whose turn it is.
        name: edgerun.load(path, kv=name, draft=None, context=limit, threads=arguments.threads, power="saver")
        for name in _FORMATS
    }
    memories = {name: [memory(engine, context) for context in contexts] for name, engine in engines.items()}
    bound = {name: engine.model.new_sequence().bound for name, engine in engines.items()}
    at_contexts = measure(bound, contexts, arguments.turns, 0)
    show(at_contexts, memories)
    pairs = product(arguments.model, _QUANTIZED)
    qualities = {f"{model.name}, {kv}": trained(model, kv, arguments.tokens) for model, kv in pairs}
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
