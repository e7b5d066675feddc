"""Size, memory and speed of mixed weights, compared with uniform 4-bit weights.

Example: python benchmarks/mixed_speed.py --shape qwen2.5-0.5b --budgets 3.5bpw 8ms

Weights are random (see checkpoints.py), so quality cannot be measured: every weight is assumed to lose a quarter as
much with each further bit, and more in larger blocks. Plans are those that the exporter finds for these losses within a
budget; for a time budget it measures whole passes. They are written as bundles, rounded to nearest. Every bundle runs
in a process of its own, in turn with the others, for passes over 1 and 4 tokens. Prints tables (bytes on disk and
resident, time relative to uniform int4/128, predicted and measured milliseconds), then one JSON line.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import edgerun
from artifacts import checkpoint
from edgerun.export import Method, WeightFormat
from edgerun.export.allocation.allocate import allocate, cost_measures, measured_over_predicted
from edgerun.export.allocation.choices import Sensitivity
from edgerun.export.allocation.format_candidates import BASE_FORMATS, completed_plan, planned_linears
from edgerun.export.allocation.linear_times import LinearTimes, load_or_measure
from edgerun.export.allocation.plan_costs import Budget, Measure, bytes_read, parse_budget, weight_count
from edgerun.export.bundle_content import BundleContent
from edgerun.export.bundle_writer import write_bundle
from edgerun.export.checkpoint.config import DecoderConfig
from edgerun.export.checkpoint.open import open_source
from edgerun.export.quantization.methods import with_methods
from edgerun.export.recipe import ExportRecipe
from edgerun.export.report.compared_plans import uniform_plan
from edgerun.runtime.measure.bundle_timing import BundleTimer
from processes import Worker
from rounds import IdleLoad, Series, alternate, join, median_ratio, restarted, spread
from shapes import SHAPES

UNIFORM: Final = "int4/128"
WIDTHS: Final = (1, 4)
_CONTEXT: Final = 256
"""Number of cached tokens, as in the timings that plans are based on."""
_PASSES: Final = 9
_CAPACITY: Final = 512
_ROUNDS: Final = 16
"""Rounds of the exporter's own timer, which predictions are compared with: it uses the faster third of the passes, like
the timings that plans are based on, and not the median."""

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
        plans = {UNIFORM: completed_plan(config, uniform_plan(config, WeightFormat(4, 128)))}
        # The speed of the machine now, not when the linears were timed.
        times = replace(times, slowdown=measured_over_predicted(times, plans[UNIFORM], WIDTHS))
        plans |= {str(budget): plan_within(budget, config, times) for budget in options.budgets}
    try:
        bundles = {
            label: write(source, folder / str(number), plan) for number, (label, plan) in enumerate(plans.items())
        }
        exporter_seconds = dict(
            zip(bundles, BundleTimer().time_passes(list(bundles.values()), WIDTHS, _ROUNDS), strict=True)
        )
        series_by_width, memory = measure(bundles, options.restarts, options.rounds)
        disk = {label: sum(file.stat().st_size for file in path.glob("model.onnx*")) for label, path in bundles.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results = [
        figures_of(label, plan, config, times, memory[label], series_by_width, exporter_seconds[label], disk[label])
        for label, plan in plans.items()
    ]
    show(results)
    print(
        json.dumps(
            {"benchmark": "mixed_speed", "edgerun": edgerun.__version__, "shape": options.shape, "results": results}
        )
    )


def plan_within(budget: Budget, config: DecoderConfig, times: LinearTimes) -> Plan:
    """The plan that the exporter chooses if all weights are equally important."""
    is_time = budget.measure is Measure.MILLISECONDS
    widths = dict.fromkeys((budget.width, *WIDTHS) if is_time else WIDTHS)
    sizes = {linear.name: linear.weight_count for linear in planned_linears(config)}

    def alone(linear: str, form: WeightFormat) -> float:
        return sizes[linear] * 4.0**-form.bits * math.log(form.block)

    def together(plan: Mapping[str, WeightFormat]) -> float:
        return sum(alone(linear, plan[linear]) for linear in sizes)

    def measured_ratio(plan: Mapping[str, WeightFormat]) -> float:
        return measured_over_predicted(times, plan, [budget.width])

    costs = cost_measures(budget, config, [times.costs(width) for width in widths])
    sensitivities = {linear: tuple(Sensitivity(form, alone(linear, form)) for form in BASE_FORMATS) for linear in sizes}
    ratio = measured_ratio if is_time else None
    return dict(allocate(config, sensitivities, (together, together), budget, costs, ratio).plan)


def write(source: Path, folder: Path, plan: Plan) -> Path:
    """Write a bundle with that plan."""
    folder.mkdir(parents=True)
    with open_source(source) as (config, weights):
        recipe = ExportRecipe(method=Method.RTN)
        formats = with_methods(plan, recipe.methods)
        context = recipe.context_for(config)
        content = BundleContent(source=weights, original=weights, config=config, plan=formats, context=context)
        write_bundle(folder, content)
    return folder


def measure(
    bundles: dict[str, Path], restarts: int, rounds: int
) -> tuple[dict[int, Series], dict[str, dict[str, float]]]:
    """Seconds by pass width and label, and resident MiB."""
    idle_load = IdleLoad()
    parts: dict[int, list[Series]] = {width: [] for width in WIDTHS}
    memory: dict[str, dict[str, float]] = {}

    def start(label: str) -> Worker:
        return Worker(label, "edge-run", bundles[label], threads=None, capacity=_CAPACITY)

    for restart, workers in enumerate(restarted(list(bundles), restarts + 1, start)):
        for worker in workers:
            worker.call("decode", context=_CONTEXT, tokens=4)
            memory[worker.label] = worker.call("memory")
        if restart == 0:  # packs the weights for this machine, and holds all of them in memory meanwhile
            continue
        for width in WIDTHS:

            def run_pass(worker: Worker, width: int = width) -> float:
                return float(worker.call("passes", context=_CONTEXT, width=width, repeats=_PASSES))

            parts[width].append(alternate(workers, rounds, run_pass, idle_load))
    return {width: join(series) for width, series in parts.items()}, memory


def figures_of(
    label: str,
    plan: Plan,
    config: DecoderConfig,
    times: LinearTimes,
    memory: dict[str, float],
    series_by_width: dict[int, Series],
    exporter_seconds: Mapping[int, float],
    on_disk: int,
) -> dict[str, Any]:
    """Figures of one bundle."""
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
            str(width): {
                "predicted_ms": times.milliseconds(plan, width),
                "measured_ms": 1e3 * exporter_seconds[width],
                "median_ms": 1e3 * statistics.median(series[label]),
                "speed": 1 / median_ratio(series, label, UNIFORM),
                "time_ratio_quartiles": spread(series, label, UNIFORM),
            }
            for width, series in series_by_width.items()
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
    for width in map(str, WIDTHS):
        print(f"passes over {width} tokens: ms predicted and measured, their ratio; speed relative to {UNIFORM}")
        for each in results:
            one = each["passes"][width]
            predicted, measured = one["predicted_ms"], one["measured_ms"]
            ratios = f"{predicted / measured:7.3f} {one['speed']:7.3f}"
            print(f"  {each['plan']:10} {predicted:8.2f} {measured:8.2f} {ratios}")


if __name__ == "__main__":
    main()
