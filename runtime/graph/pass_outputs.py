"""Outputs of a pass besides the cache: logits and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ..kv.features import FeatureSlots
from .graph_io import Floats, GraphIO, GraphValue, InputRole, LogitsMode
from .pass_inputs import PassInputs, wrapped

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
        self._logits = np.zeros((0, graph_io.vocab_size), graph_io.logits.dtype)
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


class TokenOutput:
    """An output with numbers of every new token, or of those with logits: hidden states, or features for a draft head.

    Args:
        io: the session's binding.
        output: the output, `[M, d]`, `[1, M, d]`, or `[R, d]` with the first dimension of the logits.
        logits: the graph's logits.

    Attributes:
        count: number of rows that are bound; 0 to bind them again.
        rows: the bound rows, `[count, d]` in the graph's type.
    """

    def __init__(self, io: ort.IOBinding, output: GraphValue | None, logits: GraphValue) -> None:
        if output is None:
            raise ValueError("the graph does not give hidden states")
        self._io: Final = io
        self._output: Final = output
        self._of_logits: Final = len(output.shape) == 2 and output.shape[0] == logits.shape[0]
        self.size: Final = int(output.shape[-1] or 0)
        """Number of values of a token."""
        self.count = 0
        self.rows: npt.NDArray[Any] = np.empty((0, self.size), output.dtype)
        self._by_count: Final[dict[int, tuple[npt.NDArray[Any], ort.OrtValue]]] = {}
        self._value: ort.OrtValue | None = None

    def bind(self, width: int, logit_rows: int) -> None:
        """Bind a buffer for a pass over `width` tokens that gives `logit_rows` rows of logits."""
        count = logit_rows if self._of_logits else width
        if count == self.count:
            return
        if (kept := self._by_count.get(count)) is None:
            rows = np.empty((count, self.size), self.rows.dtype)
            kept = rows, wrapped(rows[None] if len(self._output.shape) == 3 else rows)
            if count <= KEPT_LOGIT_ROWS:
                self._by_count[count] = kept
        (self.rows, self._value), self.count = kept, count
        self.bind_to(self._io)

    def bind_to(self, io: ort.IOBinding) -> None:
        """Bind the buffer of the last `bind` to another session."""
        io.bind_ortvalue_output(self._output.name, self._value)

    def select(self, wanted: Sequence[int]) -> Floats:
        """Those of the tokens with the indices `wanted`, which had logits, in a new array: float32 `[r, d]`."""
        return (self.rows if self._of_logits else self.rows[list(wanted)]).astype(np.float32)

    def store(self, slots: FeatureSlots, base: int, width: int, wanted: npt.NDArray[np.int64]) -> None:
        """Store the features of the pass over `width` tokens from slot `base` on, with logits of those `wanted`."""
        has_last = wanted[-1] == width - 1
        if not self._of_logits or (wanted.size == width and wanted[0] == 0 and has_last):
            slots.write(base, self.rows)
        else:
            slots.forget(base)
            if has_last:
                slots.write(base + width - 1, self.rows[-1:])
