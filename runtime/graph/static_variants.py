"""Runs a model's graphs of fixed shapes, for devices that compile whole graphs, as one decoder.

Such a device takes a graph with fixed shapes only, so a bundle has one for every pair of a width (number of token
positions of a pass) and a capacity (number of cache slots). A pass uses the smallest width that holds its tokens and
the smallest capacity that holds the text; more tokens than the largest width take several passes. Everything else that
the graph contract offers follows from the mask and the positions, which are inputs: padding, rewinding, token trees.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ...errors import BundleError, EdgeError
from ...models.bundle import Bundle
from ...models.manifest import DeviceKind
from ...models.onnx_file.model_messages import read_model
from ..kv.arena import InPlaceArena, KVArena
from ..kv.buffers import NumpyBuffers
from .bound_graph import BoundGraph, NewTokens
from .cache_io import find_cache
from .compiled import CompiledGraphs
from .graph_io import CacheMode, Floats, GraphIO, InputRole, LogitsMode
from .ort import ORT_ERRORS, run_failure, run_options
from .pass_inputs import wrapped
from .session import DecoderGraph, SessionConfig, graph_values

EXPORT_HINT: Final = "write them with edge-run export MODEL --device npu, or run with --device cpu"
_LOGITS: Final = "logits"
_ROLES: Final[Mapping[str, InputRole]] = {"input_ids": InputRole.TOKENS, "position_ids": InputRole.POSITIONS}
_FEW_PASSES: Final = 4
"""Number of passes of the widest graph that verifies drafts, up to which they are preferred to one of a graph for
prefill: such a pass computes many padded positions, and its graph may have to be compiled first."""
_UNLIKELY: Final = np.float32(-1e30)
"""Logit of every token but the most probable one, where a pass returned ids only."""


Array: TypeAlias = npt.NDArray[Any]
Ids: TypeAlias = npt.NDArray[np.int64]

NEXT_IDS: Final = "next_ids"
"""Output int32 `[R]`: the most probable token after each position that gets logits."""
LOGIT_ROWS: Final = "logit_rows"
"""Input int32 `[1]` of wide graphs, which give the logits of that position only."""
MASK: Final = "attention_mask"
"""Input `[1, 1, W, C + W]`: what is added to attention scores. Layers with a sliding window of n tokens have their
own, `attention_mask_n`."""
_BLOCKED: Final = -30000.0
"""What is added to an attention score that must not count: far below every other, yet a finite float16 with any score
added to it."""


class StaticSession:
    """Runs passes of one width over caches of one capacity.

    Passes of several sequences use the same buffers, one after the other; only the cache is bound again.

    Args:
        session: the graph's session.
        graph_io: inputs and outputs of the graphs of all widths and capacities.
        width: number of token positions W of a pass.
        capacity: number of cache slots C before them.
    """

    def __init__(self, session: ort.InferenceSession, graph_io: GraphIO, width: int, capacity: int) -> None:
        self.width: Final = width
        self.capacity: Final = capacity
        self._session = session
        self._cache = graph_io.cache
        self._run_options = run_options()
        names = [value.name for value in session.get_inputs()]
        tokens, positions, mask = (
            graph_io.inputs[role] for role in (InputRole.TOKENS, InputRole.POSITIONS, InputRole.BIAS)
        )
        self._tokens = np.zeros((1, width), tokens.dtype)
        self._positions = np.zeros((1, width), positions.dtype)
        masks = [name for name in names if name.startswith(MASK)]
        shape = (1, 1, width, capacity + width)
        windows = [None if name == MASK else int(name.removeprefix(f"{MASK}_")) for name in masks]
        self._masks = {window: np.zeros(shape, mask.dtype) for window in windows}
        """By sliding window; None for full attention."""
        self._inputs: dict[str, Array] = {tokens.name: self._tokens, positions.name: self._positions}
        self._inputs |= dict(zip(masks, self._masks.values(), strict=True))
        self._logit_row: Array | None = None
        if LOGIT_ROWS in names:
            self._logit_row = self._inputs[LOGIT_ROWS] = np.zeros(1, np.int32)
        rows = width if self._logit_row is None else 1
        self._next_ids = np.zeros(rows, np.int32)
        self._logits_name = graph_io.logits.name
        self._logits: Array = np.zeros((rows, graph_io.vocab_size), graph_io.logits.dtype)
        self._new_slots = [np.zeros(each.shape_of(width), each.dtype) for each in graph_io.tensor_types]
        self._bindings: dict[bool, tuple[ort.IOBinding, weakref.ref[NumpyBuffers] | None]] = {}
        """The binding of passes that return logits, and of those that return ids only, and the cache that is bound."""

    def run(
        self,
        buffers: NumpyBuffers,
        slot: int,
        tokens: Ids,
        positions: Ids,
        visible: npt.NDArray[np.bool_],
        earlier: Ids,
        wanted: Sequence[int],
        *,
        logits: bool,
    ) -> tuple[Array, npt.NDArray[np.int32]]:
        """Run a pass over `n` tokens, at most as many as the width, and write their slots to the cache.

        Args:
            buffers: the cache, of this capacity.
            slot: number of slots before those of the tokens.
            tokens: token ids `[n]`.
            positions: rotary positions `[n]`.
            visible: bool `[n, m + n]`: whether token i attends to each of the last m slots and of the new tokens. All
                tokens attend to the slots before those.
            earlier: positions of the last m slots, `[m]`; those before are consecutive from 0.
            wanted: indices of the tokens whose logits are wanted: any, or at most one if the graph gives one row.
            logits: whether to return logits; else ids only.

        Returns:
            Logits `[r, V]` in the graph's type (of no meaning without `logits`) and the most probable ids int32 `[r]`
            (of no meaning with `logits`), valid until the next pass.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        count = tokens.size
        self._tokens[0, :count], self._tokens[0, count:] = tokens, 0
        self._positions[0, :count], self._positions[0, count:] = positions, 0
        first = slot - earlier.size
        for window, array in self._masks.items():
            mask = array[0, 0]
            mask.fill(_BLOCKED)
            near: npt.NDArray[np.bool_] = visible
            if window is None:
                mask[:count, :first] = 0
            else:
                before = positions[:, None] - np.arange(first)
                mask[:count, :first][before < window] = 0
                near = visible & (positions[:, None] - np.concatenate([earlier, positions]) < window)
            mask[:count, first:slot][near[:, : earlier.size]] = 0
            mask[:count, self.capacity : self.capacity + count][near[:, earlier.size :]] = 0
            # Padded positions attend to themselves: without anything to attend to, some devices compute NaN.
            np.fill_diagonal(mask[:, self.capacity :], 0)
        rows = list(wanted)
        if self._logit_row is not None:
            self._logit_row[0] = rows[0] if rows else 0
            rows = [0] * len(rows)
        io = self._bound_to(buffers, logits)
        try:
            self._session.run_with_iobinding(io, self._run_options)
        except ORT_ERRORS as error:
            raise run_failure("the model", error) from error
        buffers.write_new(slot, self._new_slots, count)
        return self._logits[rows], self._next_ids[rows]

    def _bound_to(self, buffers: NumpyBuffers, logits: bool) -> ort.IOBinding:
        """The binding of passes with or without logits, to the tensors of a cache."""
        io, bound = self._bindings.get(logits, (None, None))
        if io is None:
            io = self._session.io_binding()
            outputs: dict[str, Array] = {self._logits_name: self._logits} if logits else {NEXT_IDS: self._next_ids}
            outputs |= {tensor.present: array for tensor, array in zip(self._cache, self._new_slots, strict=True)}
            for name, array in self._inputs.items():
                io.bind_ortvalue_input(name, wrapped(array))
            for name, array in outputs.items():
                io.bind_ortvalue_output(name, wrapped(array))
        if bound is None or bound() is not buffers:
            for tensor, array in zip(self._cache, buffers.arrays, strict=True):
                io.bind_ortvalue_input(tensor.past, wrapped(array))
            self._bindings[logits] = io, weakref.ref(buffers)
        return io


class StaticGraphs(DecoderGraph):
    """The graphs of fixed shapes of one model, each loaded when it is first needed.

    Attributes:
        graph_io: their common inputs and outputs. The capacity is the largest; the widths are those of graphs that give
            the logits of every position, so that they can verify drafts.
        on_cpu: number of nodes of the smallest graph that the device left to the CPU, by operator.
        compiled: loads the graphs.
        widths: numbers of token positions for which there are graphs, ascending.
        capacities: numbers of cache slots for which there are graphs, ascending.
    """

    def __init__(self, bundle: Bundle, config: SessionConfig, *, cache: bool) -> None:
        """Load the smallest of the graphs.

        Args:
            bundle: a model with such graphs.
            config: how to run them.
            cache: whether graphs that the device has compiled are kept on disk.

        Raises:
            BundleError: the model lacks such graphs.
            DeviceError: the device cannot run them.
        """
        self.config, self.probe_result = config, None
        self.compiled: Final = CompiledGraphs(bundle, config, cache=cache)
        self._files = _files_by_shape(bundle)
        self.widths: Final = tuple(sorted({width for width, _ in self._files}))
        self.capacities: Final = tuple(sorted({capacity for _, capacity in self._files}))
        first = self.widths[0], self.capacities[0]
        session = self.compiled.load(self._files[first])
        self.on_cpu = self.compiled.on_cpu
        self.graph_io = replace(
            static_graph_io(session, bundle, str(bundle.graph.with_name(self._files[first]))),
            capacity=self.capacities[-1],
            widths=tuple(width for width in self.widths if self._gives_all_logits(bundle, width)),
        )
        self._sessions = {first: StaticSession(session, self.graph_io, *first)}

    def arena(self, limit: int) -> KVArena:
        """An empty KV cache of these graphs' tensor types, for a context of `limit` tokens."""
        return InPlaceArena(self.graph_io.tensor_types, limit, capacities=self.capacities)

    def bind(self, arena: KVArena, *, hidden_states: bool = False) -> BoundStaticGraphs:
        """Bind to `arena`, over which passes then run."""
        if hidden_states:
            raise ValueError("graphs of fixed shapes do not give hidden states")
        return BoundStaticGraphs(self, arena)

    def session(self, width: int, capacity: int) -> StaticSession:
        """The session of a width and a capacity.

        Raises:
            DeviceError: the device cannot run its graph.
        """
        shape = width, capacity
        if shape not in self._sessions:
            self._sessions[shape] = StaticSession(self.compiled.load(self._files[shape]), self.graph_io, *shape)
        return self._sessions[shape]

    def _gives_all_logits(self, bundle: Bundle, width: int) -> bool:
        """Whether the graphs of a width give the logits of every position, not of one."""
        graph = read_model(bundle.graph.with_name(self._files[width, self.capacities[0]])).graph
        return all(value.name != LOGIT_ROWS for value in graph.input)


class BoundStaticGraphs(BoundGraph):
    """Static graphs bound to a KV arena, which all compute the same.

    Without `whole_logits`, only the most probable token of each position is copied from the device, and the row that
    `forward` returns holds 0 for it and -1e30 for all others: enough for greedy decoding, but not to find near ties or
    further candidates.
    """

    def __init__(self, graphs: StaticGraphs, arena: KVArena) -> None:
        self._graphs: Final = graphs
        self.graph_io = graphs.graph_io
        self._logits: Floats = np.empty((0, graphs.graph_io.vocab_size), np.float32)
        self.arena = arena

    def prefill_width(self, preferred: int, remaining: int) -> int:
        """Number of prompt tokens to run in the next pass: the largest width of a graph."""
        del preferred, remaining
        return self._graphs.widths[-1]

    def run(self, new: NewTokens) -> Floats:
        """Run a pass: more tokens than the largest width run in several, trees too."""
        ids, (_, wanted, positions, tree_mask, _) = np.array(new.ids), new
        arena, base = self.arena, self.arena.length
        arena.reserve(ids.size)
        buffers = arena.buffers
        assert isinstance(buffers, NumpyBuffers)  # noqa: S101  `StaticGraphs.arena`
        at = base + np.arange(ids.size) if positions is None else np.asarray(positions, np.int64)
        visible = np.tri(ids.size, dtype=np.bool_) if tree_mask is None else tree_mask.astype(np.bool_, copy=False)
        cached = visible.shape[1] - ids.size
        slot_positions = np.concatenate([np.arange(base - cached, base), at])
        if len(self._logits) < wanted.size:
            self._logits = np.empty((wanted.size, self.graph_io.vocab_size), np.float32)
        start = 0
        while start < ids.size:
            width = self._width_for(ids.size - start, wanted - start)
            end = min(start + width, ids.size)
            while visible[start:end, cached + end :].any():  # tokens that attend to later ones run together with them
                end -= 1
            if end == start:
                what = f"the model's graphs for NPUs take {width} tokens, fewer than attend to each other"
                raise EdgeError(what, "export the model with more --widths, one of them the size of its blocks")
            rows = np.flatnonzero((wanted >= start) & (wanted < end))
            logits, next_ids = self._graphs.session(width, arena.capacity).run(
                buffers,
                base + start,
                ids[start:end],
                at[start:end],
                visible[start:end, : cached + end],
                slot_positions[: cached + start],
                (wanted[rows] - start).tolist(),
                logits=self.whole_logits and rows.size > 0,
            )
            if self.whole_logits:
                self._logits[rows] = logits
            else:
                self._logits[rows] = _UNLIKELY
                self._logits[rows, next_ids] = 0
            start = end
        return self._logits[: wanted.size]

    def _width_for(self, tokens: int, wanted: npt.NDArray[np.int64]) -> int:
        """Width of the next pass: the smallest that holds a number of tokens, else the largest.

        Wide graphs, which give the logits of one position, are left out where several are wanted, and where a few
        narrow passes do.

        Args:
            tokens: number of tokens that are left.
            wanted: indices of those whose logits are wanted; negative ones are done.
        """
        widths, narrow = self._graphs.widths, self.graph_io.widths or ()
        wide = next((width for width in widths if width >= tokens), widths[-1])
        if tokens <= _FEW_PASSES * narrow[-1] or np.count_nonzero((wanted >= 0) & (wanted < wide)) > 1:
            return next((width for width in narrow if width >= tokens), narrow[-1])
        return wide


def _files_by_shape(bundle: Bundle) -> dict[tuple[int, int], str]:
    """Names of the graphs for the NPU by width and capacity.

    Raises:
        BundleError: there are none, or some are missing.
    """
    variants = () if bundle.manifest is None else bundle.manifest.variants
    files = {
        (variant.width, variant.context): variant.file
        for variant in variants
        if variant.device is DeviceKind.NPU and variant.width is not None and variant.context is not None
    }
    if not files:
        raise BundleError(f"{bundle.folder} has no graphs for an NPU, which needs fixed shapes", EXPORT_HINT)
    widths, capacities = {width for width, _ in files}, {capacity for _, capacity in files}
    lacking = {(width, capacity) for width in widths | {1} for capacity in capacities} - set(files)
    if lacking:
        width, capacity = min(lacking)
        raise BundleError(
            f"{bundle.folder} lacks the NPU's graph for passes of {width} tokens and a context of {capacity}",
            EXPORT_HINT,
        )
    return files


def static_graph_io(session: ort.InferenceSession, bundle: Bundle, where: str) -> GraphIO:
    """Inputs and outputs of a static graph; shapes are those of this one.

    Raises:
        BundleError: it has others than such graphs have.
    """
    inputs, outputs = graph_values(session.get_inputs()), graph_values(session.get_outputs())
    roles = {_ROLES[value.name]: value for value in inputs if value.name in _ROLES}
    masks = [value for value in inputs if value.name.startswith(MASK)]
    logits = next((value for value in outputs if value.name == _LOGITS), None)
    vocab_size = None if logits is None else logits.shape[-1]
    cache, layers = find_cache(inputs, outputs, where, {}, {})
    if len(roles) < len(_ROLES) or not masks or not cache or logits is None or not isinstance(vocab_size, int):
        raise BundleError(f"{where} has other inputs and outputs than a graph for the NPU", EXPORT_HINT)
    return GraphIO(
        vocab_size=vocab_size,
        input_vocab=max(bundle.input_vocab or vocab_size, vocab_size),
        # Types of all capacities are equal.
        cache=tuple(
            replace(each, tensor_type=replace(each.tensor_type, shape=each.tensor_type.shape_of(0))) for each in cache
        ),
        layers=layers,
        cache_mode=CacheMode.NEW_SLOTS,
        capacity=None,
        inputs={**roles, InputRole.BIAS: masks[0]},
        logits=logits,
        logits_mode=LogitsMode.ALL,
        causal=False,
        blocks=None if bundle.manifest is None else bundle.manifest.architecture.blocks,
    )
