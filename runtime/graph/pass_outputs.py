"""Outputs of a pass besides the cache: logits and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ..kv.features import FeatureSlots
from .graph_io import Floats, GraphIO, InputRole, LogitsMode
from .pass_inputs import PassInputs, value_dtype, wrapped

KEPT_LOGIT_ROWS: Final = 32
"""Largest number of rows of a logits buffer that is kept for later passes. A prefill by a graph that computes all
logits needs far more, and its buffer is released."""


class LogitsOutput:
    """The logits of one binding.

    Args:
        io: the session's binding.
        graph_io: the graph's inputs and outputs.
        inputs: the inputs of the same binding; the number of trailing logits is one for some graphs.

    Attributes:
        count: number of rows that the last pass gave, -1 before the first one.
    """

    def __init__(self, io: ort.IOBinding, graph_io: GraphIO, inputs: PassInputs) -> None:
        self._io: Final = io
        self._graph_io: Final = graph_io
        self._inputs: Final = inputs
        self.count = -1
        self._positions = np.zeros(0, np.int64)
        self._logits = np.zeros((0, graph_io.vocab_size), value_dtype(graph_io.logits))
        # Wrapping an array takes longer than binding it.
        self._by_count: dict[int, tuple[ort.OrtValue, ort.OrtValue]] = {}
        self._bound_logits: npt.NDArray[Any] = self._logits
        """The rows that are bound."""
        self._is_selected: Final = graph_io.logits_mode is LogitsMode.SELECTED
        self._is_plain: Final = self._is_selected and self._logits.dtype == np.float32
        """Whether the bound rows are what is wanted, as they are."""

    def bind(self, width: int, wanted: npt.NDArray[np.int64]) -> int:
        """Bind the logits of a pass; returns the index of the first token whose logits it gives."""
        if self._is_selected:
            if wanted.size != self.count:
                self.bind_rows(wanted.size)
            self._positions[: wanted.size] = wanted
            return 0
        mode = self._graph_io.logits_mode
        count = 1 if mode is LogitsMode.LAST else width
        if mode is LogitsMode.LAST_N:
            count = width - int(wanted.min())
            self._inputs.scalars[InputRole.LOGITS_TO_KEEP][...] = count
        if count != self.count:
            self.bind_rows(count)
        return width - count

    def bind_rows(self, count: int) -> None:
        """Bind buffers of `count` rows of logits, and of the positions that they belong to."""
        if count > len(self._logits) or len(self._logits) > max(count, KEPT_LOGIT_ROWS):
            self._positions = np.zeros(count, np.int64)
            self._logits = np.empty((count, self._graph_io.vocab_size), self._logits.dtype)
            self._by_count.clear()
        values = self._by_count.get(count)
        if values is None:
            values = self._by_count[count] = (wrapped(self._positions[:count]), wrapped(self._view(count)))
        if self._is_selected:
            self._io.bind_ortvalue_input(self._graph_io.inputs[InputRole.LOGIT_POSITIONS].name, values[0])
        self._io.bind_ortvalue_output(self._graph_io.logits.name, values[1])
        self._bound_logits = self._logits[:count]
        self.count = count

    def bind_to(self, io: ort.IOBinding) -> None:
        """Bind the buffer of the last `bind` to another session."""
        io.bind_ortvalue_output(self._graph_io.logits.name, wrapped(self._view(self.count)))

    def select(self, first: int, wanted: npt.NDArray[np.int64]) -> Floats:
        """The wanted logits of a pass that gave logits of the tokens from index `first` on, or just the wanted ones."""
        logits = self._bound_logits
        if self._is_plain:
            return logits
        if not self._is_selected and not np.array_equal(wanted, np.arange(first, first + self.count)):
            logits = logits[wanted - first]
        return logits.astype(np.float32, copy=False)

    def _view(self, count: int) -> npt.NDArray[Any]:
        """The first rows of the logits buffer, with as many dimensions as the graph's output."""
        logits = self._logits[:count]
        return logits[None] if len(self._graph_io.logits.shape) == 3 else logits


class FeaturesOutput:
    """The features of one binding for a draft head, whose graph gives them.

    Args:
        io: the session's binding.
        graph_io: the graph's inputs and outputs.
    """

    def __init__(self, io: ort.IOBinding, graph_io: GraphIO) -> None:
        if graph_io.draft_features is None or graph_io.feature_size is None:
            raise ValueError("the graph does not give features")
        self.size: Final = graph_io.feature_size
        """Number of features of a token."""
        self._io: Final = io
        self._name: Final = graph_io.draft_features.name
        self._selected: Final = graph_io.draft_features.shape[0] == graph_io.logits.shape[0]
        """Whether only the tokens with logits have features."""
        self._by_count: dict[int, tuple[Floats, ort.OrtValue]] = {}
        self._bound: Floats = np.empty((0, self.size), np.float32)

    def bind(self, width: int, rows: int) -> None:
        """Bind a buffer for a pass over `width` tokens that gives `rows` rows of logits."""
        count = rows if self._selected else width
        if count == len(self._bound):
            return
        if (kept := self._by_count.get(count)) is None:
            array = np.empty((count, self.size), np.float32)
            kept = array, wrapped(array)
            if count <= KEPT_LOGIT_ROWS:
                self._by_count[count] = kept
        self._bound, value = kept
        self._io.bind_ortvalue_output(self._name, value)

    def store(self, slots: FeatureSlots, base: int, width: int, wanted: npt.NDArray[np.int64]) -> None:
        """Store the features of the pass over `width` tokens from slot `base` on, with logits of those `wanted`."""
        has_last = wanted[-1] == width - 1
        if not self._selected or (wanted.size == width and wanted[0] == 0 and has_last):
            slots.write(base, self._bound)
        else:
            slots.forget(base)
            if has_last:
                slots.write(base + width - 1, self._bound[-1:])


class HiddenStatesOutput:
    """The hidden states of one binding, whose graph gives them.

    Args:
        io: the session's binding.
        graph_io: the graph's inputs and outputs.
    """

    def __init__(self, io: ort.IOBinding, graph_io: GraphIO) -> None:
        if graph_io.hidden_states is None:
            raise ValueError("the graph does not give hidden states")
        self._io: Final = io
        self._output: Final = graph_io.hidden_states
        self._dtype: Final = value_dtype(self._output)
        self._size: Final = graph_io.hidden_size or 0
        self._states: npt.NDArray[Any] = np.empty((0, 0), np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of the states of the last pass."""
        return self._states.nbytes

    def bind(self, width: int, rows: int) -> None:
        """Bind a new array for a pass over `width` tokens that gives `rows` rows of logits."""
        shape = (1, width) if len(self._output.shape) == 3 else (rows,)
        self._states = np.empty((*shape, self._size), self._dtype)
        self.bind_to(self._io)

    def bind_to(self, io: ort.IOBinding) -> None:
        """Bind the array of the last `bind` to another session."""
        io.bind_ortvalue_output(self._output.name, wrapped(self._states))

    def select(self, wanted: Sequence[int], *, selected: bool) -> Floats:
        """Those of the tokens with the indices `wanted`, float32 `[r, d]`; all if the pass gave `selected` ones."""
        return (self._states if selected else self._states[0][list(wanted)]).astype(np.float32)
