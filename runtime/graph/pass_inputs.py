"""Inputs of a pass: tokens, positions, lengths, and who attends to whom.

Buffers are bound once where possible and rewritten in place. Only arrays whose shape changes (another pass width, a
bias that grows with the sequence) are bound again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from .graph_io import SLOTS_TOGETHER, Floats, GraphIO, GraphValue, InputRole, first_slot

BLOCKED: Final = np.float32(np.finfo(np.float32).min)
_PREPARED: Final = 32
"""Number of lengths of a sequence for which the biases of narrow passes are wrapped at once: one by one, between two
passes, wrapping takes several times as long."""
_NARROW: Final = 16
"""Width of the widest pass whose biases are prepared, and whose tokens are written one by one; those of a prefill are
wider, and few."""


class _WidthBuffers(NamedTuple):
    """Buffers of passes of one width."""

    tokens: npt.NDArray[Any]
    """`[width]`: the tokens, part of a buffer for all widths."""
    positions: npt.NDArray[Any]
    """The positions in the shape of the graph's input."""
    cells: tuple[memoryview, memoryview] | None
    """Tokens and positions, cell by cell; None for wide passes, and where a graph has several copies of positions."""
    values: Sequence[tuple[str, ort.OrtValue]]
    """Names of the inputs, and OrtValues over the buffers."""


class _BiasBuffer:
    """A buffer for biases `[1, 1, width, total]`, zeros at first, with OrtValues of the next few sizes."""

    def __init__(self) -> None:
        self._cells = np.zeros(0, np.float32)
        self._prepared: dict[int, tuple[int, list[tuple[Floats, ort.OrtValue]]]] = {}
        """By width: the first prepared total, and the bias of this total and the following ones."""

    def of(self, width: int, total: int, capacity: int) -> tuple[Floats, ort.OrtValue]:
        """The beginning of the buffer as `[1, 1, width, total]`, and its OrtValue; others have the same memory.

        Args:
            width: number of tokens of the pass.
            total: number of slots, the new ones included.
            capacity: number of slots of the cache, for which the buffer is sized.
        """
        first, biases = self._prepared.get(width, (total, ()))
        if 0 <= total - first < len(biases):
            return biases[total - first]
        if width * total > self._cells.size:
            self._cells = np.zeros(width * (total + capacity), np.float32)
            self._prepared.clear()
        last = min(total + (_PREPARED if width <= _NARROW else 1), self._cells.size // width + 1)
        arrays = [self._cells[: width * each].reshape(1, 1, width, each) for each in range(total, last)]
        made = [(array, wrapped(array)) for array in arrays]
        self._prepared[width] = total, made
        return made[0]


class PassInputs:
    """The inputs of one binding, apart from the cache.

    Args:
        io: the session's binding.
        graph_io: the graph's inputs and outputs.

    Attributes:
        width: number of tokens of the last pass.
        positions: buffer of the positions of a pass of that width.
        has_axes: whether positions are `[3, 1, width]`, in time, rows and columns.
    """

    def __init__(self, io: ort.IOBinding, graph_io: GraphIO) -> None:
        self._io: Final = io
        self._graph_io: Final = graph_io
        self.width = 0
        self._tokens = np.zeros((1, 0), graph_io.inputs[InputRole.TOKENS].dtype)
        self.positions = np.zeros(0, np.int64)
        places = graph_io.inputs.get(InputRole.POSITIONS)
        self.has_axes: Final = places is not None and len(places.shape) == 3
        self._zero_bias: Final = _BiasBuffer()
        self._mask_bias: Final = _BiasBuffer()
        self._bias: npt.NDArray[Any] = np.zeros(0, np.float32)
        """The bound array, which the binding does not keep alive."""
        # Looking up a role takes longer than an attribute, and these are needed in every pass.
        bias, mask = graph_io.inputs.get(InputRole.BIAS), graph_io.inputs.get(InputRole.MASK)
        self._bias_input: Final = bias
        self._bias_dtype: Final = np.dtype(np.float32) if bias is None else bias.dtype
        self._bias_is_float: Final = self._bias_dtype == np.float32
        from_later_slots = {each.window for each in graph_io.cache}
        self._windows: Final = {size: value.name for size, value in graph_io.window_biases.items()}
        self._window_lengths: Final = {
            size: (np.zeros(1, np.int32), np.zeros((), np.int32)) for size in self._windows if size in from_later_slots
        }
        """Last slot and total length of layers whose cache begins at `first_slot`, by their window."""
        self._one_token: dict[int, list[ort.OrtValue]] = {}
        for size, (last_slot, total) in self._window_lengths.items():
            self._bind(f"seqlens_k_{size}", last_slot)
            self._bind(f"total_sequence_length_{size}", total)
        self._window_biases: dict[int, Floats] = {}
        """Buffers of the biases of layers with a window, by its size."""
        self._mask_input: Final = mask
        self._ones = np.ones((1, 0), np.int64 if mask is None else mask.dtype)
        # The width changes from pass to pass; wrapping an array takes longer than binding it.
        self._by_width: dict[int, _WidthBuffers] = {}
        self._current = _WidthBuffers(self._tokens[0], self.positions, None, ())
        self.scalars: Final[dict[InputRole, npt.NDArray[Any]]] = {
            role: np.zeros(tuple(1 for _ in value.shape), value.dtype)
            for role, value in graph_io.inputs.items()
            if role in (InputRole.LAST_SLOT, InputRole.TOTAL_LENGTH, InputRole.LOGITS_TO_KEEP, InputRole.USE_CACHE)
        }
        self._last_slot: Final = _cell(self.scalars.get(InputRole.LAST_SLOT))
        self._total_length: Final = _cell(self.scalars.get(InputRole.TOTAL_LENGTH))
        self._use_cache: Final = self.scalars.get(InputRole.USE_CACHE)
        for role, array in self.scalars.items():
            self._bind(graph_io.inputs[role].name, array)

    def write_tokens(self, ids: Sequence[int], base: int, positions: npt.ArrayLike | None) -> None:
        """Write the tokens of a pass after `base` cached ones, and their positions: consecutive ones when None.

        Positions are `[width]`, or `[3, width]` where they have axes.
        """
        width = len(ids)
        if width != self.width:
            self._bind_width(width)
        buffers = self._current
        if positions is None and buffers.cells is not None:
            tokens, places = buffers.cells
            for index, token in enumerate(ids):
                tokens[index] = token
                places[index] = base + index
            return
        buffers.tokens[:] = ids
        if positions is None:
            buffers.positions[...] = np.arange(base, base + width)
            return
        axes = np.asarray(positions)
        buffers.positions[...] = axes if axes.ndim < 2 else axes[:, None]
        if base == 0 and axes.ndim < 2 and self.positions.flat[-1] != width - 1:
            raise ValueError("a token tree needs a committed slot before it")

    def write_attention(self, base: int, capacity: int, tree_mask: npt.NDArray[np.bool_] | Floats | None) -> None:
        """Write the lengths of a pass, and which tokens attend to which.

        Args:
            base: number of cached tokens.
            capacity: number of slots of the cache, for which the buffers are sized.
            tree_mask: as `NewTokens` has it.
        """
        total = base + self.width
        if self._bias_input is not None:
            self._bind_bias(self._bias_input, self.width, total, capacity, tree_mask)
        if self._mask_input is not None:
            if total > self._ones.shape[1]:
                self._ones = np.ones((1, max(total, capacity)), self._ones.dtype)
            self._bind(self._mask_input.name, self._ones[:, :total])
        if self._last_slot is not None:
            self._last_slot[0] = total - 1
        if self._total_length is not None:
            self._total_length[0] = total
        if self._use_cache is not None:
            self._use_cache.fill(base > 0)

    def bind_copied(self) -> None:
        """Bind what is otherwise rewritten in place, for a device to which binding copies."""
        for name, value in self._current.values:
            self._io.bind_ortvalue_input(name, value)
        for role, array in self.scalars.items():
            self._bind(self._graph_io.inputs[role].name, array)

    def bind_without_cache(self, io: ort.IOBinding, names: set[str]) -> None:
        """Bind the inputs of a pass without cached tokens to another session, which has those of `names`."""
        arrays: dict[InputRole, npt.NDArray[Any]] = {
            InputRole.TOKENS: self._tokens[:, : self.width],
            InputRole.MASK: self._ones[:, : self.width],
            InputRole.POSITIONS: self.positions,
            InputRole.BIAS: self._bias,
            **self.scalars,
        }
        for role, value in self._graph_io.inputs.items():
            if role in arrays and value.name in names:
                io.bind_ortvalue_input(value.name, wrapped(arrays[role]))

    def _bind(self, name: str, array: npt.NDArray[Any]) -> None:
        self._io.bind_ortvalue_input(name, wrapped(array))

    def _bind_width(self, width: int) -> None:
        if width > self._tokens.shape[1]:
            self._tokens = np.zeros((1, width), self._tokens.dtype)
            self._by_width.clear()
        if width not in self._by_width:
            positions = self._graph_io.inputs.get(InputRole.POSITIONS)
            values = [(self._graph_io.inputs[InputRole.TOKENS].name, wrapped(self._tokens[:, :width]))]
            array = np.zeros((1, width), np.int64)
            if positions is not None:
                # `[1, n]`, or `[k, 1, n]`
                copies = positions.shape[0] if isinstance(positions.shape[0], int) else 3
                shape = (copies, 1, width) if len(positions.shape) == 3 else (1, width)
                array = np.zeros(shape, positions.dtype)
                values.append((positions.name, wrapped(array)))
            tokens = self._tokens[0, :width]
            # NumPy takes several times as long for a few numbers, in particular between two passes.
            by_cell = width <= _NARROW and array.size == width
            cells = (tokens.data, array.reshape(-1).data) if by_cell else None
            self._by_width[width] = _WidthBuffers(tokens, array, cells, values)
        self._current = buffers = self._by_width[width]
        self.positions = buffers.positions
        for name, value in buffers.values:
            self._io.bind_ortvalue_input(name, value)
        self.width = width

    def _bind_bias(
        self, value: GraphValue, width: int, total: int, capacity: int, tree_mask: npt.NDArray[np.bool_] | Floats | None
    ) -> None:
        """Bind `[1, 1, width, total]`: zeros if the graph is causal itself, else which tokens attend to which."""
        if tree_mask is None and self._graph_io.causal:
            bias, wrapped_bias = self._zero_bias.of(width, total, capacity)
        else:
            if tree_mask is None:
                tree_mask = np.tri(width, dtype=np.bool_)
            bias, wrapped_bias = self._mask_bias.of(width, total, capacity)
            masked = tree_mask.shape[1]
            bias[..., : total - masked] = 0
            weighted = tree_mask.dtype == np.float32
            bias[0, 0, :, total - masked :] = tree_mask if weighted else np.where(tree_mask, np.float32(0), BLOCKED)
        self._bias = bias
        if self._bias_is_float:
            self._io.bind_ortvalue_input(value.name, wrapped_bias)
        else:
            # Booleans say which tokens are attended to, numbers are added to scores.
            is_half = self._bias_dtype == np.float16
            mask = np.maximum(bias, np.finfo(np.float16).min) if is_half else bias == 0
            self._bias = mask.astype(self._bias_dtype)
            self._bind(value.name, self._bias)
        for window, name in self._windows.items():
            first = 0
            if window in self._window_lengths:
                first = first_slot(window, total - width)
                last_slot, length = self._window_lengths[window]
                last_slot[0] = total - first - 1
                length[...] = total - first
            if total <= window:
                own = wrapped_bias
            elif width == 1 and tree_mask is None and window in self._window_lengths:
                own = self._of_one_token(window)[total - first - window]
            else:
                own = wrapped(self._windowed(bias[..., first:], window, first))
            self._io.bind_ortvalue_input(name, own)

    def _of_one_token(self, window: int) -> Sequence[ort.OrtValue]:
        """Biases of passes over one token, by the number of hidden slots before its window."""
        if window not in self._one_token:
            cells = np.zeros((1, 1, 1, SLOTS_TOGETHER + window), np.float32)
            cells[..., :SLOTS_TOGETHER] = BLOCKED
            self._one_token[window] = [
                wrapped(cells[..., SLOTS_TOGETHER - hidden :]) for hidden in range(SLOTS_TOGETHER)
            ]
        return self._one_token[window]

    def _windowed(self, bias: Floats, window: int, first: int) -> Floats:
        """The bias `[1, 1, width, n]` from slot `first` on that also hides what lies at least `window` positions before
        a token.

        The position of a cached token is its slot; those of the new tokens are an input.
        """
        width, total = bias.shape[2:]
        buffer = self._window_biases.get(window)
        if buffer is None or buffer.size < bias.size:
            buffer = self._window_biases[window] = np.empty(2 * bias.size, np.float32)
        hidden = buffer[: bias.size].reshape(bias.shape)
        hidden[...] = bias
        positions, base = self.positions.reshape(-1, width)[-1], total - width
        positions = positions - positions[0] + first + base  # merged tokens of images leave gaps between positions
        for row, position in enumerate(positions.tolist()):
            hidden[0, 0, row, : max(0, min(position - window + 1 - first, base))] = BLOCKED
        if np.ptp(positions) >= window:
            hidden[0, 0, :, base:][positions[:, None] - positions >= window] = BLOCKED
        return hidden


def _cell(scalar: npt.NDArray[Any] | None) -> memoryview | None:
    """The only cell of an array."""
    return None if scalar is None else scalar.reshape(-1).data


def wrapped(array: npt.NDArray[Any]) -> ort.OrtValue:
    """The array as an OrtValue that shares its memory."""
    return ort.OrtValue.ortvalue_from_numpy(array)
