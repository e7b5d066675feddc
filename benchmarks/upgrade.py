"""Speed of other tools' ONNX models before and after their upgrade by `edge-run export`.

Measures two models of the same random checkpoint: ONNX Runtime GenAI's int4 export, whose weights the upgrade keeps,
and Optimum's float32 export, which it rounds to int4. edge-run opens each as it is and upgraded, in separate processes
that are measured in turn, in both orders. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from artifacts import upgraded
from edgerun.export import INT4, ExportRecipe
from peer_models import genai_model, optimum_model
from processes import Worker
from rounds import IdleLoad, Series, alternate, join, median_ratio, restarted, spread
from shapes import SHAPES

CONTEXT: Final = 128
WIDTHS: Final = (1, 2, 4)
BEFORE: Final = "as it is"
AFTER: Final = "upgraded"
_CAPACITY: Final = 256


@dataclass(frozen=True)
class Repetitions:
    """Number of repetitions of each measurement."""

    restarts: int
    """Number of times that the processes are restarted: memory placement changes their speed."""
    rounds: int
    tokens: int
    """Number of tokens per decode measurement."""
    passes: int
    """Number of passes whose median is one measurement."""


FULL: Final = Repetitions(restarts=3, rounds=5, tokens=24, passes=5)
QUICK: Final = Repetitions(restarts=1, rounds=3, tokens=8, passes=3)


@dataclass(frozen=True)
class Case:
    """A foreign model, its upgrade, and the required speed."""

    name: str
    before: Path
    after: Path
    min_speedup: float
    """Smallest accepted speed of decoding, relative to the model as it is."""


@dataclass
class Measurements:
    """All measurements of one case, with one `Series` per restart."""

    decode: list[Series] = field(default_factory=list)
    widths: dict[int, list[Series]] = field(default_factory=lambda: {width: [] for width in WIDTHS})
    idle_load: IdleLoad = field(default_factory=IdleLoad)


def measure(case: Case, threads: int, repetitions: Repetitions, report: Callable[[str], None]) -> Measurements:
    """Decode and run passes with both models in turn."""
    found = Measurements()
    pairs = [(BEFORE, case.before), (AFTER, case.after)]

    def start(pair: tuple[str, Path]) -> Worker:
        return Worker(pair[0], "edge-run", pair[1], threads=threads, capacity=_CAPACITY)

    for restart, workers in enumerate(restarted(pairs, repetitions.restarts, start)):
        report(f"{case.name}: processes {restart + 1} of {repetitions.restarts}")
        _measure_once(workers, repetitions, found)
    return found


def _measure_once(workers: Sequence[Worker], repetitions: Repetitions, found: Measurements) -> None:
    for worker in workers:
        worker.call("decode", context=CONTEXT, tokens=2)  # first passes allocate

    def decode(worker: Worker) -> float:
        return float(worker.call("decode", context=CONTEXT, tokens=repetitions.tokens))

    found.decode.append(alternate(workers, repetitions.rounds, decode, found.idle_load))
    for width in WIDTHS:

        def run_pass(worker: Worker, width: int = width) -> float:
            return float(worker.call("passes", context=CONTEXT, width=width, repeats=repetitions.passes))

        found.widths[width].append(alternate(workers, repetitions.rounds, run_pass, found.idle_load))


def summarize(case: Case, found: Measurements) -> dict[str, Any]:
    """Medians, and the speedup with quartiles."""
    decode = join(found.decode)
    widths = {width: join(parts) for width, parts in found.widths.items()}
    speedup = median_ratio(decode, BEFORE, AFTER)
    return {
        "decode_ms": {label: 1e3 * statistics.median(decode[label]) for label in (BEFORE, AFTER)},
        "speedup": speedup,
        "quartiles": spread(decode, BEFORE, AFTER),
        "min_speedup": case.min_speedup,
        "met": speedup >= case.min_speedup,
        "pass_ms": {
            label: {str(width): 1e3 * statistics.median(series[label]) for width, series in widths.items()}
            for label in (BEFORE, AFTER)
        },
        "weights_mib": {label: _weights(model) for label, model in ((BEFORE, case.before), (AFTER, case.after))},
        "idle_core_share": found.idle_load.idle_core_share,
    }


def _weights(model: Path) -> float:
    return sum(file.stat().st_size for file in model.glob("*.onnx*")) / 2**20


def show(console: Console, results: dict[str, dict[str, Any]], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    for name in (
        "",
        "weights, MiB",
        f"ms per token\nafter {CONTEXT}",
        *(f"pass of {width},\nms" for width in WIDTHS[1:]),
    ):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("speedup\n(quartiles)", justify="right")
    for name, result in results.items():
        low, high = result["quartiles"]
        gains = {BEFORE: "", AFTER: f"{result['speedup']:.2f} ({low:.2f} to {high:.2f})"}
        for label in (BEFORE, AFTER):
            table.add_row(
                f"{name}, {label}",
                f"{result['weights_mib'][label]:.0f}",
                f"{result['decode_ms'][label]:.2f}",
                *(f"{result['pass_ms'][label][str(width)]:.2f}" for width in WIDTHS[1:]),
                gains[label],
            )
    console.print(table)
    for name, result in results.items():
        if not result["met"]:
            console.print(f"[red]{name}: speedup {result['speedup']:.2f}, required {result['min_speedup']:g}[/red]")


def cases(options: argparse.Namespace) -> list[Case]:
    """The models whose exporters are available, exported and upgraded once."""
    shape = SHAPES[options.shape]
    found = []
    if options.genai_python:
        model = genai_model(options.work, shape, 32, options.genai_python)
        found.append(Case("GenAI int4", model, upgraded(model, ExportRecipe()), 1.0))
    if options.optimum_python:
        model = optimum_model(options.work, shape, options.optimum_python)
        found.append(Case("Optimum fp32", model, upgraded(model, ExportRecipe(INT4)), 3.0))
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/upgrade.py --genai-python ~/genai/bin/python --quick",
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--quick", action="store_true", help="few rounds, no restarts")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--genai-python", metavar="PATH", help="interpreter that has onnxruntime-genai and its builder")
    parser.add_argument("--optimum-python", metavar="PATH", help="interpreter that has optimum-onnx")
    options = parser.parse_args()
    if not options.genai_python and not options.optimum_python:
        parser.error("give an interpreter with --genai-python, --optimum-python or both")

    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 120
    os.environ["EDGERUN_CACHE"] = str((options.work / "cache").absolute())
    progress.print("preparing models")
    repetitions = QUICK if options.quick else FULL
    results = {
        case.name: summarize(case, measure(case, options.threads, repetitions, progress.print))
        for case in cases(options)
    }
    show(console, results, f"{options.shape}, {options.threads} threads")
    conditions = {"shape": options.shape, "threads": options.threads, "context": CONTEXT, "quick": options.quick}
    print(json.dumps({"benchmark": "upgrade", "conditions": conditions, "cases": results}))


if __name__ == "__main__":
    main()
