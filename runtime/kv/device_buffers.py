"""Buffers of cache tensors in a device's memory, and the small graphs that move and copy their slots there.

The decoder extends such tensors in place as it does NumPy's: past and present of each are one buffer. Snapshots have
the form of every arena's, so that a conversation saved on one device goes on another. Two graphs do everything that an
arena needs beside passes: one moves slots within its tensors, the other copies the first slots of tensors into others
and fills the rest. Each works on all tensors of an arena in one run, whatever the number of slots, and is made when it
is first needed.
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

_OPSET: Final = 21
_SCATTER_OPSET: Final = 13
"""Before reductions: CUDA's kernel of later ones adds atomically, and warns of it when a session is made."""


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
        self._sessions: dict[tuple[str, TensorTypes], ort.InferenceSession] = {}

    def __del__(self) -> None:
        """Free the sessions while nothing runs on the device."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        self.lock.free(sessions)

    def new_buffers(self, tensor_types: Sequence[CacheTensorType], slots: int, *, zeros: bool = True) -> DeviceBuffers:
        """New buffers on the device with `slots` slots, which hold zeros, or anything without `zeros`.

        Raises:
            EdgeError: the device has no room for them.
        """
        shapes = [(each.shape_of(slots), each.dtype) for each in tensor_types]
        with self._device():
            if zeros:
                values = [ort.OrtValue.ortvalue_from_numpy(np.zeros(*each), *self.memory) for each in shapes]
            else:
                new = ort.OrtValue.ortvalue_from_shape_and_type
                values = [new(shape, dtype.type, *self.memory) for shape, dtype in shapes]
        return DeviceBuffers(tensor_types, values, slots, self)

    def run(
        self,
        kind: str,
        tensor_types: TensorTypes,
        arrays: dict[str, npt.NDArray[Any]],
        inputs: Sequence[ort.OrtValue | Array],
        outputs: Sequence[ort.OrtValue] | None,
    ) -> list[Array]:
        """Run the graph that moves or copies slots over all tensors.

        Args:
            kind: "move" or "copy".
            tensor_types: types of the tensors.
            arrays: which slots, by name of the input.
            inputs: the tensors, on the device or of this process.
            outputs: tensors on the device, which may be the inputs; None for arrays of this process.

        Returns:
            The arrays, if there are no `outputs`.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        with self._device():
            session = self._sessions.get((kind, tensor_types))
            if session is None:
                options = session_options(1)
                options.enable_mem_pattern = False
                providers = self._add_device(options)
                session = load_session(_graph(kind, tensor_types), options, providers)
                self._sessions[kind, tensor_types] = session
            binding = session.io_binding()
            for name, array in arrays.items():
                binding.bind_cpu_input(name, array)
            for index, value in enumerate(inputs):
                if isinstance(value, np.ndarray):
                    binding.bind_cpu_input(f"in.{index}", value)
                else:
                    binding.bind_ortvalue_input(f"in.{index}", value)
                if outputs is None:
                    binding.bind_output(f"out.{index}", "cpu")
                else:
                    binding.bind_ortvalue_output(f"out.{index}", outputs[index])
            session.run_with_iobinding(binding, run_options())
            arrays_out = [np.array(array) for array in binding.copy_outputs_to_cpu()] if outputs is None else []
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
        larger = self._graphs.new_buffers(self.tensor_types, slots, zeros=False)
        larger._copy(self.values, self._slots)
        return larger

    def move(self, sources: Slots, targets: Slots) -> None:
        """Copy slots to other slots on the device."""
        arrays = {"sources": sources.astype(np.int64)}
        arrays |= {f"targets.{group}": _places(each, targets) for group, each in enumerate(self.groups)}
        self._graphs.run("move", self.tensor_types, arrays, self.values, self.values)

    def fill(self, start: int, stop: int, value: float) -> None:
        """Set all slots from `start` on to one value."""
        del stop
        filled = [np.full(each.shape_of(1), value, each.dtype) for each in self.tensor_types]
        self._copy(self.values if start else filled, max(start, 1), value)

    def read(self, slots: int) -> CacheSnapshot:
        """Copy the first slots from the device."""
        if slots:
            arrays = self._graphs.run("copy", self.tensor_types, self._extents(slots, slots), self.values, None)
        else:
            arrays = [np.empty(each.shape_of(0), each.dtype) for each in self.tensor_types]
        return tuple(np.stack([arrays[member] for member in members]) for members in self.groups.values())

    def write(self, snapshot: CacheSnapshot, slots: int) -> None:
        """Copy the first slots of a snapshot to the device."""
        arrays: dict[int, Array] = {}
        for stack, members in zip(snapshot, self.groups.values(), strict=True):
            arrays.update(zip(members, map(np.ascontiguousarray, stack), strict=True))
        self._copy([arrays[index] for index in range(len(arrays))], slots)

    def copy(self, source: CacheBuffers, slots: int) -> None:
        """Set the first slots to those of other buffers: of the same device without the host."""
        if isinstance(source, DeviceBuffers) and source._graphs.memory == self._graphs.memory:
            self._copy(source.values, slots)
        else:
            super().copy(source, slots)

    def _copy(self, sources: Sequence[ort.OrtValue | Array], slots: int, fill: float = 0.0) -> None:
        """Copy the first slots of other tensors, or of these, and fill the other slots; without slots, do nothing."""
        if slots:
            extents = self._extents(slots, self._slots, fill)
            self._graphs.run("copy", self.tensor_types, extents, sources, self.values)

    def _extents(self, slots: int, capacity: int, fill: float = 0.0) -> dict[str, npt.NDArray[Any]]:
        """Inputs of the graph that copies."""
        arrays: dict[str, npt.NDArray[Any]] = {"slots": np.array([slots], np.int64)}
        for group, tensor_type in enumerate(self.groups):
            rank = len(tensor_type.shape)
            padding = np.zeros(2 * rank, np.int64)
            padding[rank + tensor_type.axis] = capacity - slots
            arrays[f"padding.{group}"] = padding
            arrays[f"fill.{group}"] = np.array(fill, tensor_type.dtype)
        return arrays


def _places(tensor_type: CacheTensorType, slots: Slots) -> npt.NDArray[np.int64]:
    """Index of each of `slots` in every row of a tensor, `[rows * n, axis + 1]`: ScatterND's indices."""
    leading = tensor_type.shape[: tensor_type.axis]
    places = np.indices((*leading, slots.size)).reshape(len(leading) + 1, -1).T.astype(np.int64)
    places[:, -1] = slots[places[:, -1]]
    return places


def _graph(kind: str, tensor_types: TensorTypes) -> bytes:
    """A graph that moves slots of every tensor, or copies the first slots of tensors to others.

    The one gathers slots and scatters them over the same tensor; ONNX Runtime scatters in place where an input and its
    output are bound to one buffer. The other cuts a tensor to its first slots and pads it to the capacity of another.
    """
    from ...models.onnx_file import model_messages as onnx  # noqa: PLC0415 -- importing protobuf takes 28 ms

    moves = kind == "move"
    nodes: list[Any] = []
    outputs: list[Any] = []
    constants = [] if moves else [onnx.tensor("first", np.zeros(1, np.int64))]
    inputs = [onnx.value_info("sources" if moves else "slots", np.int64, ["n" if moves else 1])]
    for group, (tensor_type, members) in enumerate(grouped(tensor_types).items()):
        axis, rank = tensor_type.axis, len(tensor_type.shape)
        if moves:
            inputs.append(onnx.value_info(f"targets.{group}", np.int64, [f"places.{group}", axis + 1]))
            constants.append(onnx.tensor(f"flat.{group}", np.array([-1, *tensor_type.shape[axis + 1 :]], np.int64)))
        else:
            inputs.append(onnx.value_info(f"padding.{group}", np.int64, [2 * rank]))
            inputs.append(onnx.value_info(f"fill.{group}", tensor_type.dtype, []))
            constants.append(onnx.tensor(f"axis.{group}", np.array([axis], np.int64)))
        for index in members:
            for values, name, slots in ((inputs, "in", "old"), (outputs, "out", "new")):
                shape: list[int | str] = list(tensor_type.shape)
                shape[axis] = "capacity" if moves else f"{slots}.{index}"
                values.append(onnx.value_info(f"{name}.{index}", tensor_type.dtype, shape))
            if moves:
                nodes += [
                    onnx.node("Gather", [f"in.{index}", "sources"], [f"gathered.{index}"], axis=axis),
                    onnx.node("Reshape", [f"gathered.{index}", f"flat.{group}"], [f"moved.{index}"]),
                    onnx.node("ScatterND", [f"in.{index}", f"targets.{group}", f"moved.{index}"], [f"out.{index}"]),
                ]
            else:
                nodes += [
                    onnx.node("Slice", [f"in.{index}", "first", "slots", f"axis.{group}"], [f"cut.{index}"]),
                    onnx.node("Pad", [f"cut.{index}", f"padding.{group}", f"fill.{group}"], [f"out.{index}"]),
                ]
    graph = onnx.GraphProto(name=kind, node=nodes, input=inputs, output=outputs, initializer=constants)
    opset = _SCATTER_OPSET if moves else _OPSET
    data: bytes = onnx.model(graph, opset=opset, microsoft=False).SerializeToString()
    return data
