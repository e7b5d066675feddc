"""Integer products of ONNX Runtime: their weights as packed for this machine, and whether they overflow."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from ...models.onnx_file.model_messages import (
    EXTERNAL,
    GraphProto,
    Message,
    external_tensor,
    model,
    node,
    read_model,
    tensor,
    value_info,
)
from .ort import ORT_ERRORS, error_reason, load_session, session_options
from .prepacked import write_prepacked

PRODUCT: Final = "MatMulIntegerToFloat"
_OPSET: Final = 21
_WEIGHTS: Final = "weights"
_ALIGNMENT: Final = 4096
_PACKED: Final = "prepacked_"
"""Beginning of the keys under which a tensor lists its packed forms: `kernel|offset;length;...` each."""


@cache
def products_overflow() -> bool:
    """Whether this processor's products of bytes with signed bytes overflow for large factors.

    Kernels for AVX2 and AVX-512 without VNNI add two products of 16 bits in 16 bits, which then saturate.

    Raises:
        BundleError: ONNX Runtime cannot compute such a product.
    """
    size = 64
    inputs = np.full((1, 1, size), 255, np.uint8)
    graph = _product(np.full((size, size), 127, np.int8), 0)
    try:
        session = load_session(model(graph, opset=_OPSET).SerializeToString(), session_options(1))
        sums: npt.NDArray[np.float32] = session.run(None, {"inputs": inputs})[0]
    except ORT_ERRORS as error:
        raise BundleError(f"integer products cannot be computed here: {error_reason(error)}") from error
    return bool((sums != size * 255 * 127).any())


class PackedWeightsWriter:
    """Appends matrices to a data file, as they are and as packed for this machine.

    One matrix is packed at a time, by loading a model of one product, so that memory holds one at a time.

    Args:
        path: the data file, which is created.
        scratch: an existing folder for files that are removed again.
    """

    def __init__(self, path: Path, scratch: Path) -> None:
        self._file: Final = path.open("xb")
        self._path: Final = path
        self._scratch: Final = scratch

    def __enter__(self) -> PackedWeightsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add_packed(self, name: str, integers: npt.NDArray[np.int8], zero: int) -> Message:
        """Append the matrix of a product of bytes.

        Args:
            name: name of the tensor.
            integers: int8 `[inputs, outputs]`.
            zero: the byte that stands for an activation of zero.

        Returns:
            The tensor, which refers to its bytes in the file; a tiny one holds them itself.

        Raises:
            BundleError: ONNX Runtime cannot pack it.
            OSError: the file cannot be written.
        """
        source, packed = self._scratch / "product.onnx", self._scratch / "packed.onnx"
        data = packed.with_name(f"{packed.name}.data")
        try:
            source.write_bytes(model(_product(integers, zero), opset=_OPSET).SerializeToString())
            write_prepacked(source, packed)
            found = next(each for each in read_model(packed).graph.initializer if each.name == _WEIGHTS)
            if found.data_location != EXTERNAL:
                return tensor(name, integers)
            start = self._append(data.read_bytes())
        finally:
            for each in (source, packed, data):
                each.unlink(missing_ok=True)
        found.name = name
        for entry in found.external_data:
            if entry.key == "location":
                entry.value = self._path.name
            elif entry.key == "offset":
                entry.value = str(start + int(entry.value))
            elif entry.key.startswith(_PACKED):
                entry.value = _shifted(entry.value, start)
        return found

    def add(self, name: str, array: npt.NDArray[Any]) -> Message:
        """Append an array as it is; returns the tensor, which refers to it in the file."""
        data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        start = self._append(data)
        return external_tensor(name, array.dtype, array.shape, location=self._path.name, offset=start, length=len(data))

    def _append(self, data: bytes) -> int:
        start = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
        self._file.seek(start)
        self._file.write(data)
        return start


def quantized_product(inputs: str, weights: str, output: str, constants: Mapping[str, str]) -> Message:
    """A node that multiplies bytes with a matrix: (inputs - zero) @ weights * scales.

    Args:
        inputs: uint8 `[..., inputs]`.
        weights: int8 `[inputs, outputs]`.
        output: float32 `[..., outputs]`.
        constants: names of `one` (float32 scalar), `scales` (float32 `[outputs]`) and `zero` (uint8 scalar).
    """
    names = [inputs, weights, constants["one"], constants["scales"], constants["zero"]]
    return node(PRODUCT, names, [output], name=f"{output}.product", domain="com.microsoft")


def _product(integers: npt.NDArray[np.int8], zero: int) -> Message:
    """A graph of one product."""
    size, outputs = integers.shape
    constants = {"one": "one", "scales": "scales", "zero": "zero"}
    return GraphProto(
        name="product",
        node=[quantized_product("inputs", _WEIGHTS, "outputs", constants)],
        input=[value_info("inputs", np.uint8, (1, "tokens", size))],
        output=[value_info("outputs", np.float32, (1, "tokens", outputs))],
        initializer=[
            tensor(_WEIGHTS, integers),
            tensor("one", np.array(1, np.float32)),
            tensor("scales", np.ones(outputs, np.float32)),
            tensor("zero", np.array(zero, np.uint8)),
        ],
    )


def _shifted(entry: str, start: int) -> str:
    """A list of packed buffers, `kernel|offset;length;checksum`, with another beginning of the file."""
    kernel, separator, buffers = entry.partition("|")
    parts = [buffer.split(";") for buffer in buffers.split("|")]
    return kernel + separator + "|".join(";".join([str(start + int(first)), *rest]) for first, *rest in parts)
