"""Passes on a device: inputs are copied to it, and few numbers come back.

Binding copies an input to the device at once, so nothing can be rewritten in place: what changes is bound for every
pass. The cache stays on the device (`device_buffers.py`). Where the graph ranks its logits itself and a request needs
only the best ones, those are all that is copied back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ..devices.providers import DeviceLock
from ..kv.arena import KVArena
from ..kv.buffers import CacheBuffers
from ..kv.device_buffers import DeviceBuffers
from .bound_graph import NewTokens
from .bound_session import BoundSession
from .graph_io import Floats, GraphIO, InputRole, LogitsMode, TopOutputs
from .pass_inputs import PassInputs, wrapped
from .pass_outputs import KEPT_LOGIT_ROWS, LogitsOutput

_EXCLUDED: Final = np.finfo(np.float32).min
"""What stands for the logits that stay on the device: finite, so that differences and exponentials are defined."""


class DeviceLogits(LogitsOutput):
    """The logits of a binding to a device: all of them, or the best of each row."""

    def __init__(self, io: ort.IOBinding, graph_io: GraphIO, inputs: PassInputs) -> None:
        super().__init__(io, graph_io, inputs)
        self.top: TopOutputs | None = None
        """The outputs that are bound instead of the logits; None for the logits."""
        self._ids = np.zeros((0, 0), np.int64)
        self._values = np.zeros((0, 0), np.float32)
        self._sparse = np.empty((0, graph_io.vocab_size), np.float32)
        self._set: list[npt.NDArray[np.int64]] = []
        """Ids of the numbers in each row of `_sparse`."""

    @property
    def nbytes(self) -> int:
        """Bytes that the last pass copied from the device."""
        if self.top is None:
            return self._logits[: self.count].nbytes
        return self._ids[: self.count].nbytes + self._values[: self.count].nbytes

    def bind_copied(self) -> None:
        """Bind the positions of the logits, which binding copies to the device."""
        if self._graph_io.logits_mode is LogitsMode.SELECTED:
            name = self._graph_io.inputs[InputRole.LOGIT_POSITIONS].name
            self._io.bind_ortvalue_input(name, wrapped(self._positions[: self.count]))

    def bind_rows(self, count: int) -> None:
        """Bind buffers of `count` rows: of logits, or of the best of each where `top` says so."""
        if self.top is None:
            super().bind_rows(count)
            return
        if count > len(self._positions):
            self._positions = np.zeros(count, np.int64)
        if count > len(self._ids) or len(self._ids) > max(count, KEPT_LOGIT_ROWS):
            self._ids = np.zeros((count, self.top.count), self.top.ids.dtype)
            self._values = np.zeros((count, self.top.count), self.top.values.dtype)
            self._sparse = np.full((count, self._graph_io.vocab_size), _EXCLUDED)
            self._set = [np.zeros(0, np.int64)] * count
        self._io.bind_ortvalue_output(self.top.ids.name, wrapped(self._ids[:count]))
        self._io.bind_ortvalue_output(self.top.values.name, wrapped(self._values[:count]))
        self.count = count

    def select(self, first: int, wanted: npt.NDArray[np.int64]) -> Floats:
        """The wanted logits of a pass; those that stayed on the device are the lowest number."""
        if self.top is None:
            return super().select(first, wanted)
        for row in range(self.count):
            ids = self._ids[row].copy()
            self._sparse[row, self._set[row]] = _EXCLUDED
            self._sparse[row, ids] = self._values[row]
            self._set[row] = ids
        logits = self._sparse[: self.count]
        # Only what is set here is cleared for the next pass.
        logits.flags.writeable = False
        return logits


class DeviceSession(BoundSession):
    """A `BoundSession` on a device, whose lock its passes hold."""

    _logits: DeviceLogits
    _logits_type = DeviceLogits

    def __init__(
        self,
        session: ort.InferenceSession,
        graph_io: GraphIO,
        arena: KVArena,
        first_session: ort.InferenceSession | None,
        lock: DeviceLock,
        *,
        hidden_states: bool = False,
    ) -> None:
        self._lock: Final = lock
        with lock:
            super().__init__(session, graph_io, arena, first_session, hidden_states=hidden_states)
        self.skips_logits = False  # kernels of devices need not expect tensors without rows

    def __del__(self) -> None:
        """Free the device's memory while nothing runs on it."""
        lock, values = self._lock, list(self.__dict__.values())
        self.__dict__.clear()
        lock.free(values)

    def _run_pass(self, new: NewTokens) -> Floats:
        with self._lock:
            top = None if self.whole_logits else self.graph_io.top
            if top is not self._logits.top:
                self._io.clear_binding_outputs()
                self._bound_slots.clear()
                self._logits.top = top
                for output in (self._logits, self._hidden, self._features):
                    if output is not None:
                        output.count = 0  # so that it is bound again
            logits = super()._run_pass(new)
            self.host_bytes += self._logits.nbytes + (0 if self._hidden is None else self._hidden.rows.nbytes)
            return logits

    def _run_session(self) -> None:
        self._inputs.bind_copied()
        self._logits.bind_copied()
        super()._run_session()

    def _cache_values(self, buffers: CacheBuffers, members: Sequence[int], first: int) -> Sequence[ort.OrtValue]:
        if isinstance(buffers, DeviceBuffers):
            return [buffers.values[index] for index in members]
        return super()._cache_values(buffers, members, first)
