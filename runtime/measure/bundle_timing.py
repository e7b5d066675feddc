"""Times forward passes and graph nodes of several bundles in turn.

Other programs and heat change a machine's speed by more than the differences to be measured. The bundles therefore
take turns of a few passes, in the opposite order every other turn, and of every pass width the fastest third of the
passes is averaged: a disturbance makes a pass slower, never faster. A turn begins with a pause, because the threads of
the bundle before still spin, and with warm-up passes, because the caches still hold the other bundle's weights.

ONNX Runtime's profiler times the nodes, in sessions of their own because profiling takes time. The sessions whose
passes are timed as a whole run after them, on the same weights. Both are loaded several times: one load of a model is
a few percent faster than another, whatever its weights are, and the machine is faster in one minute than in the next.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from ...errors import DeviceError, EdgeError
from ...models.atomic import temporary_folder
from ...models.bundle import GRAPH_NAME, Bundle, open_bundle
from ...models.manifest import DeviceKind
from ...models.progress import Progress, silent
from ...models.user_folders import cache_folder
from ..devices.processor import machine
from ..devices.providers import available_devices, choose_device, device_identity
from ..graph.bound_graph import BoundGraph
from ..graph.device_loading import on_cpu_text, runs_whole
from ..graph.model_metadata import ModelMetadata, metadata_of
from ..graph.open_graph import open_graph
from ..graph.ort import RUNTIME_VERSION
from ..graph.packed_files import should_prepack, write_prepacked
from ..graph.session import DecoderGraph, GraphSession, SessionConfig
from .device_choice import (
    FASTEST_DEVICES,
    THREAD_CHOICES,
    FastestDevice,
    ThreadChoice,
    fastest_device_key,
    thread_candidates,
    thread_choice_key,
)
from .pass_timing import TYPICAL_CONTEXT, pad_cache, time_pass
from .system_load import GraphTimes, take_turns

PASSES_PER_TURN: Final = 5
"""Timed passes of each width in a turn."""
WARM_UP_PASSES: Final = 2
"""Passes at the beginning of a turn whose times are discarded."""
_PAUSE_S: Final = 0.02
_LOADS: Final = 4
"""How often node timing loads every bundle."""
_FASTEST_SHARE: Final = 3
"""The fastest one of so many passes is averaged."""
_WORTH: Final = 0.95
"""A device replaces the CPU, and a number of threads the default one, if passes take at most this share of its time."""
_WIDTHS: Final = (1, 4)
"""Pass widths whose times are added up: a token of plain decoding, and a draft that is verified."""
_NODE_SUFFIX: Final = "_kernel_time"


@dataclass(frozen=True)
class PassNodeTimes:
    """Seconds of one forward pass, as a whole and by graph node."""

    seconds: float
    """Seconds of the whole pass, measured without the profiler."""
    nodes: Mapping[str, float]
    """Seconds by node name, measured in separate passes; profiling adds a few microseconds to every node."""


class BundleTimer:
    """Times passes of bundles with ONNX Runtime on this machine's CPU.

    Args:
        threads: number of threads; 0 for `default_threads`.
    """

    def __init__(self, threads: int = 0) -> None:
        self._config = SessionConfig(choose_device("cpu"), threads)

    @property
    def conditions(self) -> str:
        """A key of everything besides the models that times depend on: device, threads, runtime version, machine."""
        return "\0".join((self._config.device.provider, str(self._config.threads), RUNTIME_VERSION, machine()))

    def time_passes(self, bundles: Sequence[Path], widths: Sequence[int], rounds: int) -> list[Mapping[int, float]]:
        """Time passes that compute the logits of all their positions.

        The weights lie in memory as they do in use: packed for this machine and memory-mapped.

        Args:
            bundles: folders of the bundles.
            widths: numbers of token positions of the passes.
            rounds: number of turns of every bundle.

        Returns:
            Seconds by width, for each bundle.

        Raises:
            BundleError: a bundle is damaged, or edge-run cannot decode with it.
            EdgeError: ONNX Runtime failed.
        """
        with packed_graphs(bundles) as graphs:
            return [*_pass_seconds(self._config, graphs, widths, rounds)]

    def time_heads(self, bundle: Path, graphs: Sequence[Path], rounds: int) -> list[float]:
        """Time passes of draft heads over one draft token.

        Args:
            bundle: folder of the target's bundle.
            graphs: graphs of heads over its hidden states.
            rounds: number of turns of every head.

        Returns:
            Seconds, for each head.

        Raises:
            BundleError: the bundle is damaged, or a graph is not a head.
            EdgeError: ONNX Runtime failed.
        """
        target = open_bundle(bundle)
        metadata = ModelMetadata(input_vocab=target.input_vocab, draft_head=True)
        bound = [bind_filled(GraphSession(graph, self._config, metadata), target) for graph in graphs]
        return [mean_of_fastest(times[1]) for times in time_in_turns(bound, (1,), rounds)]

    def time_nodes(self, bundles: Sequence[Path], widths: Sequence[int], rounds: int) -> list[dict[int, PassNodeTimes]]:
        """Time passes and their graph nodes; arguments and errors as for `time_passes`.

        Returns:
            Times by width, for each bundle.
        """
        loads = min(_LOADS, rounds)
        turns = -(-rounds // loads)
        with packed_graphs(bundles) as graphs:
            # Profiled sessions are closed before the others load: each counts all pages that it maps as its own.
            measured = [
                (
                    _node_seconds(self._config, graphs, widths, turns),
                    _pass_seconds(self._config, graphs, widths, turns),
                )
                for _ in range(loads)
            ]
        found: list[dict[int, PassNodeTimes]] = [{} for _ in bundles]
        for bundle, width in product(range(len(bundles)), widths):
            nodes = [nodes[bundle][width] for nodes, _ in measured]
            found[bundle][width] = PassNodeTimes(
                fmean(passes[bundle][width] for _, passes in measured),
                {node: fmean(times[node] for times in nodes) for node in nodes[0]},
            )
        return found


@contextmanager
def packed_graphs(bundles: Sequence[Path]) -> Iterator[list[tuple[Bundle, Path]]]:
    """Yield each bundle with the graph file to load: for large models a copy packed for this machine.

    The packed copies lie in a temporary folder, because the cache of packed graphs would evict other models for them.

    Raises:
        BundleError: a bundle is damaged.
    """
    with temporary_folder(cache_folder(), "timing") as folder:
        graphs = []
        for number, path in enumerate(bundles):
            bundle = open_bundle(path)
            graph = bundle.graph
            if should_prepack(bundle):
                graph = folder / str(number) / GRAPH_NAME
                graph.parent.mkdir()
                write_prepacked(bundle.graph, graph)
            graphs.append((bundle, graph))
        yield graphs


def bind_filled(session: DecoderGraph, bundle: Bundle) -> BoundGraph:
    """Bind a session to a KV cache filled as in a usual conversation."""
    bound = session.bind(session.arena(bundle.context or 2 * TYPICAL_CONTEXT))
    pad_cache(bound, min(TYPICAL_CONTEXT, bound.arena.limit // 2))
    return bound


def _pass_seconds(
    config: SessionConfig, graphs: Sequence[tuple[Bundle, Path]], widths: Sequence[int], rounds: int
) -> list[dict[int, float]]:
    """Load the graphs and return the seconds of a pass by width, for each."""
    bound = [bind_filled(GraphSession(graph, config, metadata_of(bundle)), bundle) for bundle, graph in graphs]
    times = time_in_turns(bound, widths, rounds)
    return [{width: mean_of_fastest(passes) for width, passes in by_width.items()} for by_width in times]


def _node_seconds(
    config: SessionConfig, graphs: Sequence[tuple[Bundle, Path]], widths: Sequence[int], rounds: int
) -> list[dict[int, dict[str, float]]]:
    """Load the graphs with profiling and return the seconds by width and node, for each."""
    with tempfile.TemporaryDirectory() as folder:
        sessions = [
            GraphSession(graph, replace(config, profile=Path(folder) / str(number)), metadata_of(bundle))
            for number, (bundle, graph) in enumerate(graphs)
        ]
        bound = [bind_filled(session, bundle) for session, (bundle, _) in zip(sessions, graphs, strict=True)]
        time_in_turns(bound, widths, rounds)
        return [_nodes_by_width(read_profile(session.end_profile()), widths) for session in sessions]


def time_in_turns(bound: Sequence[BoundGraph], widths: Sequence[int], rounds: int) -> list[dict[int, list[float]]]:
    """Time passes of sessions in turns.

    Args:
        bound: the sessions.
        widths: numbers of token positions of the passes.
        rounds: number of turns of every session.

    Returns:
        The seconds of the timed passes of each session by width.

    Raises:
        ContextError: a pass does not fit the context.
        EdgeError: ONNX Runtime failed.
    """
    turns, _ = take_turns([partial(_turn, each, widths) for each in bound], least=rounds, most=rounds)
    return [{width: [one for turn in each for one in turn[width]] for width in widths} for each in turns]


def _turn(bound: BoundGraph, widths: Sequence[int]) -> dict[int, list[float]]:
    """Seconds of the passes of one turn, by width."""
    time.sleep(_PAUSE_S)
    for _ in range(WARM_UP_PASSES):
        time_pass(bound, widths[0])
    return {width: [time_pass(bound, width) for _ in range(PASSES_PER_TURN)] for width in widths}


def _turn_s(bound: BoundGraph, widths: Sequence[int]) -> float:
    """Seconds of one pass of every width together: of the fastest ones of a turn."""
    return sum(map(min, _turn(bound, widths).values()))


def measure_fastest_device(bundle: Bundle, config: SessionConfig, progress: Progress = silent) -> FastestDevice:
    """Measure on which device a model decodes fastest, and store it.

    Every device that computes the whole graph, and computes it right, decodes in turns with the CPU, which runs it as
    `config` says.

    Raises:
        BundleError: the model is damaged, or edge-run cannot decode with it.
        ContextError: the model's context is too short for a pass.
        EdgeError: ONNX Runtime failed on the CPU.
    """
    # A simulator of an NPU is never faster than the CPU that it runs on.
    others = [
        device
        for device in available_devices()
        if device.kind is DeviceKind.GPU or (device.kind is DeviceKind.NPU and not device.simulated)
    ]
    cpu = config.device
    if not others:
        return FastestDevice(cpu.name, {})
    devices = {device.name: device for device in (cpu, *others)}
    configs = {name: replace(config, device=device, threads=0) for name, device in devices.items()}
    configs[cpu.name] = config
    best, seconds, refused, busy = _fastest(bundle, configs, (1,), lambda done: progress("comparing devices", done))
    identity = () if best == cpu.name else device_identity(devices[best])
    choice = FastestDevice(best, seconds, refused, identity, busy and best != cpu.name)
    if not choice.busy:
        FASTEST_DEVICES.save(fastest_device_key(bundle), choice)
    return choice


def _open(bundle: Bundle, config: SessionConfig) -> BoundGraph:
    """Load the graph on a device and bind it.

    Raises:
        EdgeError: the device cannot run it, runs it wrongly, or runs a part of it only.
    """
    graph = open_graph(bundle, config, cache=True)
    if not runs_whole(graph.on_cpu):
        raise DeviceError(f"it leaves a part of the graph to the CPU: {on_cpu_text(graph.on_cpu)}")
    bound = bind_filled(graph, bundle)
    bound.whole_logits = False  # as plain decoding of greedy text does
    return bound


def choose_threads(bundle: Bundle, config: SessionConfig, progress: Progress = silent) -> ThreadChoice:
    """Measure which number of threads is fastest, and store it unless other programs disturbed the measurement.

    Errors as for `measure_fastest_device`.
    """
    configs = {str(count): replace(config, threads=count) for count in thread_candidates()}
    stage = "comparing numbers of threads"
    best, seconds, _, busy = _fastest(bundle, configs, _WIDTHS, lambda done: progress(stage, done))
    choice = ThreadChoice(configs[best].threads, {int(count): each for count, each in seconds.items()}, busy)
    if seconds and not busy:
        THREAD_CHOICES.save(thread_choice_key(bundle, config), choice)
    return choice


def _fastest(
    bundle: Bundle, configs: Mapping[str, SessionConfig], widths: Sequence[int], progress: Callable[[float], None]
) -> tuple[str, dict[str, float], dict[str, str], bool]:
    """Compare ways to run a model, each with the best one before it, so that at most two sessions are in memory.

    Returns:
        The first one, or one that is clearly faster; the seconds of each, why others cannot run it, and whether other
        programs used the processor meanwhile.
    """
    best, *others = configs
    if not others:
        return best, {}, {}, False
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    times = GraphTimes()
    on_best = _open(bundle, configs[best])
    for number, name in enumerate(others):
        progress(number / len(others))
        try:
            other = _open(bundle, configs[name])
        except EdgeError as error:
            refused[name] = error.what
            continue
        own, further = (partial(_turn_s, each, widths) for each in (on_best, other))
        times.measure(name, own, further, max(configs[best].threads, configs[name].threads))
        before, seconds[name] = times.seconds[name]
        seconds[best] = min(before, seconds.get(best, before))
        if seconds[name] < _WORTH * before:
            best, on_best = name, other
    progress(1.0)
    return best, seconds, refused, bool(times.disturbed)


def _fastest_passes(seconds: Sequence[float]) -> list[int]:
    """Return the indices of the fastest third, the passes that were probably not disturbed."""
    order = sorted(range(len(seconds)), key=seconds.__getitem__)
    return order[: -(-len(order) // _FASTEST_SHARE)]


def mean_of_fastest(seconds: Sequence[float]) -> float:
    """Return the mean of the fastest third of the passes."""
    return fmean(seconds[index] for index in _fastest_passes(seconds))


def _nodes_by_width(passes: Sequence[Mapping[str, float]], widths: Sequence[int]) -> dict[int, dict[str, float]]:
    """Average the node times of the timed passes of `time_in_turns`, by width.

    All nodes are averaged over the same passes, so that they add up to the time of passes that occurred.
    """
    passes_per_turn = WARM_UP_PASSES + len(widths) * PASSES_PER_TURN
    found = {}
    for place, width in enumerate(widths):
        first = WARM_UP_PASSES + place * PASSES_PER_TURN
        timed = [one for number, one in enumerate(passes) if 0 <= number % passes_per_turn - first < PASSES_PER_TURN]
        chosen = [timed[index] for index in _fastest_passes([sum(one.values()) for one in timed])]
        found[width] = {node: fmean(one[node] for one in chosen) for node in chosen[0]}
    return found


def read_profile(profile: Path) -> list[dict[str, float]]:
    """Read the seconds by node of each pass from a profile that ONNX Runtime wrote, in the order of the passes.

    The profiler's own work of 5 to 10 microseconds is part of every node's time.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a profile.
    """
    passes: list[dict[str, float]] = []
    nodes: dict[str, float] = {}
    # The profile takes a kilobyte per node and pass; the hook keeps two values of it while the file is parsed.
    for event in filter(None, json.loads(profile.read_text(encoding="utf-8"), object_hook=_event)):
        name, seconds = event
        if name.endswith(_NODE_SUFFIX):
            nodes[name.removesuffix(_NODE_SUFFIX)] = seconds
        elif name == "model_run":
            passes.append(nodes)
            nodes = {}
    return passes


def _event(fields: dict[str, Any]) -> tuple[str, float] | None:
    """Name and seconds of an event of a profile; None for the objects nested in one."""
    return (str(fields["name"]), float(fields["dur"]) * 1e-6) if "cat" in fields else None
