"""One graph of fixed shapes with the buffers that its passes read and write."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ..kv.buffers import NumpyBuffers
from .graph_io import GraphIO, InputRole, element_type
from .ort import ORT_ERRORS, run_failure, run_options
from .pass_inputs import wrapped

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
        self._tokens = np.zeros((1, width), element_type(tokens))
        self._positions = np.zeros((1, width), element_type(positions))
        masks = [name for name in names if name.startswith(MASK)]
        shape = (1, 1, width, capacity + width)
        windows = [None if name == MASK else int(name.removeprefix(f"{MASK}_")) for name in masks]
        self._masks = {window: np.zeros(shape, element_type(mask)) for window in windows}
        """By sliding window; None for full attention."""
        self._inputs: dict[str, Array] = {tokens.name: self._tokens, positions.name: self._positions}
        self._inputs |= dict(zip(masks, self._masks.values(), strict=True))
        self._logit_row: Array | None = None
        if LOGIT_ROWS in names:
            self._logit_row = self._inputs[LOGIT_ROWS] = np.zeros(1, np.int32)
        rows = width if self._logit_row is None else 1
        self._next_ids = np.zeros(rows, np.int32)
        self._logits_name = graph_io.logits.name
        self._logits: Array = np.zeros((rows, graph_io.vocab_size), element_type(graph_io.logits))
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
