"""Loads a decoder graph into an ONNX Runtime session."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import onnxruntime as ort

from ...errors import BundleError, EdgeError, InputError
from ...models.onnx_file.wire import external_files, mapped_model
from ...models.user_folders import cache_folder
from ..arguments.search_options import SteeringOptions
from ..devices.processor import Power, available_memory
from ..devices.providers import CPU_PROVIDER, Device, add_device, device_lock
from ..kv.arena import InPlaceArena, KVArena
from ..kv.buffers import StackedBuffers
from ..kv.cache_scales import CacheScales, KVFormat
from ..kv.device_buffers import SlotGraphs
from ..kv.growing import GrowingArena
from .bound_graph import BoundGraph, Steering
from .bound_session import BoundSession, HybridSession
from .device_loading import load_on_device
from .device_session import DeviceSession
from .graph_io import CacheMode, GraphIO, GraphValue, InputRole
from .head_session import HeadSession
from .introspection import introspect
from .memory import MappedPages, pages_dropped
from .model_metadata import ModelMetadata, reject_operators
from .ort import ORT_ERRORS, error_reason, session_options
from .probe import ProbeResult, probe
from .shared_passes import SHARED_SCALE_OPERATORS, Gather, PackedPasses, SharedGraph, SharedPasses

_STATE_WINDOW: Final = "state_window"
"""Attribute of operators with states, and option of GenAI's model builder."""
_HELD_TWICE_SHARE: Final = 0.25
"""Share of the available memory that a second copy of weights that are not packed may take."""
_log: Final = logging.getLogger(__name__)


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
    kv_scales: CacheScales | None = None
    """The scales of a quantized KV cache; None for a float cache."""

    @property
    def kv(self) -> KVFormat:
        """Element type of the KV cache."""
        return KVFormat.FLOAT if self.kv_scales is None else self.kv_scales.kv

    def options(self) -> ort.SessionOptions:
        """New session options with these threads."""
        options = session_options(self.threads)
        if self.shares_cores or self.power.saves:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        return options


class DecoderGraph(Protocol):
    """A loaded decoder, whose sequences each have an arena and a binding.

    Attributes:
        config: how the graph is run.
        graph_io: its inputs and outputs, as far as callers may use them.
        probe_result: what probing the graph showed; None if its inputs and outputs say everything.
        on_cpu: number of its nodes that the device left to the CPU, by operator.
    """

    config: SessionConfig
    graph_io: GraphIO
    probe_result: ProbeResult | None
    on_cpu: Mapping[str, int]

    def disable_trees(self) -> None:
        """Let drafts be chains from now on, because the device computes trees wrongly."""
        self.graph_io = replace(self.graph_io, trees_correct=False)

    def limit_width(self, tokens: int) -> None:
        """Run passes over at most that many tokens from now on, because the device computes wider ones wrongly."""
        self.graph_io = replace(self.graph_io, widest_pass=tokens)

    def share_passes(self, texts: int, gather: Gather) -> SharedPasses | str:
        """Run the passes that several threads hand in as one; returns what runs them, or why nothing can.

        Args:
            texts: largest number of texts of a pass.
            gather: see `SharedPasses`.
        """
        del texts, gather
        return f"passes of several texts run on the CPU alone, not on {self.config.device}"

    def steering(self, options: SteeringOptions) -> Steering | None:
        """The adapter and the control vector of an answer; None for the model itself.

        Raises:
            InputError: the graph was opened without them.
        """
        if (name := options.adapter or options.control) is None:
            return None
        hint = "load it with --lora NAME=PATH or --control-vector NAME=PATH"
        raise InputError(f"the answer asks for {name!r:.100}, and the model was loaded without", hint)

    def arena(self, limit: int) -> KVArena:
        """An empty KV cache of this graph's tensor types, for a context of `limit` tokens."""

    def bind(self, arena: KVArena, *, hidden_states: bool = False) -> BoundGraph:
        """Bind to `arena`, over which passes then run, with `hidden_states` if the graph gives them."""


class GraphSession(DecoderGraph):
    """A loaded decoder graph; see `DecoderGraph`."""

    def __init__(
        self,
        graph: Path,
        config: SessionConfig,
        metadata: ModelMetadata | None = None,
        *,
        model: bytes | None = None,
    ) -> None:
        """Load a graph.

        Args:
            graph: its file.
            config: how to run it.
            metadata: what the files beside it say.
            model: the serialized graph where it differs from the file, beside which the weights are.

        Raises:
            BundleError: the file is not a model, or edge-run cannot decode with it on this machine.
            DeviceError: the device cannot run it.
        """
        metadata = metadata or ModelMetadata()
        if metadata.operators is not None:
            reject_operators(metadata.operators, str(graph))
        if metadata.operators is None and config.device.provider == CPU_PROVIDER:
            model = _with_windows(graph, model)
        self._graph, self._model, self._metadata = graph, model, metadata
        self._shared: tuple[SharedPasses, SharedGraph] | None = None
        self._session, self.on_cpu, self.pages = load_graph(graph, config, model)
        first = metadata.first_pass_graph
        self._first_session = None if first is None else load_graph(first, config)[0]
        self.config = config
        device = config.device
        self._lock: Final = device_lock(device.memory)
        self._slot_graphs: Final = (
            None if device.memory is None else SlotGraphs(device.memory, lambda options: add_device(options, device))
        )
        try:
            inputs, outputs = graph_values(self._session.get_inputs()), graph_values(self._session.get_outputs())
        except UnicodeDecodeError as error:
            raise BundleError(
                f"{graph} is damaged: the name of an input or output is not UTF-8", "copy the model again"
            ) from error
        graph_io = introspect(inputs, outputs, str(graph), metadata)
        if graph_io.states and device.provider != CPU_PROVIDER:
            what = f"{graph} keeps states ({graph_io.states[0].past}), which works on the CPU alone, not on {device}"
            raise BundleError(what, "add --device cpu")
        self.probe_result = metadata.probe_result or self._probed(graph_io, metadata, str(graph))
        self.graph_io = graph_io if self.probe_result is None else replace(graph_io, **vars(self.probe_result))
        if config.kv_scales is not None:
            others = [each.past for each in self.graph_io.cache if each.tensor_type.dtype != config.kv.dtype]
            if others or self.graph_io.cache_mode is not CacheMode.IN_PLACE:
                what = f"of {others[0]}" if others else "that grows with every pass"
                raise BundleError(f"{graph} has a cache {what}, which cannot be {config.kv}", "leave --kv out")

    def __del__(self) -> None:
        """Free the session while nothing runs on its device."""
        sessions = [self.__dict__.pop(name, None) for name in ("_session", "_first_session")]
        if "_lock" in self.__dict__:
            self._lock.free(sessions)

    @property
    def optional_inputs(self) -> set[str]:
        """Names of inputs that need not be bound."""
        return {each.name for each in self._session.get_overridable_initializers()}

    def arena(self, limit: int) -> KVArena:
        """An empty KV cache of this graph's tensor types, for a context of `limit` tokens."""
        types, state_types = self.graph_io.tensor_types, self.graph_io.state_types
        if self.graph_io.cache_mode is CacheMode.GROWING:
            return GrowingArena(types, limit, state_types)
        capacities = () if self.graph_io.capacity is None else (self.graph_io.capacity,)
        new_buffers = StackedBuffers if self._slot_graphs is None else self._slot_graphs.new_buffers
        return InPlaceArena(types, limit, state_types, capacities=capacities, new_buffers=new_buffers)

    def bind(self, arena: KVArena, *, hidden_states: bool = False) -> BoundSession:
        """Bind the session to `arena`, over which it then runs passes, with `hidden_states` if the graph gives them."""
        session, first, graph_io = self._session, self._first_session, self.graph_io
        if graph_io.head is not None:
            return HeadSession(session, graph_io, arena)
        if self.config.device.provider != CPU_PROVIDER:
            return DeviceSession(session, graph_io, arena, first, self._lock, hidden_states=hidden_states)
        kind = HybridSession if graph_io.states else BoundSession
        bound = kind(session, graph_io, arena, first, hidden_states=hidden_states, shared=self._shared)
        bound.pages = self.pages
        return bound

    def beside(self, graph: Path, model: bytes | None = None) -> GraphSession:
        """Load another graph whose inputs and outputs mean the same, and which never runs the first pass.

        Its idle threads do not spin beside the threads of this one. Arguments and errors as for the constructor.
        """
        metadata = replace(self._metadata, probe_result=self.probe_result, first_pass_graph=None)
        return GraphSession(graph, replace(self.config, shares_cores=True), metadata, model=model)

    def share_passes(self, texts: int, gather: Gather) -> SharedPasses | str:
        """Run the passes that several threads hand in as one; returns what runs them, or why nothing can.

        The packed graph is loaded for the first such pass. It maps the weights that were packed for this machine;
        without those it holds a second copy of all weights.
        """
        if self.config.device.provider != CPU_PROVIDER:
            return super().share_passes(texts, gather)
        if InputRole.LOGIT_POSITIONS not in self.graph_io.inputs:
            return "no input of the graph says which logits it returns"
        weights = sum((self._graph.parent / name).stat().st_size for name in external_files(self._graph))
        room = _HELD_TWICE_SHARE * available_memory()
        if weights > room and not self._graph.is_relative_to(cache_folder()):
            return "the weights are not packed for this machine, and there is no memory to hold them twice"
        shared = SharedPasses(texts, gather)
        self.join(shared)
        return shared

    def join(self, shared: SharedPasses) -> None:
        """Let the passes of bindings that are made from now on be shared."""
        # A cycle of references would keep the files of the weights mapped until it is collected.
        owner, texts = weakref.ref(self), shared.texts

        def load() -> PackedPasses | None:
            session = owner()
            return None if session is None else session._packed_passes(texts)

        graph = SharedGraph(self._session, load)
        shared.graphs.append(graph)
        self._shared = shared, graph

    def _packed_passes(self, texts: int) -> PackedPasses | None:
        """Load the graph for passes of several texts; None if the graph cannot be rewritten."""
        # Importing protobuf takes 28 ms.
        from ...models.onnx_file.graph_editor import CannotRewriteError  # noqa: PLC0415 -- see above
        from .packed_graph import packed_graph  # noqa: PLC0415 -- see above

        config, model = self.config, self._model
        if config.kv_scales is not None:
            from .quantized_cache import with_quantized_cache  # noqa: PLC0415 -- see above

            model, config = with_quantized_cache(self._graph, config.kv_scales, model), replace(config, kv_scales=None)
        try:
            packed = packed_graph(self._graph, self.graph_io, texts, model)
            session = load_graph(self._graph, config, packed)[0]
        except (CannotRewriteError, EdgeError, MemoryError) as error:
            _log.warning("the passes of several texts run one by one: %s", error)
            return None
        return PackedPasses(session, self.graph_io, texts)

    def end_profile(self) -> Path:
        """Write the node times since the graph was loaded (see `SessionConfig.profile`) and return the file."""
        return Path(self._session.end_profiling())

    def _probed(self, graph_io: GraphIO, metadata: ModelMetadata, where: str) -> ProbeResult | None:
        """Probe a graph that another tool has made; None for others."""
        operators = metadata.operators
        if operators is None or InputRole.LOGIT_POSITIONS in graph_io.inputs:
            return None

        def bind(assumed: GraphIO, limit: int) -> BoundSession:
            self.graph_io = assumed
            return self.bind(self.arena(limit))

        return probe(
            graph_io,
            bind,
            where,
            may_be_in_place="GroupQueryAttention" in operators,
            shared_scales=any(name in operators for name in SHARED_SCALE_OPERATORS),
        )


def _with_windows(graph: Path, model: bytes | None) -> bytes | None:
    """The graph with layers that take the cache of their sliding windows alone; as it is if there are none."""
    with mapped_model(graph) as data:
        if max(map(data.find, (b"GreaterOrEqual", b"Less"))) < 0:  # ten times as fast as `operators_of`
            return model
    # Importing protobuf takes 28 ms.
    from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor  # noqa: PLC0415 -- see above
    from .attention_edits import take_windows  # noqa: PLC0415 -- see above

    try:
        editor = GraphEditor(graph, model)
        return editor.serialized() if take_windows(editor, from_later_slots=True) else model
    except CannotRewriteError:
        return model


def load_graph(
    graph: Path, config: SessionConfig, model: bytes | None = None
) -> tuple[ort.InferenceSession, dict[str, int], MappedPages]:
    """Load a graph, or its serialized form `model`, beside whose file the weights are; errors as for `GraphSession`."""
    options = config.options()
    # The bias changes shape with every token; remembering an allocation plan per shape would only grow.
    options.enable_mem_pattern = False
    if config.profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(config.profile)
    if config.kv_scales is not None:
        from .quantized_cache import with_quantized_cache  # noqa: PLC0415 -- importing protobuf takes 28 ms

        model = with_quantized_cache(graph, config.kv_scales, model)
    if model is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
    try:
        # Loading reads all weights to pack them; afterwards only rows of the embedding are read from the file.
        files = [graph.parent / name for name in external_files(graph)]
        with pages_dropped(files, model or (graph.read_bytes() if files else b"")) as pages:
            session, on_cpu = load_on_device(model or str(graph), options, config.device, graph)
    except ORT_ERRORS as error:
        reason = error_reason(error)
        if _STATE_WINDOW in reason:
            raise BundleError(
                f"{graph} returns the states after several tokens ({_STATE_WINDOW}), which works on CUDA alone",
                f"export it again without {_STATE_WINDOW}",
            ) from error
        raise BundleError(
            f"{graph} cannot be loaded: {reason}", "give a complete model, such as edge-run export makes"
        ) from error
    return session, on_cpu, *pages


def graph_values(nodes: Sequence[ort.NodeArg]) -> list[GraphValue]:
    """Inputs or outputs of a session."""
    return [GraphValue(node.name, node.type, tuple(node.shape)) for node in nodes]
