"""A KV arena in a device's memory.

The graph extends its tensors in place as it does NumPy's: past and present of each are one buffer. Rewinding moves an
integer; moving slots, growing and copying run the small graphs of `slot_graphs.py` on the device. Snapshots have the
form of every arena's, so that a conversation saved on one device goes on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnxruntime as ort

from .arena import InPlaceArena
from .buffers import CacheBuffers, CacheSnapshot, CacheTensorType, Slots
from .slot_graphs import SlotGraphs


class DeviceBuffers(CacheBuffers):
    """Buffers in a device's memory.

    Args:
        tensor_types: types of the tensors.
        values: the tensors, of `slots` slots each.
        slots: number of slots.
        graphs: graphs of the device.
    """

    def __init__(
        self, tensor_types: Sequence[CacheTensorType], values: Sequence[ort.OrtValue], slots: int, graphs: SlotGraphs
    ) -> None:
        self._graphs: Final = graphs
        self.values: Final = list(values)
        self._slots: Final = slots
        super().__init__(tensor_types)

    def __del__(self) -> None:
        """Free the memory while nothing runs on the device."""
        self._graphs.lock.free(self.values)

    @property
    def nbytes(self) -> int:
        """See `CacheBuffers.nbytes`."""
        return self._slots * sum(tensor_type.slot_bytes for tensor_type in self.tensor_types)

    def select(self, indices: Sequence[int]) -> DeviceBuffers:
        """See `CacheBuffers.select`."""
        return DeviceBuffers(
            [self.tensor_types[index] for index in indices],
            [self.values[index] for index in indices],
            self._slots,
            self._graphs,
        )

    def resized(self, slots: int) -> DeviceBuffers:
        """See `CacheBuffers.resized`."""
        larger = self._graphs.uninitialized(self.tensor_types, slots)
        self._graphs.copy(self.tensor_types, self.values, larger, self._slots, slots)
        return DeviceBuffers(self.tensor_types, larger, slots, self._graphs)

    def move(self, sources: Slots, targets: Slots) -> None:
        """See `CacheBuffers.move`."""
        self._graphs.move(self.tensor_types, self.values, sources, targets)

    def fill(self, start: int, stop: int, value: float) -> None:
        """See `CacheBuffers.fill`."""
        del stop
        if start:
            self._graphs.copy(self.tensor_types, self.values, self.values, start, self._slots, value)
            return
        filled = [np.full(each.shape_of(1), value, each.dtype) for each in self.tensor_types]
        self._graphs.copy(self.tensor_types, filled, self.values, 1, self._slots, value)

    def read(self, slots: int) -> CacheSnapshot:
        """See `CacheBuffers.read`."""
        if slots:
            arrays = self._graphs.read(self.tensor_types, self.values, slots)
        else:
            arrays = [np.empty(each.shape_of(0), each.dtype) for each in self.tensor_types]
        return tuple(np.stack([arrays[member] for member in members]) for members in self.groups.values())

    def write(self, snapshot: CacheSnapshot, slots: int) -> None:
        """See `CacheBuffers.write`."""
        arrays = {
            member: np.ascontiguousarray(new)
            for stack, members in zip(snapshot, self.groups.values(), strict=True)
            for member, new in zip(members, stack, strict=True)
        }
        if slots:
            sources = [arrays[index] for index in range(len(arrays))]
            self._graphs.copy(self.tensor_types, sources, self.values, slots, self._slots)

    def copy(self, source: CacheBuffers, slots: int) -> None:
        """See `CacheBuffers.copy`; from buffers of the same device without the host."""
        if isinstance(source, DeviceBuffers) and source._graphs.memory == self._graphs.memory:
            if slots:
                self._graphs.copy(self.tensor_types, source.values, self.values, slots, self._slots)
            return
        super().copy(source, slots)


class DeviceArena(InPlaceArena):
    """An arena whose buffers lie in a device's memory.

    Args:
        tensor_types: types of the graph's cache tensors.
        limit: largest number of tokens of the context.
        capacity: number of slots if the graph fixes it; otherwise the buffers grow.
        graphs: graphs of the device, shared by the arenas of one model.
    """

    def __init__(
        self, tensor_types: Sequence[CacheTensorType], limit: int, capacity: int | None, graphs: SlotGraphs
    ) -> None:
        self._graphs: Final = graphs
        super().__init__(tensor_types, limit, capacity)

    def _grown(self, needed: int) -> int:
        """The next capacity, always doubled: attention reads the slots in use, and a device's memory fragments."""
        grown = self._capacity
        while grown < needed:
            grown *= 2
        return grown

    def _new_buffers(self, slots: int) -> CacheBuffers:
        return DeviceBuffers(self.tensor_types, self._graphs.zeros(self.tensor_types, slots), slots, self._graphs)
