"""Predicted times of quantization plans, from times of single linears, compared with measured ones.

Example: python benchmarks/linear_times.py --shape qwen2.5-0.5b --plans 6

Times the linears of a shape in every format (`export.allocation.linear_times`) and, in the same rounds, passes of
models of that shape with random weights. The first plan has 4 bits in blocks of 128 everywhere. The second has 2 bits
in randomly chosen linears of the layers, so that packed weights have 3.5 bits on average. Random plans of three kinds
follow in turn: any format for every linear, one of two formats for every linear, and one format for every kind of
linear in all layers. Prints a table (megabytes of the weights file and as read by a pass; predicted and measured
milliseconds, and their ratio; measured time relative to the first plan), then one JSON line. On Linux, run it with
`chrt --rr 1` to keep other programs off the cores.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import edgerun
from edgerun.export import WeightFormat
from edgerun.export.allocation.format_candidates import BASE_FORMATS, completed_plan, planned_linears
from edgerun.export.allocation.linear_times import linear_kind, measure
from edgerun.export.allocation.plan_costs import bytes_read, weight_count
from edgerun.export.allocation.timing_bundles import TimingBundle
from edgerun.export.checkpoint.config import DecoderConfig, read_config
from edgerun.models.bundle import WEIGHTS_NAME
from edgerun.runtime.measure.bundle_timing import BundleTimer, PassNodeTimes
from shapes import SHAPES

_WIDTHS = (1, 4)
_FOUR = WeightFormat(4, 128)
_TWO = WeightFormat(2, 128)
_BITS = 3.5


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--plans", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=16, help="rounds of the timer")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(options.shape, folder)
        uniform = completed_plan(config, {linear.name: _FOUR for linear in planned_linears(config)})
        plans = [
            uniform,
            partly_two(config, uniform, options.seed),
            *random_plans(config, options.plans, options.seed),
        ]
        paths = [folder / f"plan-{number}" for number in range(len(plans))]
        for plan, path in zip(plans, paths, strict=True):
            TimingBundle(replace(config, tied_head=True), plan).write(path)
        timer = TimerWithPlans(options.threads, paths)
        started = time.perf_counter()
        times = measure(config, rounds=options.rounds, timer=timer)
        files = [(path / WEIGHTS_NAME).stat().st_size / 1e6 for path in paths]
    print(f"{options.shape}: measured in {time.perf_counter() - started:.0f} s; us per linear at widths {_WIDTHS}")
    show_linears(config, times.to_json())
    results = []
    for width in _WIDTHS:
        print(f"passes over {width} tokens:")
        first = timer.measured[0][width].seconds
        for plan, passes, file in zip(plans, timer.measured, files, strict=True):
            size = sum(bytes_read(linear, plan[linear.name]) for linear in planned_linears(config)) / 1e6
            predicted, measured = times.milliseconds(plan, width), 1e3 * passes[width].seconds
            ratios = f"{predicted / measured:7.3f} {passes[width].seconds / first:7.3f}"
            print(f"  {file:7.1f} MB {size:7.1f} MB {predicted:8.2f} {measured:8.2f} {ratios}")
            results.append(
                {
                    "width": width,
                    "file_megabytes": file,
                    "megabytes": size,
                    "predicted_ms": predicted,
                    "measured_ms": measured,
                }
            )
    print(
        json.dumps(
            {"benchmark": "linear_times", "edgerun": edgerun.__version__, "shape": options.shape, "results": results}
        )
    )


class TimerWithPlans(BundleTimer):
    """A timer that also times the bundles of plans in the same rounds."""

    def __init__(self, threads: int, plans: Sequence[Path]) -> None:
        super().__init__(threads)
        self._plans = plans
        self.measured: list[dict[int, PassNodeTimes]] = []
        """Times of the plans' bundles, by pass width."""

    def time_nodes(self, bundles: Sequence[Path], widths: Sequence[int], rounds: int) -> list[dict[int, PassNodeTimes]]:
        """See `BundleTimer.time_nodes`."""
        times = super().time_nodes([*bundles, *self._plans], widths, rounds)
        self.measured = times[len(bundles) :]
        return times[: len(bundles)]


def config_of(shape: str, folder: Path) -> DecoderConfig:
    """The configuration of a shape."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape].config("bfloat16")), encoding="utf-8")
    return read_config(folder)


def partly_two(config: DecoderConfig, uniform: dict[str, WeightFormat], seed: int) -> dict[str, WeightFormat]:
    """A plan with 2 bits in randomly chosen linears, as many as make 3.5 bits per weight."""
    linears = list(planned_linears(config))
    plan = dict(uniform)
    for place in np.random.default_rng(seed).permutation(len(linears)):
        if sum(bytes_read(linear, plan[linear.name]) for linear in linears) * 8 <= _BITS * weight_count(config):
            break
        if linears[place].name != "head":
            plan[linears[place].name] = _TWO
    return plan


def random_plans(config: DecoderConfig, count: int, seed: int) -> list[dict[str, WeightFormat]]:
    """Random plans of the three kinds in turn."""
    rng = np.random.default_rng(seed)
    linears = [linear.name for linear in planned_linears(config)]
    plans = []
    for number in range(count):
        if number % 3 == 2:
            kinds = {linear_kind(linear): BASE_FORMATS[rng.integers(len(BASE_FORMATS))] for linear in linears}
            plan = {linear: kinds[linear_kind(linear)] for linear in linears}
        else:
            forms = (
                BASE_FORMATS
                if number % 3 == 0
                else [BASE_FORMATS[each] for each in rng.choice(len(BASE_FORMATS), 2, replace=False)]
            )
            plan = {linear: forms[rng.integers(len(forms))] for linear in linears}
        plans.append(completed_plan(config, plan))
    return plans


def show_linears(config: DecoderConfig, times: Mapping[str, Any]) -> None:
    """Print microseconds of each kind of linear in each format."""
    linears, rest = times["linears"], times["overhead"]
    print(f"{'':8} " + " ".join(f"{kind:>15}" for kind in linears))
    for name in next(iter(linears.values())):
        cells = (" ".join(f"{1e3 * formats[name][width]:7.0f}" for width in _WIDTHS) for formats in linears.values())
        print(f"{name:8} " + " ".join(cells))
    print(f"the rest of {config.layers} layers: " + ", ".join(f"{rest[width]:.2f} ms" for width in _WIDTHS))


if __name__ == "__main__":
    main()
