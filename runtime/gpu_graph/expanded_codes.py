"""Codes of quantized weights for devices that lack an operator for them, computed by plain operators.

What is computed is what the replaced operator computes: (code - zero point) * scale, in float32. Rows of an embedding
are computed when they are looked up, so nothing is stored besides the codes. Whole matrices are constants, which ONNX
Runtime computes once, when it loads the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import numpy as np

from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor
from ...models.onnx_file.model_messages import ELEMENT_TYPES, Message, attribute_values, set_attribute
from ..graph.attention_edits import NodeList

_UINT8: Final = ELEMENT_TYPES[np.dtype(np.uint8)]
_FLOAT: Final = ELEMENT_TYPES[np.dtype(np.float32)]


def compute_in_float(model: GraphEditor | Message) -> None:
    """Let quantized products take activations as they are instead of rounding them to 8 bits.

    Where WebGPU has a kernel for level 4 depends on the shape of a matrix; level 0 is the same everywhere.
    """
    for each in model.graph.node:
        if "accuracy_level" in attribute_values(each):
            set_attribute(each, "accuracy_level", 0)


def expand_embedding(editor: GraphEditor, gathers_blocks: bool) -> None:
    """Replace lookups in quantized tables that the device cannot do: all, or with `gathers_blocks` a part of them.

    These are the ones with zero points. Zero points that all stand for the middle code, as an absent input does, are
    dropped.

    Raises:
        CannotRewriteError: a table is stored in another way than blocks of bytes along its last axis.
    """

    def replaced(each: Message) -> Iterable[Message]:
        if each.op_type != "GatherBlockQuantized":
            return [each]
        attributes = attribute_values(each)
        bits, block = attributes.get("bits", 4), attributes["block_size"]
        if len(each.input) > 3 and _all_in_the_middle(editor, each.input[3], bits):
            del each.input[3]
        if gathers_blocks and len(each.input) < 4:
            return [each]
        data = editor.initializers.get(each.input[0])
        axis = attributes.get("quantize_axis", 1)
        if data is None or data.data_type != _UINT8 or axis % len(data.dims) != len(data.dims) - 1:
            raise CannotRewriteError("the embedding's codes are not bytes along the last axis")
        if attributes.get("gather_axis", 0) != 0:
            raise CannotRewriteError("the embedding is looked up along another axis")
        code = _Expansion(editor, each.output[0])
        gathered = [code.add("Gather", [name, each.input[1]], axis=0) for name in (*each.input[:1], *each.input[2:])]
        rank = len(data.dims) + 1  # ids are [1, M]
        values = code.unpacked(gathered[0], bits, rank)
        points = code.unpacked(gathered[2], bits, rank) if len(gathered) > 2 else ""
        scales_shape = editor.constant_shape(each.input[2])
        if scales_shape is None:
            raise CannotRewriteError("the embedding's scales are computed")
        blocks = scales_shape[-1]
        if points:
            points = code.first(points, blocks, rank)
        if blocks == 1:
            code.dequantized(values, points, gathered[1], bits, each.output[0])
        else:
            kept = [0] * (rank - 1)
            values = code.add("Reshape", [values, editor.integers(f"blocks.{block}.{rank}", *kept, -1, block)])
            axis_after = editor.integers("last.axis", -1)
            scales = code.add("Unsqueeze", [gathered[1], axis_after])
            points = code.add("Unsqueeze", [points, axis_after]) if points else ""
            whole = code.dequantized(values, points, scales, bits)
            joined = editor.integers(f"joined.{rank}", *kept, -1)
            code.add("Reshape", [whole, joined], output=each.output[0])
        return code.nodes

    editor.rewrite(replaced)


def expand_matrices(editor: GraphEditor, kernels: Collection[int]) -> None:
    """Replace products with matrices of a number of bits that is not among `kernels` by products with float matrices.

    Raises:
        CannotRewriteError: zero points are stored in another way than as bytes or floats.
    """

    def replaced(each: Message) -> Iterable[Message]:
        attributes = attribute_values(each)
        if each.op_type != "MatMulNBits" or attributes.get("bits", 4) in kernels:
            return [each]
        bits, block, rows, columns = (attributes[name] for name in ("bits", "block_size", "N", "K"))
        inputs = [*each.input, "", "", ""]
        if inputs[4]:
            raise CannotRewriteError("a matrix has reordered columns")
        code = _Expansion(editor, each.output[0])
        blocks = -(-columns // block)
        shape = editor.integers(f"scales.{rows}.{blocks}", rows, blocks, 1)
        values = code.unpacked(inputs[1], bits, 3)
        scales = code.add("Reshape", [inputs[2], shape])
        points = ""
        if inputs[3]:
            stored = editor.initializers.get(inputs[3])
            if stored is None or stored.data_type not in (_UINT8, _FLOAT):
                raise CannotRewriteError("zero points are neither bytes nor floats")
            points = inputs[3]
            if stored.data_type == _UINT8:
                packed = editor.integers(f"points.{rows}", rows, -1)
                points = code.first(code.unpacked(code.add("Reshape", [points, packed]), bits, 2), blocks, 2)
            points = code.add("Reshape", [points, shape])
        whole = code.dequantized(values, points, scales, bits)
        matrix = code.add("Reshape", [whole, editor.integers(f"rows.{rows}", rows, -1)])
        matrix = code.add("Transpose", [code.first(matrix, columns, 2)], perm=[1, 0])
        bias = inputs[5]
        product = code.add("MatMul", [inputs[0], matrix], output="" if bias else each.output[0])
        if bias:
            code.add("Add", [product, bias], output=each.output[0])
        return code.nodes

    editor.rewrite(replaced)


def _all_in_the_middle(editor: GraphEditor, name: str, bits: int) -> bool:
    """Whether all zero points are the middle code; the unused bits of a byte that holds fewer codes than fit are 0."""
    points = editor.array(name)
    if points is None or points.dtype != np.uint8:
        return False
    middle = 1 << (bits - 1)
    full = sum(middle << shift for shift in range(0, 8, bits))
    return bool(np.isin(points, (middle, full)).all())


class _Expansion(NodeList):
    """Nodes that compute codes in place of an operator."""

    def __init__(self, editor: GraphEditor, name: str) -> None:
        super().__init__(name)
        self._editor = editor

    def unpacked(self, packed: str, bits: int, rank: int) -> str:
        """Append the codes of bytes along the last of `rank` axes, the lowest bits first; as floats."""
        values = self.add("Cast", [packed], to=_FLOAT)
        width = 8
        while width > bits:
            # A float32 holds every byte exactly, and GPUs lack integer kernels more often than float ones.
            width //= 2
            factor = float(1 << width)
            down = self._editor.constant(f"shift.{width}.down", np.array(1 / factor, np.float32))
            up = self._editor.constant(f"shift.{width}.up", np.array(factor, np.float32))
            high = self.add("Floor", [self.add("Mul", [values, down])])
            low = self.add("Sub", [values, self.add("Mul", [high, up])])
            axis = self._editor.integers("last.axis", -1)
            parts = [self.add("Unsqueeze", [part, axis]) for part in (low, high)]
            pairs = self.add("Concat", parts, axis=-1)
            shape = self._editor.integers(f"joined.{rank}", *[0] * (rank - 1), -1)
            values = self.add("Reshape", [pairs, shape])
        return values

    def first(self, values: str, count: int, rank: int) -> str:
        """Append the first `count` elements along the last of `rank` axes, where padding may follow them."""
        editor = self._editor
        bounds = [editor.integers("slice.start", 0), editor.integers(f"slice.{count}", count)]
        return self.add("Slice", [values, *bounds, editor.integers(f"slice.axis.{rank}", rank - 1)])

    def dequantized(self, values: str, points: str, scales: str, bits: int, output: str = "") -> str:
        """Append (code - zero point) * scale; without zero points the middle code stands for 0."""
        middle = np.array(1 << (bits - 1), np.float32)
        points = points or self._editor.constant(f"middle.{bits}", middle)
        return self.add("Mul", [self.add("Sub", [values, points]), scales], output=output)
