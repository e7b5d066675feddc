"""A graph session bound to a KV arena: passes that read and extend its cache.

Everything that a pass reads or writes is bound once where possible: token, position and length buffers are rewritten in
place, and a cache that is extended in place is the arena itself. Only arrays whose shape changes (a bias that grows
with the sequence, another pass width, a growing cache) are bound again. What a graph cannot do in one pass runs token
by token: some graphs compute only the last token's logits, some let new tokens after a cache attend to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ...errors import EdgeError
from ..kv.arena import InPlaceArena, KVArena
from ..kv.borrowed import BorrowedArena
from ..kv.growing import GrowingArena
from .graph_io import GraphIO, GraphValue, InputRole, LogitsMode, element_type
from .ort import ORT_ERRORS, error_reason, run_options

Floats: TypeAlias = npt.NDArray[np.float32]

_BLOCKED: Final = np.float32(np.finfo(np.float32).min)
_FIRST_PASS_WIDTH: Final = 512
"""Width of the first prefill pass if later tokens run one by one; it may return as many rows of logits."""
_KEPT_LOGIT_ROWS: Final = 32
"""Largest number of rows of a logits buffer that is kept for later passes. A prefill by a graph that computes all
logits needs far more, and its buffer is released."""


class BoundSession:
    """Runs passes that read and extend one arena.

    Args:
        session: the graph's session.
        graph_io: the graph's inputs and outputs.
        arena: an arena of the graph's cache tensors, in place or growing as `graph_io` says.
        first_session: session for passes without cached tokens, if those have a graph of their own.
        hidden_states: whether passes return the hidden states too; the graph must give them.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        graph_io: GraphIO,
        arena: KVArena,
        first_session: ort.InferenceSession | None = None,
        *,
        hidden_states: bool = False,
    ) -> None:
        self._session = session
        self._first_session = first_session
        self._io = session.io_binding()
        self._first_io = None if first_session is None else first_session.io_binding()
        self._run_options = run_options()
        # No graph capture. Without this entry, every pass throws and catches an exception looking for it: 29 us.
        self._run_options.add_run_config_entry("gpu_graph_id", "-1")
        self.graph_io: Final = graph_io
        self.arena = arena
        """The cache that passes read and extend; see `use`."""
        self._bound_generation = -1
        self._hidden_output = graph_io.hidden_states if hidden_states else None
        self._hidden: npt.NDArray[Any] = np.empty((0, 0), np.float32)
        """Hidden states of the last pass."""
        self._width = 0
        self._num_logits = 0
        self._tokens = np.zeros((1, 0), _dtype(graph_io.inputs[InputRole.TOKENS]))
        self._positions = np.zeros(0, np.int64)
        self._logit_positions = np.zeros(0, np.int64)
        self._logits = np.zeros((0, graph_io.vocab_size), _dtype(graph_io.logits))
        self._zero_bias = np.zeros(0, np.float32)
        self._mask_bias = np.zeros(0, np.float32)
        self._bias: npt.NDArray[Any] = self._mask_bias
        """The bound array, which the binding does not keep alive."""
        mask = graph_io.inputs.get(InputRole.MASK)
        self._ones = np.ones((1, 0), np.int64 if mask is None else _dtype(mask))
        # The width changes from pass to pass; wrapping an array takes longer than binding it.
        self._inputs_by_width: dict[int, tuple[npt.NDArray[Any], list[tuple[str, ort.OrtValue]]]] = {}
        self._logits_by_count: dict[int, tuple[ort.OrtValue, ort.OrtValue]] = {}
        self._scalars: dict[InputRole, npt.NDArray[Any]] = {
            role: np.zeros(tuple(1 for _ in value.shape), _dtype(value))
            for role, value in graph_io.inputs.items()
            if role in (InputRole.LAST_SLOT, InputRole.TOTAL_LENGTH, InputRole.LOGITS_TO_KEEP, InputRole.USE_CACHE)
        }
        for role, array in self._scalars.items():
            self._bind_input(graph_io.inputs[role].name, array)

    def use(self, arena: KVArena) -> None:
        """Run over another arena of the same tensor types from now on."""
        self.arena = arena
        self._bound_generation = -1

    def prefill_width(self, preferred: int) -> int:
        """Number of prompt tokens to run in the next pass, given the `preferred` number.

        Larger if new tokens after cached ones run one by one: then the first pass, which may be wide, should read as
        much of the prompt as possible.
        """
        is_limited = not self.graph_io.supports_wide_passes and not self.arena.length
        return max(preferred, _FIRST_PASS_WIDTH) if is_limited else preferred

    def forward(
        self,
        tokens: npt.ArrayLike,
        *,
        logits_for: npt.ArrayLike | None = None,
        positions: npt.ArrayLike | None = None,
        tree_mask: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        """Run a pass over `n` new tokens after the committed slots. It writes their slots but does not commit them.

        Args:
            tokens: token ids, int `[n]`.
            logits_for: indices of the new tokens whose logits to return, int `[r]`; all when None.
            positions: rotary positions, int `[n]`; consecutive when None. Without committed slots they must be
                consecutive, because the operator takes such a pass for the beginning of a prompt and ignores them.
            tree_mask: bool `[n, h + n]`, usually `[n, n]`: whether new token i attends to token j of the last `h`
                committed and the new ones; causal when None. Every token attends to all tokens before those, and none
                to a later one.

        Returns:
            Logits float32 `[r, V]`, valid until the next call.

        Raises:
            ContextError: the tokens do not fit the context.
            EdgeError: ONNX Runtime failed; the arena is unchanged.
        """
        ids = np.asarray(tokens, np.int64)
        # For an id outside the vocabulary the operator would return zeros instead of an error.
        if ids.min() < 0 or ids.max() >= self.graph_io.input_vocab:
            raise ValueError(
                f"token ids must lie between 0 and {self.graph_io.input_vocab - 1}, found {ids.min()} to {ids.max()}"
            )
        if tree_mask is not None and not self.graph_io.supports_trees:
            raise ValueError("this graph cannot verify trees")
        wanted = np.arange(ids.size) if logits_for is None else np.asarray(logits_for, np.int64)
        self.arena.reserve(ids.size)
        if ids.size > 1 and not self._fits_one_pass(ids.size, wanted):
            return self._run_one_by_one(ids, wanted)
        return self._run_pass(ids, wanted, positions, tree_mask)

    def hidden_states(self, tokens: npt.ArrayLike, wanted: Sequence[int]) -> Floats:
        """Run a pass like `forward`, and return the hidden states of the tokens with the indices `wanted`.

        Returns:
            float32 `[r, d]`, in a new array.

        Raises:
            ContextError: as `forward`.
            EdgeError: as `forward`.
        """
        if self._hidden_output is None:
            raise ValueError("this session was bound without hidden states")
        selected = self.graph_io.logits_mode is LogitsMode.SELECTED
        self.forward(tokens, logits_for=wanted if selected else (np.size(tokens) - 1,))
        return (self._hidden if selected else self._hidden[0][list(wanted)]).astype(np.float32)

    def _fits_one_pass(self, width: int, wanted: npt.NDArray[np.int64]) -> bool:
        """Whether one pass over several tokens can return the wanted logits."""
        if self.arena.length and not self.graph_io.supports_wide_passes:
            return False
        return self.graph_io.logits_mode is not LogitsMode.LAST or (wanted.size == 1 and wanted[0] == width - 1)

    def _run_one_by_one(self, ids: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> Floats:
        """Run a pass for each token, which sees the ones before."""
        arena, base = self.arena, self.arena.length
        plain_length = arena.plain_length
        logits_by_index: dict[int, Floats] = {}
        try:
            for index in range(ids.size):
                logits = self._run_pass(ids[index : index + 1], np.zeros(1, np.int64), None, None)
                arena.commit(1)
                if index in wanted:
                    logits_by_index[index] = logits[0].copy()
        finally:
            arena.rewind_to(base)
            arena.plain_length = plain_length
        return np.stack([logits_by_index[index] for index in wanted.tolist()])

    def _run_pass(
        self,
        ids: npt.NDArray[np.int64],
        wanted: npt.NDArray[np.int64],
        positions: npt.ArrayLike | None,
        tree_mask: npt.NDArray[np.bool_] | None,
    ) -> Floats:
        base, width = self.arena.length, ids.size
        total = base + width
        self._bind_cache(width)
        if width != self._width:
            self._bind_width(width)
        self._tokens[0, :width] = ids
        self._positions[...] = np.arange(base, total) if positions is None else positions
        if base == 0 and positions is not None and self._positions.flat[-1] != width - 1:
            raise ValueError("a token tree needs a committed slot before it")
        first_logits = self._bind_logits(width, wanted)
        if self.graph_io.has_bias_input:
            self._bind_bias(width, total, tree_mask)
        if InputRole.MASK in self.graph_io.inputs:
            self._bind_mask(total)
        if self._hidden_output is not None:
            self._bind_hidden_states(self._hidden_output, width)
        scalars = self._scalars
        for role, value in (
            (InputRole.LAST_SLOT, total - 1),
            (InputRole.TOTAL_LENGTH, total),
            (InputRole.USE_CACHE, base > 0),
        ):
            if role in scalars:
                scalars[role][...] = value
        try:
            if base or self._first_session is None:
                self._session.run_with_iobinding(self._io, self._run_options)
            else:
                self._run_first_session(width)
        except ORT_ERRORS as error:
            raise EdgeError(
                f"the model failed to run: {error_reason(error)}", "run again with --debug and report it"
            ) from error
        if isinstance(self.arena, GrowingArena):
            self.arena.finish_pass(width)
        return self._select_logits(first_logits, wanted)

    def _run_first_session(self, width: int) -> None:
        """Run the graph without cache inputs: the same inputs except the past."""
        if self._first_session is None or self._first_io is None:
            raise ValueError("there is no graph for the first pass")
        names = {node.name for node in self._first_session.get_inputs()}
        self._first_io.clear_binding_inputs()
        self._first_io.clear_binding_outputs()
        arrays: dict[InputRole, npt.NDArray[Any]] = {
            InputRole.TOKENS: self._tokens[:, :width],
            InputRole.MASK: self._ones[:, :width],
        }
        if InputRole.POSITIONS in self.graph_io.inputs:
            arrays[InputRole.POSITIONS] = self._positions
        if self.graph_io.has_bias_input:
            arrays[InputRole.BIAS] = self._bias
        for role, array in {**arrays, **self._scalars}.items():
            if role in self.graph_io.inputs and self.graph_io.inputs[role].name in names:
                self._first_io.bind_ortvalue_input(self.graph_io.inputs[role].name, _value(array))
        self._bind_growing(self._first_io, width, with_past=False)
        self._first_io.bind_ortvalue_output(self.graph_io.logits.name, _value(self._logits_view(self._num_logits)))
        if self._hidden_output is not None:
            self._first_io.bind_ortvalue_output(self._hidden_output.name, _value(self._hidden))
        self._first_session.run_with_iobinding(self._first_io, self._run_options)

    def _bind_input(self, name: str, array: npt.NDArray[Any]) -> None:
        self._io.bind_ortvalue_input(name, _value(array))

    def _bind_cache(self, width: int) -> None:
        arena = self.arena
        if isinstance(arena, GrowingArena):
            self._bind_growing(self._io, width, with_past=True)
        elif isinstance(arena, InPlaceArena | BorrowedArena) and self._bound_generation != (now := arena.generation):
            # The graph writes new slots in place: every tensor's slice of the arena is both past and present.
            for array, tensor in zip(arena.tensors(), self.graph_io.cache, strict=True):
                value = _value(array)
                self._io.bind_ortvalue_input(tensor.past, value)
                self._io.bind_ortvalue_output(tensor.present, value)
            self._bound_generation = now

    def _bind_growing(self, io: Any, width: int, *, with_past: bool) -> None:
        if not isinstance(self.arena, GrowingArena):
            raise TypeError("only the tensors of a growing arena are bound again for every pass")
        pasts = self.arena.past()
        for past, present, tensor in zip(pasts, self.arena.present(width), self.graph_io.cache, strict=True):
            if with_past:
                io.bind_ortvalue_input(tensor.past, _value(past))
            io.bind_ortvalue_output(tensor.present, _value(present))

    def _bind_width(self, width: int) -> None:
        if width > self._tokens.shape[1]:
            self._tokens = np.zeros((1, width), self._tokens.dtype)
            self._inputs_by_width.clear()
        if width not in self._inputs_by_width:
            positions = self.graph_io.inputs.get(InputRole.POSITIONS)
            values = [(self.graph_io.inputs[InputRole.TOKENS].name, _value(self._tokens[:, :width]))]
            array = np.zeros((1, width), np.int64) if positions is None else _positions_array(positions, width)
            if positions is not None:
                values.append((positions.name, _value(array)))
            self._inputs_by_width[width] = array, values
        self._positions, values = self._inputs_by_width[width]
        for name, value in values:
            self._io.bind_ortvalue_input(name, value)
        self._width = width

    def _bind_logits(self, width: int, wanted: npt.NDArray[np.int64]) -> int:
        """Bind the logits of a pass; returns the index of the first token whose logits it gives."""
        mode = self.graph_io.logits_mode
        if mode is LogitsMode.SELECTED:
            if wanted.size != self._num_logits:
                self._bind_logits_buffer(wanted.size)
            self._logit_positions[: wanted.size] = wanted
            return 0
        count = width
        if mode is LogitsMode.LAST:
            count = 1
        elif mode is LogitsMode.LAST_N:
            count = width - int(wanted.min())
            self._scalars[InputRole.LOGITS_TO_KEEP][...] = count
        if count != self._num_logits:
            self._bind_logits_buffer(count)
        return width - count

    def _bind_hidden_states(self, output: GraphValue, width: int) -> None:
        rows = (1, width) if len(output.shape) == 3 else (self._num_logits,)
        self._hidden = np.empty((*rows, self.graph_io.hidden_size or 0), _dtype(output))
        self._io.bind_ortvalue_output(output.name, _value(self._hidden))

    def _bind_logits_buffer(self, count: int) -> None:
        if count > len(self._logits) or len(self._logits) > max(count, _KEPT_LOGIT_ROWS):
            self._logit_positions = np.zeros(count, np.int64)
            self._logits = np.empty((count, self.graph_io.vocab_size), self._logits.dtype)
            self._logits_by_count.clear()
        values = self._logits_by_count.get(count)
        if values is None:
            values = self._logits_by_count[count] = (
                _value(self._logit_positions[:count]),
                _value(self._logits_view(count)),
            )
        if self.graph_io.logits_mode is LogitsMode.SELECTED:
            self._io.bind_ortvalue_input(self.graph_io.inputs[InputRole.LOGIT_POSITIONS].name, values[0])
        self._io.bind_ortvalue_output(self.graph_io.logits.name, values[1])
        self._num_logits = count

    def _logits_view(self, count: int) -> npt.NDArray[Any]:
        """The first rows of the logits buffer, with as many dimensions as the graph's output."""
        logits = self._logits[:count]
        return logits[None] if len(self.graph_io.logits.shape) == 3 else logits

    def _select_logits(self, first: int, wanted: npt.NDArray[np.int64]) -> Floats:
        """The wanted logits of a pass that gave those of the tokens from index `first` on, or just the wanted ones."""
        logits = self._logits[: self._num_logits]
        if self.graph_io.logits_mode is not LogitsMode.SELECTED and not (
            wanted.size == self._num_logits and np.array_equal(wanted, np.arange(first, first + self._num_logits))
        ):
            logits = logits[wanted - first]
        return logits.astype(np.float32, copy=False)

    def _bind_mask(self, total: int) -> None:
        if total > self._ones.shape[1]:
            self._ones = np.ones((1, max(total, self.arena.capacity)), self._ones.dtype)
        self._bind_input(self.graph_io.inputs[InputRole.MASK].name, self._ones[:, :total])

    def _bind_bias(self, width: int, total: int, tree_mask: npt.NDArray[np.bool_] | None) -> None:
        """Bind `[1, 1, width, total]`: zeros if the graph is causal itself, else which tokens attend to which."""
        value = self.graph_io.inputs[InputRole.BIAS]
        cells = width * total
        if tree_mask is None and self.graph_io.causal:
            if cells > self._zero_bias.size:
                self._zero_bias = np.zeros(cells + width * self.arena.capacity, np.float32)
            self._bias = self._zero_bias[:cells].reshape(1, 1, width, total)
            self._bind_input(value.name, self._bias)
            return
        if tree_mask is None:
            tree_mask = np.tri(width, dtype=np.bool_)
        if cells > self._mask_bias.size:
            self._mask_bias = np.empty(cells + width * self.arena.capacity, np.float32)
        bias = self._mask_bias[:cells].reshape(1, 1, width, total)
        masked = tree_mask.shape[1]
        bias[..., : total - masked] = 0
        bias[0, 0, :, total - masked :] = np.where(tree_mask, np.float32(0), _BLOCKED)
        self._bias = _as_graph_type(bias, value)
        self._bind_input(value.name, self._bias)


def _as_graph_type(bias: Floats, value: GraphValue) -> npt.NDArray[Any]:
    """Convert the bias to the input's type: booleans say which tokens are attended to, numbers are added to scores."""
    dtype = _dtype(value)
    if dtype == np.float32:
        return bias
    mask: npt.NDArray[Any] = bias == 0
    if dtype == np.float16:
        mask = np.maximum(bias, np.finfo(np.float16).min)
    return mask.astype(dtype)


def _dtype(value: GraphValue) -> np.dtype[Any]:
    dtype = element_type(value)
    if dtype is None:
        raise TypeError(f"{value.name} is {value.type}")
    return dtype


def _positions_array(value: GraphValue, width: int) -> npt.NDArray[Any]:
    """A buffer for positions in the shape of the graph's input: `[1, n]`, or `[k, 1, n]`."""
    copies = value.shape[0] if len(value.shape) == 3 else None
    shape = (1, width) if len(value.shape) != 3 else (copies if isinstance(copies, int) else 3, 1, width)
    return np.zeros(shape, _dtype(value))


def _value(array: npt.NDArray[Any]) -> ort.OrtValue:
    """The array as an OrtValue that shares its memory."""
    return ort.OrtValue.ortvalue_from_numpy(array)
