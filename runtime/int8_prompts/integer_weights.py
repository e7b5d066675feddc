"""Weights as 8-bit integers: decoded from a model's own codes, and packed for integer products on this machine.

`BlockMatrix` decodes the codes of MatMulNBits a few rows at a time. `write_packed` lets ONNX Runtime pack the
integers, which have one scale for each output, for this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from ...errors import BundleError
from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor
from ...models.onnx_file.model_messages import (
    EXTERNAL,
    GraphProto,
    Message,
    attribute_values,
    model,
    node,
    read_model,
    tensor,
    value_info,
)
from ..graph.ort import ORT_ERRORS, error_reason, load_session, session_options
from ..graph.packed_files import move_data, pack

_BLOCK_WEIGHTS: Final = 1 << 20
"""Weights that are decoded at a time: 4 MB as floats."""
Floats = npt.NDArray[np.float32]
OPERATOR: Final = "MatMulNBits"
_CODES, _SCALES, _ZEROS, _ORDER, _BIAS = 1, 2, 3, 4, 5
"""Indices of the operator's inputs."""
_BITS: Final = (2, 4, 8)
_OPSET: Final = 21
_WEIGHTS: Final = "weights"


@dataclass(frozen=True)
class IntegerRange:
    """Largest magnitudes of the integers in a product."""

    activation: int
    """Largest quantized activation; activations are stored as bytes, with this number added to them."""
    weight: int


FULL_RANGE: Final = IntegerRange(127, 127)
NARROW_RANGE: Final = IntegerRange(90, 91)
"""For processors that add two products in 16 bits, which have to stay below 2 ** 15: stored activations go up to 180,
and 2 * 180 * 91 = 32,760. The two ranges are of one size because the errors of both add up."""


def to_integers(
    matrix: BlockMatrix,
    limit: int,
    *,
    rows: slice = slice(None),
    column_factors: Floats | None = None,
    row_factors: Floats | None = None,
) -> tuple[npt.NDArray[np.int8], Floats]:
    """Round a matrix to integers from `-limit` to `limit`, the largest weight of each output becoming the largest.

    Args:
        matrix: the weights.
        limit: largest integer, at most 127.
        rows: the rows to take.
        column_factors: what the weights of each input are multiplied with, `[columns]`: SmoothQuant's factors (Xiao et
            al., 2023), by which the inputs are divided.
        row_factors: what the weights of each output are multiplied with, `[rows taken]`.

    Returns:
        int8 `[columns, rows]` and one scale of each row; (integers * scales).T is what `BlockMatrix` decodes to.
    """
    first, last, _ = rows.indices(matrix.rows)
    integers = np.empty((matrix.columns, last - first), np.int8)
    scales = np.empty(last - first, np.float32)
    step = max(1, _BLOCK_WEIGHTS // matrix.columns)
    for start in range(first, last, step):
        weights = matrix.decoded(start, min(start + step, last))
        if column_factors is not None:
            weights *= column_factors
        part = slice(start - first, start - first + len(weights))
        largest = np.abs(weights).max(axis=1)
        scale = np.where(largest > 0, largest / np.float32(limit), np.float32(1))
        np.rint(weights / scale[:, None], out=weights)
        integers[:, part] = weights.T
        scales[part] = scale
    return integers, scales if row_factors is None else scales * row_factors


@dataclass(frozen=True)
class BlockMatrix:
    """The weights of one product, `[rows, columns]`: the operator multiplies inputs with their transpose.

    A weight is (code - zero point) * scale, with one scale and one zero point for every block of a row.
    """

    rows: int
    """Number of outputs (the operator's N)."""
    columns: int
    """Number of inputs (K)."""
    bits: int
    codes: npt.NDArray[np.uint8]
    """`[rows, blocks, bytes]`, the lowest bits of a byte first."""
    scales: Floats
    """`[rows, blocks]`."""
    zeros: npt.NDArray[Any] | None
    """uint8 `[rows, bytes]`, packed as the codes, or float32 `[rows, blocks]`; None where the middle code is zero."""
    bias: Floats | None
    """`[rows]`."""

    @staticmethod
    def of(editor: GraphEditor, node: Message) -> BlockMatrix:
        """The matrix of a `MatMulNBits`; its tensors stay memory-mapped where they are external.

        Raises:
            CannotRewriteError: it is stored in a way that is not known here.
        """
        attributes = attribute_values(node)
        bits, rows, columns = attributes.get("bits", 4), attributes["N"], attributes["K"]
        blocks = -(-columns // attributes["block_size"])
        names = [*node.input, "", "", "", ""]
        codes, scales = editor.array(names[_CODES]), editor.array(names[_SCALES])
        zeros = editor.array(names[_ZEROS]) if names[_ZEROS] else None
        bias = editor.array(names[_BIAS]) if names[_BIAS] else None
        if codes is None or scales is None or names[_ORDER] or bits not in _BITS:
            raise CannotRewriteError(f"{node.name} has no constant codes of {bits} bits in their own order")
        missing = (names[_ZEROS] and zeros is None) or (names[_BIAS] and bias is None)
        if missing or scales.dtype != np.float32 or (bias is not None and bias.dtype != np.float32):
            raise CannotRewriteError(f"{node.name} does not compute in float32")
        if zeros is not None and zeros.dtype not in (np.uint8, np.float32):
            raise CannotRewriteError(f"{node.name} has zero points of type {zeros.dtype}")
        return BlockMatrix(
            rows,
            columns,
            bits,
            codes.reshape(rows, blocks, -1),
            scales.reshape(rows, blocks),
            None if zeros is None else zeros.reshape(rows, -1),
            bias,
        )

    def decoded(self, start: int, stop: int) -> Floats:
        """The weights of some rows, float32 `[stop - start, columns]`."""
        codes = _unpacked(self.codes[start:stop], self.bits).astype(np.float32)
        scales = np.asarray(self.scales[start:stop])
        blocks = scales.shape[1]
        if self.zeros is None:
            codes -= np.float32(1 << (self.bits - 1))
        else:
            zeros = self.zeros[start:stop]
            if zeros.dtype == np.uint8:
                zeros = _unpacked(zeros, self.bits)[:, :blocks]
            codes -= zeros.astype(np.float32)[:, :, None]
        codes *= scales[:, :, None]
        return codes.reshape(stop - start, -1)[:, : self.columns]


def _unpacked(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """The codes of bytes along the last axis."""
    if bits == 8:
        return np.asarray(packed)
    each = 8 // bits
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * each), np.uint8)
    for place in range(each):
        # Whole arrays shifted, and written with a stride, take a third of the time of a table of codes.
        codes[..., place::each] = (packed >> np.uint8(place * bits)) & np.uint8((1 << bits) - 1)
    return codes


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


def write_packed(file: BinaryIO, name: str, integers: npt.NDArray[np.int8], zero: int) -> Message:
    """Append the matrix of a product of bytes to a data file, as it is and as packed for this machine.

    It is packed by loading a model of one product, so that memory holds one matrix at a time.

    Args:
        file: the data file; files beside it come and go.
        name: name of the tensor.
        integers: int8 `[inputs, outputs]`.
        zero: the byte that stands for an activation of zero.

    Returns:
        The tensor, which refers to its bytes in the file; a tiny one holds them itself.

    Raises:
        BundleError: ONNX Runtime cannot pack it.
        OSError: the file cannot be written.
    """
    source, packed = (Path(file.name).with_name(each) for each in ("product.onnx", "packed.onnx"))
    data = packed.with_name(f"{packed.name}.data")
    try:
        source.write_bytes(model(_product(integers, zero), opset=_OPSET).SerializeToString())
        pack(source, packed)
        found = next(each for each in read_model(packed).graph.initializer if each.name == _WEIGHTS)
        if found.data_location != EXTERNAL:
            return tensor(name, integers)
        found.name = name
        with data.open("rb") as stored:
            move_data(found, stored, file)
    finally:
        for each in (source, packed, data):
            each.unlink(missing_ok=True)
    return found


def quantized_product(inputs: Sequence[str], output: str) -> Message:
    """A node that multiplies bytes with a matrix: (inputs - zero) @ weights * scales.

    Args:
        inputs: names of the bytes (uint8 `[..., inputs]`), the weights (int8 `[inputs, outputs]`), `one` (float32
            scalar), the scales (float32 `[outputs]`) and `zero` (uint8 scalar).
        output: float32 `[..., outputs]`.
    """
    return node("MatMulIntegerToFloat", inputs, [output], name=f"{output}.product", domain="com.microsoft")


def _product(integers: npt.NDArray[np.int8], zero: int) -> Message:
    """A graph of one product."""
    size, outputs = integers.shape
    constants: dict[str, npt.NDArray[Any]] = {
        _WEIGHTS: integers,
        "one": np.array(1, np.float32),
        "scales": np.ones(outputs, np.float32),
        "zero": np.array(zero, np.uint8),
    }
    return GraphProto(
        name="product",
        node=[quantized_product(["inputs", *constants], "outputs")],
        input=[value_info("inputs", np.uint8, (1, "tokens", size))],
        output=[value_info("outputs", np.float32, (1, "tokens", outputs))],
        initializer=[tensor(name, value) for name, value in constants.items()],
    )
