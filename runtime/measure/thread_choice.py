"""Measures with how many threads a model runs fastest on this machine, and remembers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from ...models.bundle import Bundle
from ...models.graph_variant import DeviceKind
from ...models.json_file import Count
from ...models.progress import Progress, silent
from ..devices.processor import default_threads, usable_cores, usable_physical_cores
from ..graph.bound_graph import BoundGraph
from ..graph.open_graph import open_graph
from ..graph.session import SessionConfig
from .bundle_timing import bind_filled, compare_pair
from .measurement_store import MeasurementKey, MeasurementStore, model_key
from .system_load import LoadMeter

_WIDTHS: Final = (1, 4)
"""Pass widths whose times are added up: a token of plain decoding, and a draft that is verified."""
_WORTH: Final = 0.95
"""A number of threads replaces the default one if passes take at most this share of its time."""


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads with which a model is fastest."""

    threads: Count
    seconds: Mapping[int, float]
    """Seconds of a pass of every measured width together, by number of threads."""
    busy: bool = False
    """Whether other programs used the processor meanwhile; the choice is then not stored."""


THREAD_CHOICES: Final = MeasurementStore.of_records("threads", 1, ThreadChoice)
"""Numbers of threads with which models are fastest on this machine."""


def chosen_threads(bundle: Bundle, config: SessionConfig) -> int:
    """The number of threads that was measured to be fastest; 0 for the default, or if nothing was measured."""
    if config.device.kind is not DeviceKind.CPU:
        return 0
    choice = THREAD_CHOICES.load(_key(bundle, config))
    if choice is None or choice.threads > usable_cores() or choice.threads == default_threads():
        return 0
    return choice.threads


def thread_candidates() -> list[int]:
    """Numbers of threads worth measuring, the default first: all physical cores, and half of the default ones."""
    default = default_threads()
    others = {usable_physical_cores(), (default + 1) // 2} - {default}
    return [default, *sorted(others, reverse=True)]


def choose_threads(bundle: Bundle, config: SessionConfig, progress: Progress = silent) -> ThreadChoice:
    """Measure which number of threads is fastest, and store it unless other programs disturbed the measurement.

    Two numbers at a time take turns, so that at most two sessions are in memory.

    Args:
        bundle: the model.
        config: how its graph is run, apart from the number of threads.
        progress: receives the stage and the fraction done, 0 to 1.

    Raises:
        BundleError: the model is damaged, or edge-run cannot decode with it.
        ContextError: the model's context is too short for a pass.
        EdgeError: ONNX Runtime failed.
    """
    default, *others = thread_candidates()
    best, busy = default, False
    seconds: dict[int, float] = {}
    for number, count in enumerate(others):
        progress("comparing numbers of threads", number / len(others))
        meter = LoadMeter(max(best, count))
        pair = (best, count)
        times = compare_pair([_open(bundle, replace(config, threads=each)) for each in pair], _WIDTHS)
        seconds.update(zip(pair, times, strict=True))
        busy = busy or meter.is_busy
        if times[1] < _WORTH * times[0]:
            best = count
    progress("comparing numbers of threads", 1.0)
    choice = ThreadChoice(best, seconds, busy)
    if seconds and not busy:
        THREAD_CHOICES.save(_key(bundle, config), choice)
    return choice


def _key(bundle: Bundle, config: SessionConfig) -> MeasurementKey:
    key = model_key(bundle, replace(config, threads=0, shares_cores=False))
    return replace(key, parts=(*key.parts, default_threads(), usable_cores()))


def _open(bundle: Bundle, config: SessionConfig) -> BoundGraph:
    return bind_filled(open_graph(bundle, config, cache=True), bundle)
