"""Times of forward passes as sums of measured times of linears.

Each kind of linear is measured once in each format. A pass takes the time of its linears, which depends on their
formats, plus an overhead that does not: attention, norms, activations, and the start of each node. The timed models
(`timing_bundles`) have linears of all formats side by side, so that a disturbance slows all of them alike. Whole passes
over these models, and over models of one format, are timed without a profiler, and the sums of linear times are fitted
to them.

The fit has a factor for each number of bits, since a linear takes a few percent more or less among linears of its own
format than among others, and the overhead of a layer. It is least squares of relative errors with a ridge (Hoerl and
Kennard, 1970) that pulls the factors towards 1 where the passes do not determine them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np

from ...models.atomic import temporary_folder
from ...models.json_file import is_finite
from ...models.manifest import WeightFormat
from ...models.progress import Progress, silent
from ...models.user_folders import cache_folder
from ...runtime.measure.bundle_timing import BundleTimer, PassNodeTimes
from ...runtime.measure.measurement_store import MeasurementStore
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, QuantPlan
from ..checkpoint.layout import fused_linears
from ..graph import inputs_outputs
from ..graph.decoder_parts import EXPERTS_NODE
from ..quantization.codes import kernel_bits
from .format_candidates import BASE_FORMATS, EMBEDDING_LINEAR, HEAD_LINEAR
from .plan_costs import Costs, weight_count
from .timing_bundles import TimingBundle, timing_bundles, uniform_bundles

WIDTHS: Final = (1, 2, 4, 8)
"""Widths of the passes that are measured; times in between are interpolated."""
STAGE: Final = "timing linears"
_ROUNDS: Final = 16
_WEIGHTS_PER_ROUND: Final = 1 << 20
"""Models of so many weights for each of the `_ROUNDS` and more are timed in all rounds. Smaller ones lie in caches, and
sessions and pauses would take longer than their passes."""
_FORMAT_VERSION: Final = 3
_RIDGE: Final = 0.1
"""Weight of a factor's distance from 1 relative to the relative error of a pass."""
_MIN_FACTOR, _MAX_FACTOR = 0.7, 1.4
"""Factors beyond these come from disturbed measurements."""

Times = Mapping[int, float]
"""Milliseconds by the width of a pass."""
_Passes = Sequence[Mapping[int, PassNodeTimes]]
"""Measured passes of each model, by their width."""


@dataclass(frozen=True)
class LinearTimes:
    """Times of passes over one model on this machine."""

    config: DecoderConfig
    linears: Mapping[tuple[str, WeightFormat], Times]
    """Times of linears by their kind (`linear_kind`) and format (`timed_format`)."""
    overhead: Times
    """Time of a pass without its linears."""
    slowdown: float = 1.0
    """Factor of all times, for a machine that has become slower."""

    def linear(self, linear: FusedLinear, weight_format: WeightFormat, width: int) -> float:
        """Milliseconds of one linear; 0 for an embedding, of which a pass reads a few rows.

        Raises:
            KeyError: The format was not measured.
        """
        if linear.name == EMBEDDING_LINEAR:
            return 0.0
        return self.slowdown * interpolated(self.linears[linear_kind(linear.name), timed_format(weight_format)], width)

    def milliseconds(self, plan: QuantPlan, width: int) -> float:
        """Milliseconds of a pass over `width` tokens of a model with that plan, including the logits of all tokens.

        Raises:
            KeyError: A format was not measured, or a linear is missing in the plan.
        """
        linears = sum(self.linear(linear, plan[linear.name], width) for linear in fused_linears(self.config))
        return self.slowdown * interpolated(self.overhead, width) + linears

    def costs(self, width: int) -> Costs:
        """Milliseconds of passes over `width` tokens as costs of plans; a linear and the one paired with it are one."""

        def of(linear: FusedLinear, weight_format: WeightFormat) -> float:
            both = (linear,) if linear.paired is None else (linear, linear.paired)
            return sum(self.linear(each, weight_format, width) for each in both)

        return Costs(of, self.slowdown * interpolated(self.overhead, width))

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads."""
        linears: dict[str, dict[str, Times]] = {}
        for (kind, timed), times in self.linears.items():
            linears.setdefault(kind, {})[f"{timed.bits}/{timed.block}"] = times
        return {"linears": linears, "overhead": self.overhead}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], config: DecoderConfig) -> LinearTimes:
        """Read an object of `to_json`.

        Raises:
            ValueError: The object is something else.
        """
        try:
            linears = {}
            for kind, formats in data["linears"].items():
                for text, times in formats.items():
                    bits, block = map(int, text.split("/"))
                    linears[str(kind), WeightFormat(bits, block)] = _parsed_times(times)
            return cls(config, linears, _parsed_times(data["overhead"]))
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"not times of linears: {error}") from error


def load_or_measure(
    config: DecoderConfig,
    formats: Iterable[WeightFormat] = BASE_FORMATS,
    progress: Progress = silent,
    timer: BundleTimer | None = None,
) -> LinearTimes:
    """Load the times of a model's shape from the cache, or measure and store them.

    Times from the cache are from the machine as it was; see `allocate.measured_over_predicted`.

    Raises:
        BundleError, EdgeError: ONNX Runtime cannot run the timed models.
        OSError: The disk refused a write.
    """
    timed = tuple(dict.fromkeys(map(timed_format, formats)))
    timer = timer or BundleTimer()
    store = MeasurementStore(
        "linear-times", _FORMAT_VERSION, partial(LinearTimes.from_json, config=config), LinearTimes.to_json
    )
    key = replace(config, tied_head=True), timed, timer.conditions
    times = store.load(key)
    if times is None:
        rounds = max(1, min(_ROUNDS, weight_count(config) // _WEIGHTS_PER_ROUND))
        times = measure(config, timed, progress, rounds, timer)
        store.save(key, times)
    return times


def measure(
    config: DecoderConfig,
    formats: Sequence[WeightFormat] = BASE_FORMATS,
    progress: Progress = silent,
    rounds: int = _ROUNDS,
    timer: BundleTimer | None = None,
) -> LinearTimes:
    """Measure the times of a model's shape.

    Args:
        config: The model's numbers.
        formats: Formats to measure (`timed_format`).
        progress: Receives the stage "timing linears".
        rounds: Number of turns of each timed model.
        timer: Times the models.

    Raises:
        BundleError, EdgeError: ONNX Runtime cannot run the timed models.
        OSError: The disk refused a write.
    """
    mixed, uniform = timing_bundles(config, formats), uniform_bundles(config, formats)
    bundles = [*mixed, *uniform]
    with temporary_folder(cache_folder(), "linears") as folder:
        paths = [folder / str(number) for number in range(len(bundles))]
        for number, (bundle, path) in enumerate(zip(bundles, paths, strict=True)):
            progress(STAGE, number / (2 * len(bundles)))
            bundle.write(path)
        progress(STAGE, 0.5)
        passes = (timer or BundleTimer()).time_nodes(paths, WIDTHS, rounds)
    progress(STAGE, 1.0)
    found: defaultdict[tuple[str, WeightFormat], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for bundle, by_width in zip(mixed, passes, strict=False):
        for width, times in by_width.items():
            for name, weight_format in bundle.plan.items():
                if name != EMBEDDING_LINEAR:
                    milliseconds = 1e3 * linear_seconds(times.nodes, name, config)
                    found[linear_kind(name), weight_format][width].append(milliseconds)
    linears = {key: {width: fmean(each) for width, each in by_width.items()} for key, by_width in found.items()}
    return _fitted(LinearTimes(config, linears, dict.fromkeys(WIDTHS, 0.0)), bundles, passes)


def _fitted(times: LinearTimes, bundles: Sequence[TimingBundle], passes: _Passes) -> LinearTimes:
    """Fit linear times, and the overhead of a pass, to the times of whole passes."""
    # A model of one layer is there to time its head; most of its pass may lie in a cache.
    deep = max(bundle.config.layers for bundle in bundles) > 1
    counted = [pair for pair in zip(bundles, passes, strict=True) if pair[0].config.layers > 1 or not deep]
    fits = {
        width: fit_passes([_whole_pass(times, bundle, by_width[width].seconds, width) for bundle, by_width in counted])
        for width in times.overhead
    }
    linears = {
        (kind, weight_format): {
            width: each * fits[width][0].get(weight_format.bits, 1.0) for width, each in by_width.items()
        }
        for (kind, weight_format), by_width in times.linears.items()
    }
    overhead = {width: layer * times.config.layers for width, (_, layer) in fits.items()}
    return LinearTimes(times.config, linears, overhead)


class WholePass(NamedTuple):
    """A pass over a model, timed as a whole."""

    layers: int
    milliseconds: float
    by_bits: Mapping[int, float]
    """Sum of the milliseconds of its linears, timed one by one, by their bits."""


def fit_passes(passes: Sequence[WholePass]) -> tuple[dict[int, float], float]:
    """Fit factors and the overhead of a layer to at least one pass.

    Returns:
        The time of a linear in a whole pass divided by its time alone, by its bits; and the overhead of each layer in
        milliseconds. Profiling adds time to each linear that is subtracted here, so it may be negative.
    """
    bits = sorted({each for one in passes for each in one.by_bits})
    rows = [[*(one.by_bits.get(each, 0.0) for each in bits), one.layers] for one in passes]
    milliseconds = np.array([one.milliseconds for one in passes])
    ridge = _RIDGE * np.eye(len(bits), len(bits) + 1)
    system = np.vstack([np.array(rows) / milliseconds[:, None], ridge])
    wanted = np.concatenate([np.ones(len(passes)), np.full(len(bits), _RIDGE)])
    factors = np.clip(np.linalg.lstsq(system, wanted, rcond=None)[0][:-1], _MIN_FACTOR, _MAX_FACTOR)
    (layer,) = np.linalg.lstsq(system[:, -1:], wanted - system[:, :-1] @ factors, rcond=None)[0]
    return dict(zip(bits, map(float, factors), strict=True)), float(layer)


def _whole_pass(times: LinearTimes, bundle: TimingBundle, seconds: float, width: int) -> WholePass:
    by_bits: defaultdict[int, float] = defaultdict(float)
    for linear in fused_linears(bundle.config):
        weight_format = bundle.plan[linear.name]
        by_bits[weight_format.bits] += times.linear(linear, weight_format, width)
    return WholePass(bundle.config.layers, 1e3 * seconds, by_bits)


def linear_seconds(nodes: Mapping[str, float], linear: str, config: DecoderConfig) -> float:
    """Seconds of the nodes of a linear: one node, or several whose names begin with the linear's.

    The operator of experts counts as their first linear.
    """
    if linear == HEAD_LINEAR:
        return nodes[inputs_outputs.LOGITS if config.logits_softcap is None else "head.product"]
    own = [linear]
    if linear_kind(linear) == "gate_up":
        own.append(linear.removesuffix("gate_up") + EXPERTS_NODE)
    return sum(
        seconds for name, seconds in nodes.items() if any(name == each or name.startswith(f"{each}.") for each in own)
    )


def linear_kind(linear: str) -> str:
    """The name of a linear without its layer: qkv, o, gate_up, down or head."""
    return linear.rsplit(".", 1)[-1]


def timed_format(weight_format: WeightFormat) -> WeightFormat:
    """The part of a format that its time depends on: bits and block size.

    The method and the kind of scales do not matter; zero points are packed into the sums of blocks, which are read in
    any case.
    """
    return WeightFormat(kernel_bits(weight_format.bits), weight_format.block)


def interpolated(times: Times, width: int) -> float:
    """Milliseconds of a pass over `width` tokens: linear between the measured widths and beyond the last."""
    known = sorted(times)
    if len(known) == 1:
        return times[known[0]]
    upper = min(max(bisect_right(known, width), 1), len(known) - 1)
    left, right = known[upper - 1], known[upper]
    return times[left] + (times[right] - times[left]) * (width - left) / (right - left)


def _parsed_times(data: Mapping[str, Any]) -> Times:
    times = {int(width): milliseconds for width, milliseconds in data.items()}
    if not times or not all(map(is_finite, times.values())):
        raise ValueError("not times")
    return times
