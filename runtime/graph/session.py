"""One ONNX Runtime session over one graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import onnxruntime as ort

from ...errors import BundleError
from ...models.device_kind import DeviceKind
from ...models.onnx_file.external_data import external_files
from ...models.zero_point_check import INPUT, zero_point_model, zero_points_work
from ..devices.providers import Device, put_on
from ..kv.arena import InPlaceArena, KVArena
from ..kv.growing import GrowingArena
from .bound_session import LOG_NOTHING, ORT_ERRORS, BoundSession, reason
from .graph_io import CacheMode, GraphIO, GraphValue, Role
from .introspection import introspect
from .memory import drop_file_pages
from .metadata import ModelMetadata
from .probe import ProbeResult, ports_key, settle
from .refusals import refuse_operators

RUNTIME_VERSION: Final[str] = ort.__version__
"""Of ONNX Runtime."""
_SHARE_A_SCALE: Final = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")
"""Operators that round the activations of all rows of a pass by one scale."""


@dataclass(frozen=True)
class SessionConfig:
    """How a graph is run: on which device, with how many threads (0: one per physical core)."""

    device: Device
    threads: int = 0
    shares_cores: bool = False
    """Whether another session takes turns with this one. Threads that wait for more work by spinning, as they do
    otherwise, would take the cores from it: a target of 17 ms a pass beside a draft model then takes 31."""
    profile: Path | None = None
    """Beginning of the name of a file in which ONNX Runtime notes how long every node takes; see `node_times`."""


def write_prepacked(graph: Path, destination: Path) -> None:
    """Write a twin of `graph` whose weights are stored as this machine's kernels want them, beside the originals.

    Raises:
        BundleError: the file is not a model.
    """
    options = ort.SessionOptions()
    options.log_severity_level = LOG_NOTHING
    options.optimized_model_filepath = str(destination)
    for key, value in {
        "session.optimized_model_external_initializers_file_name": f"{destination.name}.data",
        # Shapes have to stay in the graph itself, or it cannot be checked when it is loaded.
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
        "session.save_external_prepacked_constant_initializers": "1",
    }.items():
        options.add_session_config_entry(key, value)
    try:
        ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except ORT_ERRORS as error:
        raise BundleError(f"{graph} cannot be prepacked: {reason(error)}") from error


class GraphSession:
    """A loaded graph. `spec` says what its ports are."""

    def __init__(self, graph: Path, config: SessionConfig, metadata: ModelMetadata | None = None) -> None:
        """Load `graph`; `facts` are what its folder says about it.

        Raises:
            BundleError: the file is not a model, or not one that edge-run can decode with, here.
        """
        metadata = metadata or ModelMetadata()
        if metadata.operators is not None:
            refuse_operators(metadata.operators, str(graph))
        if metadata.zero_points and config.device.kind is DeviceKind.CPU and not _multiplies_zero_points():
            raise BundleError(
                f"{graph} has weights of 4 bits with zero points, which ONNX Runtime {RUNTIME_VERSION} multiplies "
                "wrongly on this processor",
                "upgrade onnxruntime, or export the model without --zero-points",
            )
        self._session = _load(graph, config)
        self._first = None if metadata.first is None else _load(metadata.first, config)
        self.config: Final = config
        try:
            ports = _ports(self._session.get_inputs()), _ports(self._session.get_outputs())
        except UnicodeDecodeError as error:
            raise BundleError(f"{graph} is damaged: a name in it is not text", "copy the model again") from error
        graph_io = introspect(*ports, str(graph), metadata)
        kept = metadata.reading
        usable = kept is not None and kept.ports == ports_key(graph_io)
        self.reading: Final = kept if usable else self._settled(graph_io, metadata, str(graph))
        """What running the graph showed of its ports; None where they tell all."""
        self.graph_io: Final = graph_io if self.reading is None else self.reading.applied(graph_io)

    def arena(self, limit: int) -> KVArena:
        """An empty arena of this graph's shape for a context of `limit` tokens."""
        return _arena(self.graph_io, limit)

    def bind(self, arena: KVArena) -> BoundSession:
        """The session ready to run passes over `arena`."""
        return BoundSession(self._session, self.graph_io, arena, self._first)

    def end_profile(self) -> Path:
        """Write what was noted of the nodes since the graph was loaded, where `SessionConfig.profile` asked for it."""
        return Path(self._session.end_profiling())

    def _settled(self, graph_io: GraphIO, metadata: ModelMetadata, where: str) -> ProbeResult | None:
        if metadata.operators is None or Role.LOGIT_ROWS in graph_io.inputs:
            return None
        return settle(
            graph_io,
            self._try,
            where,
            in_place="GroupQueryAttention" in metadata.operators,
            disturbs=any(name in metadata.operators for name in _SHARE_A_SCALE),
        )

    def _try(self, graph_io: GraphIO, limit: int) -> BoundSession:
        """The session as it would be if `spec` was right."""
        return BoundSession(self._session, graph_io, _arena(graph_io, limit), self._first)


def _arena(graph_io: GraphIO, limit: int) -> KVArena:
    if graph_io.sharing is CacheMode.GROWING:
        return GrowingArena(graph_io.forms, limit)
    return InPlaceArena(graph_io.forms, limit, graph_io.capacity)


def _load(graph: Path, config: SessionConfig) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = LOG_NOTHING
    options.intra_op_num_threads = config.threads
    options.inter_op_num_threads = 1
    # The bias changes shape with every token; remembering an allocation plan per shape would only grow.
    options.enable_mem_pattern = False
    if config.shares_cores:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if config.profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(config.profile)
    try:
        session = ort.InferenceSession(
            # Falling back would try again without a word, and print to standard output.
            str(graph),
            options,
            providers=put_on(options, config.device),
            enable_fallback=0,
        )
    except ORT_ERRORS as error:
        raise BundleError(
            f"{graph} cannot be loaded: {reason(error)}", "give a complete model, such as edge-run export makes"
        ) from error
    # Loading has read all weights to pack them; only rows of the embedding are read from the file again.
    for name in external_files(graph):
        drop_file_pages(graph.parent / name)
    return session


@cache
def _multiplies_zero_points() -> bool:
    options = ort.SessionOptions()
    options.log_severity_level = LOG_NOTHING
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(zero_point_model(), options, providers=["CPUExecutionProvider"])
        return zero_points_work(lambda rows: session.run(None, {INPUT: rows})[0])
    except ORT_ERRORS:
        return False


def _ports(nodes: Sequence[ort.NodeArg]) -> list[GraphValue]:
    return [GraphValue(node.name, node.type, tuple(node.shape)) for node in nodes]
