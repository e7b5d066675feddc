"""Small graphs that move and copy cache slots on a device.

Two graphs do everything that an arena needs beside passes: one moves slots within its tensors, the other copies the
first slots of tensors into others and fills the rest. Each works on all tensors of an arena in one run, whatever the
number of slots, and is made when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from ...errors import EdgeError
from ..devices.device_lock import DeviceMemory, device_lock
from ..graph.ort import ORT_ERRORS, error_reason, load_session, run_options, session_options
from .buffers import Array, CacheTensorType, Slots, grouped

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
        self._sessions: dict[tuple[str, tuple[CacheTensorType, ...]], ort.InferenceSession] = {}

    def __del__(self) -> None:
        """Free the sessions while nothing runs on the device."""
        sessions = list(self._sessions.values())
        self._sessions.clear()
        self.lock.free(sessions)

    def zeros(self, tensor_types: Sequence[CacheTensorType], slots: int) -> list[ort.OrtValue]:
        """New tensors on the device that hold zeros, with `slots` slots.

        Raises:
            EdgeError: the device has no room for them.
        """
        with self.lock:
            try:
                return [
                    ort.OrtValue.ortvalue_from_numpy(np.zeros(each.shape_of(slots), each.dtype), *self.memory)
                    for each in tensor_types
                ]
            except ORT_ERRORS as error:
                raise _device_failed(error) from error

    def uninitialized(self, tensor_types: Sequence[CacheTensorType], slots: int) -> list[ort.OrtValue]:
        """New tensors on the device, to be written wholly before they are read; otherwise as `zeros`."""
        with self.lock:
            try:
                return [
                    ort.OrtValue.ortvalue_from_shape_and_type(each.shape_of(slots), each.dtype.type, *self.memory)
                    for each in tensor_types
                ]
            except ORT_ERRORS as error:
                raise _device_failed(error) from error

    def move(
        self,
        tensor_types: tuple[CacheTensorType, ...],
        tensors: Sequence[ort.OrtValue],
        sources: Slots,
        targets: Slots,
    ) -> None:
        """Copy slots of tensors to other slots, as if all were read before any is written.

        Args:
            tensor_types: types of the tensors.
            tensors: the tensors, on the device.
            sources: the slots to copy, `[n]`.
            targets: where each goes, `[n]`.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        arrays = {"sources": sources.astype(np.int64)}
        for group, tensor_type in enumerate(grouped(tensor_types)):
            arrays[f"targets.{group}"] = _places(tensor_type, targets)
        with self.lock:
            self._run("move", tensor_types, arrays, tensors, tensors)

    def copy(
        self,
        tensor_types: tuple[CacheTensorType, ...],
        sources: Sequence[ort.OrtValue | Array],
        targets: Sequence[ort.OrtValue],
        slots: int,
        capacity: int,
        fill: float = 0.0,
    ) -> None:
        """Copy the first slots of tensors to others, and fill the other slots of these.

        Args:
            tensor_types: types of the tensors.
            sources: tensors of at least `slots` slots, on the device or of this process.
            targets: tensors of `capacity` slots on the device; they may be the sources.
            slots: number of slots to copy, at least 1.
            capacity: number of slots of the targets.
            fill: what the other slots hold afterwards.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        with self.lock:
            self._run("copy", tensor_types, _extents(tensor_types, slots, capacity, fill), sources, targets)

    def read(
        self, tensor_types: tuple[CacheTensorType, ...], tensors: Sequence[ort.OrtValue], slots: int
    ) -> list[Array]:
        """Copy the first `slots` slots of tensors, at least 1, to arrays of this process.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        with self.lock:
            binding = self._run("copy", tensor_types, _extents(tensor_types, slots, slots, 0.0), tensors, None)
            return [np.array(array) for array in binding.copy_outputs_to_cpu()]

    def _run(
        self,
        kind: str,
        tensor_types: tuple[CacheTensorType, ...],
        arrays: dict[str, npt.NDArray[Any]],
        inputs: Sequence[ort.OrtValue | Array],
        outputs: Sequence[ort.OrtValue] | None,
    ) -> ort.IOBinding:
        """Run a graph over all tensors; the outputs are this process's if `outputs` is None."""
        try:
            session = self._session(kind, tensor_types)
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
            # Copies of the inputs on the device are freed here, under the lock.
            binding.clear_binding_inputs()
        except ORT_ERRORS as error:
            raise _device_failed(error) from error
        return binding

    def _session(self, kind: str, tensor_types: tuple[CacheTensorType, ...]) -> ort.InferenceSession:
        session = self._sessions.get((kind, tensor_types))
        if session is None:
            options = session_options(1)
            options.enable_mem_pattern = False
            providers = self._add_device(options)
            make = _move_graph if kind == "move" else _copy_graph
            session = self._sessions[kind, tensor_types] = load_session(make(tensor_types), options, providers)
        return session


def _device_failed(error: Exception) -> EdgeError:
    return EdgeError(
        f"the device cannot keep the KV cache: {error_reason(error)}", "give a smaller --context, or use --device cpu"
    )


def _places(tensor_type: CacheTensorType, slots: Slots) -> npt.NDArray[np.int64]:
    """Index of each of `slots` in every row of a tensor, `[rows * n, axis + 1]`: ScatterND's indices."""
    leading = tensor_type.shape[: tensor_type.axis]
    places = np.indices((*leading, slots.size)).reshape(len(leading) + 1, -1).T.astype(np.int64)
    places[:, -1] = slots[places[:, -1]]
    return places


def _extents(
    tensor_types: tuple[CacheTensorType, ...], slots: int, capacity: int, fill: float
) -> dict[str, npt.NDArray[Any]]:
    """Inputs of the graph that copies."""
    arrays: dict[str, npt.NDArray[Any]] = {"slots": np.array([slots], np.int64)}
    for group, tensor_type in enumerate(grouped(tensor_types)):
        rank = len(tensor_type.shape)
        padding = np.zeros(2 * rank, np.int64)
        padding[rank + tensor_type.axis] = capacity - slots
        arrays[f"padding.{group}"] = padding
        arrays[f"fill.{group}"] = np.array(fill, tensor_type.dtype)
    return arrays


def _move_graph(tensor_types: tuple[CacheTensorType, ...]) -> bytes:
    """A graph that gathers slots of every tensor and scatters them over the same tensor.

    ONNX Runtime scatters in place where an input and its output are bound to one buffer.
    """
    from ...models.onnx_file import model_messages as onnx  # noqa: PLC0415 -- importing protobuf takes 28 ms

    nodes, constants = [], []
    inputs = [onnx.value_info("sources", np.int64, ["n"])]
    outputs = []
    for group, (tensor_type, members) in enumerate(grouped(tensor_types).items()):
        axis, shape = tensor_type.axis, _symbolic(tensor_type, "capacity")
        inputs.append(onnx.value_info(f"targets.{group}", np.int64, [f"places.{group}", axis + 1]))
        flat = [-1, *tensor_type.shape[axis + 1 :]]
        constants.append(onnx.tensor(f"flat.{group}", np.array(flat, np.int64)))
        for index in members:
            inputs.append(onnx.value_info(f"in.{index}", tensor_type.dtype, shape))
            outputs.append(onnx.value_info(f"out.{index}", tensor_type.dtype, shape))
            nodes += [
                onnx.node("Gather", [f"in.{index}", "sources"], [f"gathered.{index}"], axis=axis),
                onnx.node("Reshape", [f"gathered.{index}", f"flat.{group}"], [f"moved.{index}"]),
                onnx.node("ScatterND", [f"in.{index}", f"targets.{group}", f"moved.{index}"], [f"out.{index}"]),
            ]
    graph = onnx.GraphProto(name="move", node=nodes, input=inputs, output=outputs, initializer=constants)
    data: bytes = onnx.model(graph, opset=_SCATTER_OPSET, microsoft=False).SerializeToString()
    return data


def _copy_graph(tensor_types: tuple[CacheTensorType, ...]) -> bytes:
    """A graph that cuts every tensor to its first slots and pads it to the capacity of another."""
    from ...models.onnx_file import model_messages as onnx  # noqa: PLC0415 -- importing protobuf takes 28 ms

    nodes, constants = [], [onnx.tensor("first", np.zeros(1, np.int64))]
    inputs = [onnx.value_info("slots", np.int64, [1])]
    outputs = []
    for group, (tensor_type, members) in enumerate(grouped(tensor_types).items()):
        rank = len(tensor_type.shape)
        inputs.append(onnx.value_info(f"padding.{group}", np.int64, [2 * rank]))
        inputs.append(onnx.value_info(f"fill.{group}", tensor_type.dtype, []))
        constants.append(onnx.tensor(f"axis.{group}", np.array([tensor_type.axis], np.int64)))
        for index in members:
            inputs.append(onnx.value_info(f"in.{index}", tensor_type.dtype, _symbolic(tensor_type, f"old.{index}")))
            outputs.append(onnx.value_info(f"out.{index}", tensor_type.dtype, _symbolic(tensor_type, f"new.{index}")))
            nodes += [
                onnx.node("Slice", [f"in.{index}", "first", "slots", f"axis.{group}"], [f"cut.{index}"]),
                onnx.node("Pad", [f"cut.{index}", f"padding.{group}", f"fill.{group}"], [f"out.{index}"]),
            ]
    graph = onnx.GraphProto(name="copy", node=nodes, input=inputs, output=outputs, initializer=constants)
    data: bytes = onnx.model(graph, opset=_OPSET, microsoft=False).SerializeToString()
    return data


def _symbolic(tensor_type: CacheTensorType, slots: str) -> list[int | str]:
    shape: list[int | str] = list(tensor_type.shape)
    shape[tensor_type.axis] = slots
    return shape
