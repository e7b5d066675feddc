"""Buffers of cache tensors in a device's memory, and the small graphs that move and copy their slots there.

The decoder extends such tensors in place as it does NumPy's: past and present of each are one buffer. Snapshots have
the form of every arena's, so that a conversation saved on one device goes on another. Two graphs do everything that an
arena needs beside passes: one writes slots of tensors to slots of the same or of others, the other reads them. Each
works on all tensors of an arena in one run, whatever the number of slots, and is made when it is first needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ...errors import EdgeError
from ..devices.providers import DeviceMemory, device_lock
from ..graph.ort import ORT_ERRORS, error_reason, load_session, run_options, session_options
from .buffers import Array, CacheBuffers, CacheSnapshot, CacheTensorType, Slots, grouped

TensorTypes: TypeAlias = tuple[CacheTensorType, ...]

_OPSET: Final = 13
"""Before ScatterND has reductions: CUDA's kernel of those adds atomically, and warns of it when a session is made."""


class SlotGraphs:
    """The graphs of one device, for tensors of any types.

    Args:
        memory: the device's memory.
        add_device: adds the device to session options, and returns the names of the providers for the session.
    """

    def __init__(self, memory: DeviceMemory, add_device: Callable[[ort.SessionOptions], list[str]]) -> None:
        self.memory: Final = memory
        self.lock: Final = device_lock(memory)
        """Held while values of the device are made, used or freed."""
        self._add_device = add_device
        self._sessions: dict[tuple[bool, TensorTypes], ort.InferenceSession] = {}

    def __del__(self) -> None:
        """Free the sessions while nothing runs on the device."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        self.lock.free(sessions)

    def new_buffers(self, tensor_types: Sequence[CacheTensorType], slots: int) -> DeviceBuffers:
        """New buffers on the device with `slots` slots, which hold zeros.

        Raises:
            EdgeError: the device has no room for them.
        """
        zeros = (np.zeros(each.shape_of(slots), each.dtype) for each in tensor_types)
        with self._device():
            values = [ort.OrtValue.ortvalue_from_numpy(each, *self.memory) for each in zeros]
        return DeviceBuffers(tensor_types, values, slots, self)

    def run(
        self,
        tensor_types: TensorTypes,
        inputs: Sequence[ort.OrtValue | Array],
        sources: Slots,
        outputs: Sequence[ort.OrtValue] = (),
        targets: Slots | None = None,
    ) -> list[Array]:
        """Write slots of all tensors to others on the device, as if all were read before any is written; or read them.

        Args:
            tensor_types: types of the tensors.
            inputs: the tensors, on the device or of this process.
            sources: which slots of them.
            outputs: tensors on the device, which may be the inputs.
            targets: which slots of the outputs; None to read slots.

        Returns:
            Arrays with the slots, if they are read.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        with self._device():
            writes = targets is not None
            if (session := self._sessions.get((writes, tensor_types))) is None:
                options = session_options(1)
                options.enable_mem_pattern = False
                providers = self._add_device(options)
                session = load_session(_graph(tensor_types, writes=writes), options, providers)
                self._sessions[writes, tensor_types] = session
            binding = session.io_binding()
            binding.bind_cpu_input("sources", sources.astype(np.int64))
            for group, tensor_type in enumerate(grouped(tensor_types)):
                if targets is not None:
                    binding.bind_cpu_input(f"targets.{group}", _places(tensor_type, targets))
            for index, value in enumerate(inputs):
                if isinstance(value, np.ndarray):
                    binding.bind_cpu_input(f"in.{index}", value)
                else:
                    binding.bind_ortvalue_input(f"in.{index}", value)
                if targets is None:
                    binding.bind_output(f"out.{index}", "cpu")
                else:
                    binding.bind_ortvalue_input(f"to.{index}", outputs[index])
                    binding.bind_ortvalue_output(f"out.{index}", outputs[index])
            session.run_with_iobinding(binding, run_options())
            arrays_out = [np.array(array) for array in binding.copy_outputs_to_cpu()] if targets is None else []
            # Copies of the inputs on the device are freed here, under the lock.
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()
            return arrays_out

    @contextmanager
    def _device(self) -> Iterator[None]:
        """Use the device alone; errors say what to do."""
        with self.lock:
            try:
                yield
            except ORT_ERRORS as error:
                raise EdgeError(
                    f"the device cannot keep the KV cache: {error_reason(error)}",
                    "give a smaller --context, or use --device cpu",
                ) from error


class DeviceBuffers(CacheBuffers):
    """Buffers in a device's memory.

    Args:
        tensor_types: types of the tensors.
        values: the tensors, of `slots` slots each.
        slots: number of slots.
        graphs: graphs of the device.
    """

    doubled_up_to = sys.maxsize
    """Attention reads the slots in use, and a device's memory fragments."""

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

    def resized(self, slots: int) -> DeviceBuffers:
        """New tensors on the device that begin with these slots."""
        larger = self._graphs.new_buffers(self.tensor_types, slots)
        larger._write(self.values, np.arange(min(slots, self._slots)))
        return larger

    def move(self, sources: Slots, targets: Slots) -> None:
        """Copy slots to other slots on the device."""
        self._graphs.run(self.tensor_types, self.values, sources, self.values, targets)

    def fill(self, start: int, stop: int, value: float) -> None:
        """Set slots to one value; later slots stay as they are."""
        filled = [np.full(each.shape_of(1), value, each.dtype) for each in self.tensor_types]
        targets = np.arange(start, stop)
        self._graphs.run(self.tensor_types, filled, np.zeros_like(targets), self.values, targets)

    def read(self, slots: int) -> CacheSnapshot:
        """Copy the first slots from the device."""
        if slots:
            arrays = self._graphs.run(self.tensor_types, self.values, np.arange(slots))
        else:
            arrays = [np.empty(each.shape_of(0), each.dtype) for each in self.tensor_types]
        return tuple(np.stack([arrays[member] for member in members]) for members in self.groups.values())

    def write(self, snapshot: CacheSnapshot, slots: int) -> None:
        """Copy the first slots of a snapshot to the device."""
        arrays: dict[int, Array] = {}
        for stack, members in zip(snapshot, self.groups.values(), strict=True):
            arrays.update(zip(members, map(np.ascontiguousarray, stack), strict=True))
        self._write([arrays[index] for index in range(len(arrays))], np.arange(slots))

    def copy(self, source: CacheBuffers, slots: int) -> None:
        """Set the first slots to those of other buffers: of the same device without the host."""
        if isinstance(source, DeviceBuffers) and source._graphs.memory == self._graphs.memory:
            self._write(source.values, np.arange(slots))
        else:
            super().copy(source, slots)

    def _write(self, sources: Sequence[ort.OrtValue | Array], slots: Slots) -> None:
        """Copy slots of other tensors; without slots, do nothing."""
        if slots.size:
            self._graphs.run(self.tensor_types, sources, slots, self.values, slots)


def _places(tensor_type: CacheTensorType, slots: Slots) -> npt.NDArray[np.int64]:
    """Index of each of `slots` in every row of a tensor, `[rows * n, axis + 1]`: ScatterND's indices."""
    leading = tensor_type.shape[: tensor_type.axis]
    places = np.indices((*leading, slots.size)).reshape(len(leading) + 1, -1).T.astype(np.int64)
    places[:, -1] = slots[places[:, -1]]
    return places


def _graph(tensor_types: TensorTypes, *, writes: bool) -> bytes:
    """A graph that reads slots of every tensor, or writes them to slots of another one or of the same.

    ONNX Runtime scatters in place where an input and its output are bound to one buffer.
    """
    from ...models.onnx_file import model_messages as onnx  # noqa: PLC0415 -- importing protobuf takes 28 ms

    nodes, outputs, constants = list[Any](), list[Any](), list[Any]()
    inputs = [onnx.value_info("sources", np.int64, ["n"])]
    for group, (tensor_type, members) in enumerate(grouped(tensor_types).items()):
        axis = tensor_type.axis
        if writes:
            inputs.append(onnx.value_info(f"targets.{group}", np.int64, [f"places.{group}", axis + 1]))
            constants.append(onnx.tensor(f"flat.{group}", np.array([-1, *tensor_type.shape[axis + 1 :]], np.int64)))
        for index in members:
            for values, name in ((inputs, "in"), (inputs, "to"), (outputs, "out"))[:: 1 if writes else 2]:
                shape: list[int | str] = list(tensor_type.shape)
                shape[axis] = f"from.{index}" if name == "in" else f"capacity.{index}"
                values.append(onnx.value_info(f"{name}.{index}", tensor_type.dtype, shape))
            read = f"read.{index}" if writes else f"out.{index}"
            nodes.append(onnx.node("Gather", [f"in.{index}", "sources"], [read], axis=axis))
            if writes:
                nodes.append(onnx.node("Reshape", [read, f"flat.{group}"], [f"rows.{index}"]))
                scattered = [f"to.{index}", f"targets.{group}", f"rows.{index}"]
                nodes.append(onnx.node("ScatterND", scattered, [f"out.{index}"]))
    graph = onnx.GraphProto(name="slots", node=nodes, input=inputs, output=outputs, initializer=constants)
    data: bytes = onnx.model(graph, opset=_OPSET, microsoft=False).SerializeToString()
    return data
