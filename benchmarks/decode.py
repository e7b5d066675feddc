"""Speed of plain decoding, prefill and wide passes, memory, and load time.

Compares edge-run with a bare onnxruntime loop over the same graph and, if it is installed, with ONNX Runtime GenAI and
its own export. Every engine runs in its own process, and they are measured one at a time in turn; ratios are medians
over rounds. Weights are random (see checkpoints.py): speed does not depend on them. Prints tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from artifacts import bundle, genai_model
from checkpoints import SHAPES, Shape
from processes import Worker
from rounds import IdleLoad, Series, alternate, join, median_ratio, spread

CONTEXT: Final = 128
PROMPTS: Final = (128, 1024)
WIDTHS: Final = (1, 2, 3, 4, 6, 8, 16)
EDGE: Final = "edge-run"
BARE: Final = "bare loop"
_CAPACITY: Final = 1280


@dataclass(frozen=True)
class Repetitions:
    """Number of repetitions of each measurement."""

    restarts: int
    """Number of times that all processes are restarted: memory placement changes their speed by several per cent."""
    rounds: int
    tokens: int
    """Number of tokens per decode measurement."""
    passes: int
    """Number of passes whose median is one measurement."""


FULL: Final = Repetitions(restarts=3, rounds=6, tokens=32, passes=5)
QUICK: Final = Repetitions(restarts=1, rounds=3, tokens=12, passes=3)


@dataclass(frozen=True)
class MeasuredEngine:
    """An engine and the model it runs."""

    label: str
    engine: str
    model: Path
    python: str | None = None

    def start(self, threads: int) -> Worker:
        """Start its process and load the model."""
        return Worker(self.label, self.engine, self.model, python=self.python, threads=threads, capacity=_CAPACITY)


@dataclass
class Measurements:
    """All measurements, with one `Series` per restart."""

    decode: list[Series] = field(default_factory=list)
    prefill: dict[int, list[Series]] = field(default_factory=lambda: {count: [] for count in PROMPTS})
    widths: dict[int, list[Series]] = field(default_factory=lambda: {width: [] for width in WIDTHS})
    load_s: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    first_load_s: float = 0.0
    """Seconds of edge-run's first load of the bundle, which packs the weights for this machine."""
    idle_load: IdleLoad = field(default_factory=IdleLoad)


def measure(
    engines: Sequence[MeasuredEngine], threads: int, repetitions: Repetitions, report: Callable[[str], None]
) -> Measurements:
    """Run all measurements."""
    found = Measurements()
    edge = next(each for each in engines if each.label == EDGE)
    with edge.start(threads) as worker:
        found.first_load_s = worker.loaded["seconds"]
    for restart in range(repetitions.restarts):
        turn = restart % len(engines)
        report(f"processes {restart + 1} of {repetitions.restarts}: loading")
        with ExitStack() as stack:
            workers = [stack.enter_context(each.start(threads)) for each in [*engines[turn:], *engines[:turn]]]
            _measure_once(workers, repetitions, found, report)
    return found


def _measure_once(
    workers: Sequence[Worker], repetitions: Repetitions, found: Measurements, report: Callable[[str], None]
) -> None:
    """Run all measurements with the running processes."""
    for worker in workers:
        found.load_s.setdefault(worker.label, []).append(worker.loaded["seconds"])
        worker.call("decode", context=CONTEXT, tokens=4)  # first passes allocate
        now = worker.call("memory")
        found.memory[worker.label] = {
            "before": worker.loaded["before"]["resident"],
            "loaded": worker.loaded["after"]["resident"],
            "decoding": now["resident"],
            "decoding_anonymous": now["anonymous"],
        }

    report(f"  decoding after {CONTEXT} tokens")

    def decode(worker: Worker) -> float:
        return float(worker.call("decode", context=CONTEXT, tokens=repetitions.tokens))

    found.decode.append(alternate(workers, repetitions.rounds, decode, found.idle_load))

    same_graph = [worker for worker in workers if worker.label in (EDGE, BARE)]
    parts: dict[int, list[Series]] = {width: [] for width in WIDTHS}
    for number in range(repetitions.rounds):
        report(f"  passes of {WIDTHS[0]} to {WIDTHS[-1]} tokens, round {number + 1}")
        for width in WIDTHS if number % 2 == 0 else reversed(WIDTHS):

            def run_pass(worker: Worker, width: int = width) -> float:
                return float(worker.call("passes", context=CONTEXT, width=width, repeats=repetitions.passes))

            order = same_graph if number % 2 == 0 else same_graph[::-1]
            parts[width].append(alternate(order, 1, run_pass, found.idle_load))
    for width in WIDTHS:
        found.widths[width].append(join(parts[width]))

    for count in PROMPTS:
        report(f"  prompts of {count} tokens")

        def prefill(worker: Worker, count: int = count) -> float:
            return float(worker.call("prefill", tokens=count))

        rounds = max(2, repetitions.rounds // 2) if count > CONTEXT else repetitions.rounds
        found.prefill[count].append(alternate(workers, rounds, prefill, found.idle_load))
    for worker in workers:
        found.memory[worker.label]["peak"] = worker.call("memory")["peak"]


def summarize(found: Measurements, engines: Sequence[MeasuredEngine]) -> dict[str, Any]:
    """Medians, and ratios of each engine's time to the bare loop's with quartiles."""
    decode = join(found.decode)
    prefill = {count: join(parts) for count, parts in found.prefill.items()}
    widths = {width: join(parts) for width, parts in found.widths.items()}
    figures = {}
    for each in engines:
        label = each.label
        figures[label] = {
            "weights_mib": _weights(each.model) / 2**20,
            "load_s": statistics.median(found.load_s[label]),
            "resident_mib": found.memory[label],
            "decode_ms": 1e3 * statistics.median(decode[label]),
            "decode_ratio": median_ratio(decode, label, BARE),
            "decode_ratio_quartiles": spread(decode, label, BARE),
            "prefill": {
                str(count): {
                    "tokens_per_s": count / statistics.median(series[label]),
                    "ratio": median_ratio(series, label, BARE),
                    "ratio_quartiles": spread(series, label, BARE),
                }
                for count, series in prefill.items()
            },
        }
    cost = {
        label: {
            str(width): {
                "ms": 1e3 * statistics.median(series[label]),
                "by_one_token": statistics.median(
                    many / one for many, one in zip(series[label], widths[1][label], strict=True)
                ),
            }
            for width, series in widths.items()
        }
        for label in (EDGE, BARE)
    }
    figures[EDGE]["first_load_s"] = found.first_load_s
    return {"engines": figures, "pass_cost": cost, "idle_core_share": found.idle_load.idle_core_share}


def _weights(model: Path) -> int:
    return sum(file.stat().st_size for file in model.glob("*.onnx*"))


def show(console: Console, result: dict[str, Any], title: str) -> None:
    """Print the tables."""
    speed = Table(title=f"{title}: speed; in brackets, time relative to the bare loop (median over rounds)")
    speed.add_column("")
    for name in (f"ms per token\nafter {CONTEXT}", *(f"tokens/s, prompt\nof {count}" for count in PROMPTS)):
        speed.add_column(name, justify="right")
    memory = Table(title="load time and resident memory, MiB")
    memory.add_column("")
    for name in ("weights on disk", "load, s", "loaded", "decoding", "of that anonymous", "peak"):
        memory.add_column(name, justify="right")
    for label, row in result["engines"].items():
        prompts = [row["prefill"][str(count)] for count in PROMPTS]
        speed.add_row(
            label,
            f"{row['decode_ms']:.2f} ({row['decode_ratio']:.3f})",
            *(f"{prompt['tokens_per_s']:.0f} ({prompt['ratio']:.3f})" for prompt in prompts),
        )
        resident = row["resident_mib"]
        stages = [resident[name] for name in ("loaded", "decoding", "decoding_anonymous", "peak")]
        memory.add_row(label, f"{row['weights_mib']:.0f}", f"{row['load_s']:.2f}", *(f"{size:.0f}" for size in stages))
    passes = Table(title=f"pass over m tokens after {CONTEXT}, with all logits: ms (ratio to a pass over one token)")
    for name in ("m", *result["pass_cost"]):
        passes.add_column(name, justify="right")
    for width in WIDTHS:
        cells = [cost[str(width)] for cost in result["pass_cost"].values()]
        passes.add_row(str(width), *(f"{cell['ms']:.2f} ({cell['by_one_token']:.2f})" for cell in cells))
    for table in (speed, memory, passes):
        console.print(table)
    console.print(f"edge-run's first load, which packs the weights: {result['engines'][EDGE]['first_load_s']:.2f} s")
    share = result["idle_core_share"]
    if share > 0.02:
        console.print(f"[yellow]waiting processes used {share:.0%} of a core while others were measured[/yellow]")


def conditions(shape: Shape, threads: int, block: int, repetitions: Repetitions) -> dict[str, Any]:
    """The conditions of the measurement."""
    return {
        "shape": shape.name,
        "weights": f"random, int4, block {block}",
        "context": CONTEXT,
        "threads": threads,
        "cores": psutil.cpu_count(logical=False),
        "cpu": _cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "onnxruntime": version("onnxruntime"),
        "restarts": repetitions.restarts,
        "rounds": repetitions.rounds,
    }


def _rounded(value: Any) -> Any:
    """Round every number to five significant digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, (list, tuple)) else value


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/decode.py --shape qwen2.5-0.5b --genai-python ~/genai/bin/python",
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--block", type=int, choices=(32, 64, 128), default=128, help="weights that share a scale")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--quick", action="store_true", help="few rounds, no restarts")
    parser.add_argument("--restarts", type=int, metavar="N", help="restarts of all processes (3; quick: 1)")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument(
        "--genai-python", metavar="PATH", help="interpreter that has onnxruntime-genai, psutil and numpy"
    )
    options = parser.parse_args()

    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 120
    shape = SHAPES[options.shape]
    repetitions = QUICK if options.quick else FULL
    if options.restarts:
        repetitions = replace(repetitions, restarts=options.restarts)
    progress.print("preparing models")
    cache = options.work / "cache"  # an empty one, so that the first load packs the weights
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["EDGERUN_CACHE"] = str(cache.absolute())
    ours = bundle(options.work, shape, options.block)
    engines = [MeasuredEngine(EDGE, "edge-run", ours), MeasuredEngine(BARE, "bare", ours)]
    if options.genai_python:
        for block in sorted({options.block, 32}, reverse=True):
            model = genai_model(options.work, shape, block, options.genai_python)
            label = f"GenAI, block {block}" + (" (its default)" if block == 32 else "")
            engines.append(MeasuredEngine(label, "genai", model, options.genai_python))
    found = measure(engines, options.threads, repetitions, progress.print)
    run_conditions = conditions(shape, options.threads, options.block, repetitions)
    result = {"benchmark": "decode", "conditions": run_conditions, **summarize(found, engines)}
    show(
        console, result, f"{shape.name}, int4 block {options.block}, {options.threads} threads, {run_conditions['cpu']}"
    )
    print(json.dumps(_rounded(result)))


if __name__ == "__main__":
    main()
