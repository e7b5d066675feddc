"""What a pass over a model takes, unit by unit: measured once for each kind of unit and format, added up for any plan.

The time of a pass is that of its units, which depends on their formats, and the rest, which does not: attention, norms,
activations, and what it takes to start the next node. The models that are measured (`timing_bundles`) have units of all
formats side by side in one pass, so that whatever slows a pass slows all of them; and passes as a whole are timed
without a profiler, over these models and over some of a single format, to which the sums are fitted (`pass_fit`).
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from ...models.cache import cache_folder
from ...models.json_file import is_finite
from ...models.manifest import WeightFormat
from ...models.progress import Progress, silent
from ...runtime.measure.bundle_timing import BundleTimer, PassNodeTimes
from ...runtime.measure.measurement_store import MeasurementKey, MeasurementStore
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, fused_linears
from ..graph import inputs_outputs
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR, LADDER
from .pass_fit import WholePass, fit_passes
from .timing_bundles import TimingBundle, timing_bundles, uniform_bundles

ROWS: Final = (1, 2, 4, 8)
"""Of the passes that are measured; what lies between is interpolated."""
_ROUNDS: Final = 16
_FORMAT_VERSION: Final = 2
_STAGE: Final = "timing units"

Times = Mapping[int, float]
"""Milliseconds by rows of a pass."""


@dataclass(frozen=True)
class LinearTimes:
    """Milliseconds of passes over one model, on this machine."""

    config: DecoderConfig
    linears: Mapping[tuple[str, WeightFormat], Times]
    """By kind of unit (`kind_of`) and format; see `timed_form`."""
    rest: Times
    """What a pass takes besides its units."""

    def linear(self, linear: FusedLinear, form: WeightFormat, rows: int) -> float:
        """Milliseconds of one unit; none for an embedding, of which a pass reads a few rows.

        Raises:
            KeyError: that format was not measured.
        """
        if linear.name == EMBEDDING_LINEAR:
            return 0.0
        return at_rows(self.linears[kind_of(linear.name), timed_form(form)], rows)

    def milliseconds(self, plan: Mapping[str, WeightFormat], rows: int) -> float:
        """Milliseconds of a pass over `rows` rows of a model with that plan, the logits of all rows included.

        Raises:
            KeyError: a format of it was not measured, or a unit is missing.
        """
        linears = sum(self.linear(linear, plan[linear.name], rows) for linear in fused_linears(self.config))
        return at_rows(self.rest, rows) + linears

    def costs(self, rows: int) -> TimeCosts:
        """The times of passes over `rows` rows as what plans cost."""
        return TimeCosts(self, rows)

    def scaled(self, factor: float) -> LinearTimes:
        """All times by a factor: those of the machine when it is that much slower."""
        return replace(
            self,
            linears={key: _scaled(times, factor) for key, times in self.linears.items()},
            rest=_scaled(self.rest, factor),
        )

    def to_json(self) -> dict[str, Any]:
        """A plain object that `from_json` reads."""
        linears: dict[str, dict[str, Times]] = {}
        for (kind, form), times in self.linears.items():
            linears.setdefault(kind, {})[f"{form.bits}/{form.block}" + f"/{form.rank}" * (form.rank > 0)] = times
        return {"units": linears, "rest": self.rest}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], config: DecoderConfig) -> LinearTimes:
        """What `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            linears = {
                (str(kind), _read(form)): _times(times)
                for kind, forms in data["units"].items()
                for form, times in forms.items()
            }
            return cls(config, linears, _times(data["rest"]))
        except (KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"holds no times of units: {error}") from error


@dataclass(frozen=True)
class TimeCosts:
    """Milliseconds of a pass over some rows; `Costs` of plans."""

    times: LinearTimes
    rows: int

    @property
    def fixed(self) -> float:
        """What a pass takes besides its units."""
        return at_rows(self.times.rest, self.rows)

    def of(self, linear: FusedLinear, form: WeightFormat) -> float:
        """What a unit takes."""
        return self.times.linear(linear, form, self.rows)


def known_or_measured(
    config: DecoderConfig,
    forms: Iterable[WeightFormat] = LADDER,
    progress: Progress = silent,
    timer: BundleTimer | None = None,
) -> LinearTimes:
    """The times of a model of that shape under the timer's conditions, from the cache or measured now.

    Those from the cache are of the machine as it was; see `whole_passes`.

    Raises:
        BundleError, EdgeError: ONNX Runtime cannot run the models that are measured.
        OSError: the disk refused a write.
    """
    timed = tuple(dict.fromkeys(map(timed_form, forms)))
    timer = timer or BundleTimer()
    store = MeasurementStore("linear-times", _FORMAT_VERSION, partial(LinearTimes.from_json, config=config))
    key = MeasurementKey((replace(config, tied_head=True), timed, timer.conditions), {})
    times = store.load(key)
    if times is None:
        times = measure(config, timed, progress, timer=timer)
        store.save(key, times)
    return times


def measure(
    config: DecoderConfig,
    forms: Sequence[WeightFormat] = LADDER,
    progress: Progress = silent,
    rounds: int = _ROUNDS,
    timer: BundleTimer | None = None,
) -> LinearTimes:
    """Measure the times of a model of that shape.

    Args:
        config: the model's numbers.
        forms: to be measured.
        progress: hears the stage "timing units".
        rounds: turns of the timer.
        timer: runs and times the models that are made for it.

    Raises:
        BundleError, EdgeError: ONNX Runtime cannot run them.
        OSError: the disk refused a write.
    """
    timed = tuple(dict.fromkeys(map(timed_form, forms)))
    mixed, uniform = timing_bundles(config, timed), uniform_bundles(config, timed)
    passes = _timed([*mixed, *uniform], timer or BundleTimer(), rounds, progress)
    linears = _linears(config, mixed, passes[: len(mixed)])
    return _fitted(LinearTimes(config, linears, dict.fromkeys(ROWS, 0.0)), [*mixed, *uniform], passes)


def _timed(
    bundles: Sequence[TimingBundle], timer: BundleTimer, rounds: int, progress: Progress
) -> list[dict[int, PassNodeTimes]]:
    """Times of models that are written for it."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="units-", dir=cache_folder()) as folder:
        paths = [Path(folder) / str(number) for number in range(len(bundles))]
        for number, (bundle, path) in enumerate(zip(bundles, paths, strict=True)):
            progress(_STAGE, number / (2 * len(bundles)))
            bundle.write(path)
        progress(_STAGE, 0.5)
        passes = timer.time_nodes(paths, ROWS, rounds)
    progress(_STAGE, 1.0)
    return passes


def _linears(
    config: DecoderConfig, bundles: Sequence[TimingBundle], passes: Sequence[Mapping[int, PassNodeTimes]]
) -> dict[tuple[str, WeightFormat], Times]:
    """Milliseconds of units by kind and format, the mean of all that there are."""
    seen: defaultdict[tuple[str, WeightFormat], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for bundle, by_rows in zip(bundles, passes, strict=True):
        for rows, times in by_rows.items():
            for name, form in bundle.plan.items():
                if name != EMBEDDING_LINEAR:
                    seen[kind_of(name), form][rows].append(1e3 * linear_seconds(times.nodes, name, config))
    return {key: {rows: fmean(times) for rows, times in by_rows.items()} for key, by_rows in seen.items()}


def _fitted(
    times: LinearTimes, bundles: Sequence[TimingBundle], passes: Sequence[Mapping[int, PassNodeTimes]]
) -> LinearTimes:
    """Times whose sums are near to the passes, and the rest of a pass."""
    # One layer and a head of another format are there to time the head; most of such a pass may lie in a cache.
    deep = max(bundle.config.layers for bundle in bundles) > 1
    counted = [pair for pair in zip(bundles, passes, strict=True) if pair[0].config.layers > 1 or not deep]
    fits = {
        rows: fit_passes([_whole(times, bundle, by_rows[rows].seconds, rows) for bundle, by_rows in counted])
        for rows in times.rest
    }
    linears = {
        (kind, form): {rows: each * fits[rows].factors.get(form.bits, 1.0) for rows, each in by_rows.items()}
        for (kind, form), by_rows in times.linears.items()
    }
    return LinearTimes(times.config, linears, {rows: fit.layer * times.config.layers for rows, fit in fits.items()})


def _whole(times: LinearTimes, bundle: TimingBundle, seconds: float, rows: int) -> WholePass:
    """A pass, and what its units would take by themselves."""
    linears: defaultdict[int, float] = defaultdict(float)
    for linear in fused_linears(bundle.config):
        linears[bundle.plan[linear.name].bits] += times.linear(linear, bundle.plan[linear.name], rows)
    return WholePass(bundle.config.layers, 1e3 * seconds, linears)


def linear_seconds(nodes: Mapping[str, float], linear: str, config: DecoderConfig) -> float:
    """Seconds of the nodes that a unit consists of: one, or several whose names begin with the unit's."""
    if linear == HEAD_LINEAR:
        return nodes[inputs_outputs.LOGITS if config.logits_softcap is None else "head.product"]
    return sum(seconds for name, seconds in nodes.items() if name == linear or name.startswith(f"{linear}."))


def kind_of(linear: str) -> str:
    """What units of all layers have in common: qkv, o, gate_up, down; a head is a kind of its own."""
    return linear.rsplit(".", 1)[-1]


def timed_form(form: WeightFormat) -> WeightFormat:
    """What of a format its time depends on: bits, blocks and rank.

    How codes were chosen does not matter, nor what the scales are; and zero points are packed into the sums of blocks,
    which are read in any case.
    """
    return WeightFormat(form.bits, form.block, rank=form.rank)


def at_rows(times: Times, rows: int) -> float:
    """Milliseconds of a pass over `rows` rows: linear between those that were measured, and beyond the last."""
    known = sorted(times)
    if len(known) == 1:
        return times[known[0]]
    upper = min(max(bisect_right(known, rows), 1), len(known) - 1)
    left, right = known[upper - 1], known[upper]
    return times[left] + (times[right] - times[left]) * (rows - left) / (right - left)


def _scaled(times: Times, factor: float) -> Times:
    return {rows: milliseconds * factor for rows, milliseconds in times.items()}


def _times(data: Mapping[str, Any]) -> Times:
    times = {int(rows): milliseconds for rows, milliseconds in data.items()}
    if not times or not all(map(is_finite, times.values())):
        raise ValueError("holds times that are none")
    return times


def _read(text: str) -> WeightFormat:
    bits, block, *rank = map(int, text.split("/"))
    return WeightFormat(bits, block, rank=sum(rank))
