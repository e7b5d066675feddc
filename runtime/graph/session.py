"""Loads a decoder graph into an ONNX Runtime session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnxruntime as ort

from ...errors import BundleError
from ...models.onnx_file.external_data import external_files
from ..devices.power import Power
from ..devices.providers import Device, add_device
from ..kv.arena import InPlaceArena, KVArena
from ..kv.growing import GrowingArena
from .bound_session import BoundSession
from .graph_io import CacheMode, GraphIO, GraphValue, InputRole
from .introspection import introspect
from .memory import drop_file_pages
from .model_metadata import ModelMetadata
from .ort import ORT_ERRORS, error_reason, load_session, session_options
from .probe import ProbeResult, graph_io_key, probe
from .unsupported import reject_operators

_SHARED_SCALE_OPERATORS: Final = ("DynamicQuantizeLinear", "DynamicQuantizeMatMul")
"""Operators that quantize the activations of all tokens of a pass with one scale."""


@dataclass(frozen=True)
class SessionConfig:
    """How to run a graph: on which device, with how many threads (0: `default_threads`)."""

    device: Device
    threads: int = 0
    power: Power = Power.PERFORMANCE
    """Whether threads spin while they wait for the next pass, or sleep (`Power.SAVER`)."""
    shares_cores: bool = False
    """Whether another session runs alternately with this one. By default idle threads spin while they wait for work,
    which takes the cores from the other session: a target of 17 ms a pass beside a draft model then takes 31 ms."""
    profile: Path | None = None
    """Prefix of the path of a file to which ONNX Runtime writes the time of every node; see `read_profile`."""


class GraphSession:
    """A loaded decoder graph.

    Attributes:
        config: how the graph is run.
        graph_io: its inputs and outputs.
        probe_result: what probing the graph showed; None if its inputs and outputs say everything.
    """

    def __init__(self, graph: Path, config: SessionConfig, metadata: ModelMetadata | None = None) -> None:
        """Load `graph`; `metadata` is what the files beside it say.

        Raises:
            BundleError: the file is not a model, or edge-run cannot decode with it on this machine.
        """
        metadata = metadata or ModelMetadata()
        if metadata.operators is not None:
            reject_operators(metadata.operators, str(graph))
        self._session = _load(graph, config)
        self._first_session = None if metadata.first_pass_graph is None else _load(metadata.first_pass_graph, config)
        self.config: Final = config
        try:
            inputs, outputs = _values(self._session.get_inputs()), _values(self._session.get_outputs())
        except UnicodeDecodeError as error:
            raise BundleError(
                f"{graph} is damaged: the name of an input or output is not UTF-8", "copy the model again"
            ) from error
        graph_io = introspect(inputs, outputs, str(graph), metadata)
        stored = metadata.probe_result
        is_current = stored is not None and stored.key == graph_io_key(graph_io)
        self.probe_result: Final = stored if is_current else self._probe(graph_io, metadata, str(graph))
        self.graph_io: Final = graph_io if self.probe_result is None else self.probe_result.apply_to(graph_io)

    def arena(self, limit: int) -> KVArena:
        """An empty KV cache of this graph's tensor types, for a context of `limit` tokens."""
        return _arena(self.graph_io, limit)

    def bind(self, arena: KVArena, *, hidden_states: bool = False) -> BoundSession:
        """Bind the session to `arena`, over which it then runs passes, with `hidden_states` if the graph gives them."""
        return BoundSession(self._session, self.graph_io, arena, self._first_session, hidden_states=hidden_states)

    def end_profile(self) -> Path:
        """Write the node times since the graph was loaded (see `SessionConfig.profile`) and return the file."""
        return Path(self._session.end_profiling())

    def _probe(self, graph_io: GraphIO, metadata: ModelMetadata, where: str) -> ProbeResult | None:
        operators = metadata.operators
        if operators is None or InputRole.LOGIT_POSITIONS in graph_io.inputs:
            return None

        def bind(assumed: GraphIO, limit: int) -> BoundSession:
            return BoundSession(self._session, assumed, _arena(assumed, limit), self._first_session)

        return probe(
            graph_io,
            bind,
            where,
            may_be_in_place="GroupQueryAttention" in operators,
            shared_scales=any(name in operators for name in _SHARED_SCALE_OPERATORS),
        )


def _arena(graph_io: GraphIO, limit: int) -> KVArena:
    if graph_io.cache_mode is CacheMode.GROWING:
        return GrowingArena(graph_io.tensor_types, limit)
    return InPlaceArena(graph_io.tensor_types, limit, graph_io.capacity)


def _load(graph: Path, config: SessionConfig) -> ort.InferenceSession:
    options = session_options(config.threads)
    options.inter_op_num_threads = 1
    # The bias changes shape with every token; remembering an allocation plan per shape would only grow.
    options.enable_mem_pattern = False
    if config.shares_cores or config.power.saves:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if config.profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(config.profile)
    try:
        session = load_session(str(graph), options, add_device(options, config.device))
    except ORT_ERRORS as error:
        raise BundleError(
            f"{graph} cannot be loaded: {error_reason(error)}", "give a complete model, such as edge-run export makes"
        ) from error
    # Loading has read all weights to pack them; afterwards only rows of the embedding are read from the file.
    for name in external_files(graph):
        drop_file_pages(graph.parent / name)
    return session


def _values(nodes: Sequence[ort.NodeArg]) -> list[GraphValue]:
    return [GraphValue(node.name, node.type, tuple(node.shape)) for node in nodes]
