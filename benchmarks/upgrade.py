"""What `edge-run export` makes of other tools' ONNX models: decoding speed and wider passes, before and after.

Two models of the same random checkpoint: ONNX Runtime GenAI's int4 export, whose weights the upgrade keeps, and
Optimum's float32 export, which it rounds to int4. Each is opened by edge-run as it is and as its upgrade, in processes
of their own that are measured in turn, in both orders. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from artifacts import genai_model, optimum_model, upgraded
from checkpoints import SHAPES
from edgerun.export import INT4, ExportRecipe
from processes import Worker
from rounds import Series, Stillness, alternate, join, median_ratio, spread

CONTEXT: Final = 128
WIDTHS: Final = (1, 2, 4)
BEFORE: Final = "as it is"
AFTER: Final = "upgraded"
_CAPACITY: Final = 256


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    restarts: int
    """Times the processes are started anew: where a process's memory lands changes its speed."""
    rounds: int
    tokens: int
    """Tokens a decode measurement is long."""
    passes: int
    """Passes a width measurement is the median of."""


FULL: Final = Effort(restarts=3, rounds=5, tokens=24, passes=5)
QUICK: Final = Effort(restarts=1, rounds=3, tokens=8, passes=3)


@dataclass(frozen=True)
class Case:
    """A foreign model, its upgrade, and what the upgrade is to bring."""

    name: str
    before: Path
    after: Path
    times_as_fast: float
    """Least speed of decoding, by that of the model as it is."""


@dataclass
class Findings:
    """Everything measured of one case; one `Series` part a restart."""

    decode: list[Series] = field(default_factory=list)
    widths: dict[int, list[Series]] = field(default_factory=lambda: {width: [] for width in WIDTHS})
    stillness: Stillness = field(default_factory=Stillness)


def measure(case: Case, threads: int, effort: Effort, say: Callable[[str], None]) -> Findings:
    """Decode and run passes with both, in turn."""
    found = Findings()
    pairs = [(BEFORE, case.before), (AFTER, case.after)]
    for restart in range(effort.restarts):
        say(f"{case.name}: processes {restart + 1} of {effort.restarts}")
        with ExitStack() as stack:
            workers = [
                stack.enter_context(Worker(label, "edge-run", model, threads=threads, capacity=_CAPACITY))
                for label, model in (pairs if restart % 2 == 0 else pairs[::-1])
            ]
            _measure_once(workers, effort, found)
    return found


def _measure_once(workers: Sequence[Worker], effort: Effort, found: Findings) -> None:
    for worker in workers:
        worker.ask("decode", context=CONTEXT, tokens=2)  # first passes allocate

    def decode(worker: Worker) -> float:
        return float(worker.ask("decode", context=CONTEXT, tokens=effort.tokens))

    found.decode.append(alternate(workers, effort.rounds, decode, found.stillness))
    for width in WIDTHS:

        def run_pass(worker: Worker, width: int = width) -> float:
            return float(worker.ask("passes", context=CONTEXT, rows=width, times=effort.passes))

        found.widths[width].append(alternate(workers, effort.rounds, run_pass, found.stillness))


def account(case: Case, found: Findings) -> dict[str, Any]:
    """The findings in numbers."""
    decode = join(found.decode)
    widths = {width: join(parts) for width, parts in found.widths.items()}
    times_as_fast = median_ratio(decode, BEFORE, AFTER)
    return {
        "decode_ms": {label: 1e3 * statistics.median(decode[label]) for label in (BEFORE, AFTER)},
        "times_as_fast": times_as_fast,
        "quartiles": spread(decode, BEFORE, AFTER),
        "asked": case.times_as_fast,
        "met": times_as_fast >= case.times_as_fast,
        "pass_ms": {
            label: {str(width): 1e3 * statistics.median(series[label]) for width, series in widths.items()}
            for label in (BEFORE, AFTER)
        },
        "weights_mib": {label: _weights(model) for label, model in ((BEFORE, case.before), (AFTER, case.after))},
        "idle_core_share": found.stillness.idle_core_share,
    }


def _weights(model: Path) -> float:
    return sum(file.stat().st_size for file in model.glob("*.onnx*")) / 2**20


def show(console: Console, results: dict[str, dict[str, Any]], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    for name in (
        "",
        "weights, MiB",
        f"ms a token\nafter {CONTEXT}",
        *(f"pass of {width},\nms" for width in WIDTHS[1:]),
    ):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("times as fast\n(quartiles)", justify="right")
    for name, result in results.items():
        low, high = result["quartiles"]
        gains = {BEFORE: "", AFTER: f"{result['times_as_fast']:.2f} ({low:.2f} to {high:.2f})"}
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
            console.print(f"[red]{name}: {result['times_as_fast']:.2f} times as fast, not {result['asked']:g}[/red]")


def cases(options: argparse.Namespace) -> list[Case]:
    """The models there are interpreters for, exported and upgraded once."""
    shape = SHAPES[options.shape]
    found = []
    if options.genai_python:
        model = genai_model(options.work, shape, 32, options.genai_python)
        found.append(Case("GenAI int4", model, upgraded(model, ExportRecipe(body=None)), 1.0))
    if options.optimum_python:
        model = optimum_model(options.work, shape, options.optimum_python)
        found.append(Case("Optimum fp32", model, upgraded(model, ExportRecipe(body=INT4)), 3.0))
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
    parser.add_argument("--quick", action="store_true", help="few rounds, no restarts: a first look")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    parser.add_argument("--genai-python", metavar="PATH", help="interpreter that has onnxruntime-genai and its builder")
    parser.add_argument("--optimum-python", metavar="PATH", help="interpreter that has optimum-onnx")
    options = parser.parse_args()
    if not options.genai_python and not options.optimum_python:
        parser.error("name an interpreter with --genai-python, --optimum-python or both")

    console, progress = Console(), Console(stderr=True)
    if not console.is_terminal:
        console.width = 120
    os.environ["EDGERUN_CACHE"] = str((options.work / "cache").absolute())
    progress.print("preparing models")
    effort = QUICK if options.quick else FULL
    results = {
        case.name: account(case, measure(case, options.threads, effort, progress.print)) for case in cases(options)
    }
    show(console, results, f"{options.shape}, {options.threads} threads")
    conditions = {"shape": options.shape, "threads": options.threads, "context": CONTEXT, "quick": options.quick}
    print(json.dumps({"benchmark": "upgrade", "conditions": conditions, "cases": results}))


if __name__ == "__main__":
    main()
