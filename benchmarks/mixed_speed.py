"""Size, memory and speed of mixed weights against uniform 4 bits, and whether time budgets are kept.

Example: python benchmarks/mixed_speed.py --shape qwen2.5-0.5b --budgets 3.5bpw 8ms

Weights are random (see checkpoints.py), so there is no quality to measure by: units are taken to suffer alike, each
weight by a quarter for every bit more and by the size of its block, and plans are those that the exporter makes of that
within a budget; of a time it measures whole passes. They are written as real bundles, rounded to nearest. Every bundle
runs in a process of its own, in turn with the others, for passes of 1 and of 4 rows. Prints tables (bytes on disk and
resident, time by that of uniform int4/128, predicted and measured milliseconds), then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import edgerun
from artifacts import checkpoint
from checkpoints import SHAPES
from edgerun.export import Method, WeightFormat
from edgerun.export.allocation.allocate import AllocationProblem, allocate, cost_limits
from edgerun.export.allocation.budget import Budget, Measure, parse_budget
from edgerun.export.allocation.evolutionary_search import SearchSettings
from edgerun.export.allocation.format_candidates import BASE_FORMATS, planned_linears, with_embedding
from edgerun.export.allocation.linear_times import LinearTimes, load_or_measure
from edgerun.export.allocation.plan_costs import bytes_read, weight_count
from edgerun.export.allocation.plan_selection import measured_over_predicted
from edgerun.export.bundle_content import BundleContent
from edgerun.export.bundle_writer import write_bundle
from edgerun.export.checkpoint.config import DecoderConfig
from edgerun.export.checkpoint.open import open_source
from edgerun.export.recipe import ExportRecipe, with_methods
from edgerun.export.report.compared_plans import uniform_plan
from edgerun.runtime.measure.bundle_timing import BundleTimer
from processes import Worker
from rounds import Series, Stillness, alternate, join, median_ratio, spread

UNIFORM: Final = "int4/128"
ROWS: Final = (1, 4)
_CONTEXT: Final = 256
"""Tokens before those that are timed, as in the times that plans are made by."""
_PASSES: Final = 9
_CAPACITY: Final = 512
_TURNS: Final = 16
"""Of the exporter's own timer, by which predictions are judged: it takes the faster third of passes, as the times
that plans are made by do, and not the median."""

Plan = dict[str, WeightFormat]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--budgets", nargs="+", type=parse_budget, default=[parse_budget("3.5bpw")])
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    options = parser.parse_args()
    os.environ.setdefault("EDGERUN_CACHE", str(options.work / "cache"))
    source = checkpoint(options.work, SHAPES[options.shape])
    folder = options.work / options.shape / "mixed"
    shutil.rmtree(folder, ignore_errors=True)
    with open_source(source) as (config, _):
        times = load_or_measure(config, BASE_FORMATS)
        plans = {UNIFORM: with_embedding(config, uniform_plan(config, WeightFormat(4, 128)))}
        # The machine as it is, not as it was when the units were measured.
        times = times.scaled(measured_over_predicted(times, plans[UNIFORM], ROWS))
        plans |= {str(budget): plan_within(budget, config, times) for budget in options.budgets}
    try:
        bundles = {
            label: write(source, folder / str(number), plan) for number, (label, plan) in enumerate(plans.items())
        }
        timed = dict(zip(bundles, BundleTimer().time_passes(list(bundles.values()), ROWS, _TURNS), strict=True))
        found, memory = measure(bundles, options.restarts, options.rounds)
        disk = {label: sum(file.stat().st_size for file in path.glob("model.onnx*")) for label, path in bundles.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results = [
        account(label, plan, config, times, memory[label], found, timed[label], disk[label])
        for label, plan in plans.items()
    ]
    show(results)
    print(
        json.dumps(
            {"benchmark": "mixed_speed", "edgerun": edgerun.__version__, "shape": options.shape, "results": results}
        )
    )


def plan_within(budget: Budget, config: DecoderConfig, times: LinearTimes) -> Plan:
    """What the exporter chooses where all weights count alike."""
    timed = budget.measure is Measure.MILLISECONDS
    rows = dict.fromkeys((budget.width, *ROWS) if timed else ROWS)
    sizes = {linear.name: linear.weight_count for linear in planned_linears(config)}

    def alone(linear: str, form: WeightFormat) -> float:
        return sizes[linear] * 4.0**-form.bits * math.log(form.block)

    def together(plan: Mapping[str, WeightFormat]) -> float:
        return sum(alone(linear, plan[linear]) for linear in sizes)

    def measured_ratio(plan: Mapping[str, WeightFormat]) -> float:
        return measured_over_predicted(times, plan, [budget.width])

    with tempfile.TemporaryDirectory() as folder:
        limits = cost_limits(budget, config, [times.costs(count) for count in rows])
        problem = AllocationProblem(
            config, alone, [together], budget, limits, BASE_FORMATS, measured_ratio if timed else None
        )
        found = allocate(problem, Path(folder), SearchSettings(generations=0))
    return dict(found.plan)


def write(source: Path, folder: Path, plan: Plan) -> Path:
    """A bundle of that plan."""
    folder.mkdir(parents=True)
    with open_source(source) as (config, weights):
        recipe = ExportRecipe(method=Method.RTN)
        formats = with_methods(plan, recipe.methods)
        context = recipe.context_for(config)
        write_bundle(folder, BundleContent(weights, weights, config, formats, context, recipe.layout, ""))
    return folder


def measure(
    bundles: dict[str, Path], restarts: int, rounds: int
) -> tuple[dict[int, Series], dict[str, dict[str, float]]]:
    """Seconds by rows of a pass and label, and resident MiB."""
    stillness = Stillness()
    parts: dict[int, list[Series]] = {rows: [] for rows in ROWS}
    memory: dict[str, dict[str, float]] = {}
    labels = list(bundles)
    for restart in range(restarts + 1):
        turn = restart % len(labels)
        with ExitStack() as stack:
            workers = [
                stack.enter_context(Worker(label, "edge-run", bundles[label], threads=None, capacity=_CAPACITY))
                for label in (*labels[turn:], *labels[:turn])
            ]
            for worker in workers:
                worker.ask("decode", context=_CONTEXT, tokens=4)
                memory[worker.label] = worker.ask("memory")
            if restart == 0:  # packs the weights for this machine, and has all of them in memory meanwhile
                continue
            for rows in ROWS:

                def run_pass(worker: Worker, rows: int = rows) -> float:
                    return float(worker.ask("passes", context=_CONTEXT, rows=rows, times=_PASSES))

                parts[rows].append(alternate(workers, rounds, run_pass, stillness))
    return {rows: join(series) for rows, series in parts.items()}, memory


def account(
    label: str,
    plan: Plan,
    config: DecoderConfig,
    times: LinearTimes,
    memory: dict[str, float],
    found: dict[int, Series],
    timed: Mapping[int, float],
    on_disk: int,
) -> dict[str, Any]:
    """The figures of one bundle."""
    read = sum(bytes_read(linear, plan[linear.name]) for linear in planned_linears(config))
    return {
        "plan": label,
        "bits_per_weight": 8 * read / weight_count(config),
        "formats": {
            str(form): sum(each == form for each in plan.values()) for form in BASE_FORMATS if form in plan.values()
        },
        "disk_mb": on_disk / 1e6,
        "read_mb": read / 1e6,
        "resident_mib": memory["resident"],
        "passes": {
            str(rows): {
                "predicted_ms": times.milliseconds(plan, rows),
                "measured_ms": 1e3 * timed[rows],
                "median_ms": 1e3 * statistics.median(series[label]),
                "speed": 1 / median_ratio(series, label, UNIFORM),
                "time_ratio_quartiles": spread(series, label, UNIFORM),
            }
            for rows, series in found.items()
        },
    }


def show(results: list[dict[str, Any]]) -> None:
    """Print the tables."""
    base = results[0]
    print(f"{'plan':10} {'bits':>6} {'disk MB':>9} {'':>6} {'read MB':>9} {'resident MiB':>13} {'':>6}  formats")
    for each in results:
        disk, resident = (each[name] / base[name] for name in ("disk_mb", "resident_mib"))
        print(
            f"{each['plan']:10} {each['bits_per_weight']:6.2f} {each['disk_mb']:9.1f} {disk:6.3f} "
            f"{each['read_mb']:9.1f} {each['resident_mib']:13.0f} {resident:6.3f}  {each['formats']}"
        )
    for rows in map(str, ROWS):
        print(f"passes of {rows}: milliseconds predicted, measured, their ratio; in use, times as fast as {UNIFORM}")
        for each in results:
            one = each["passes"][rows]
            predicted, measured = one["predicted_ms"], one["measured_ms"]
            ratios = f"{predicted / measured:7.3f} {one['speed']:7.3f}"
            print(f"  {each['plan']:10} {predicted:8.2f} {measured:8.2f} {ratios}")


if __name__ == "__main__":
    main()
