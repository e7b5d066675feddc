"""Converts linears of ONNX Runtime's dynamic quantization to MatMulNBits without rounding again.

`quantize_dynamic` (and so Optimum's and transformers.js's int8 files) writes a linear as

    DynamicQuantizeLinear(x) -> codes, scale, zero point;  MatMulInteger(codes, W);  Cast;  Mul(scale * W's scale)

with one scale, and possibly one zero point, for W or for each of its columns. MatMulNBits holds the same weights with
the scale repeated for every block. It rounds activations block by block and not over all tokens together, so that the
logits of a token do not depend on the other tokens of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto

from ...graph.nodes import INT8_ACTIVATIONS
from ..edit.editable import MICROSOFT, EditableGraph, Node
from ..edit.tensors import Array, Tensor

_SIGN_SHIFT: Final = 128
"""Added to signed codes to make them unsigned; also the default zero point of MatMulNBits."""
_BLOCK_SIZES: Final = (128, 32)
_CHUNK: Final = 1 << 24
"""Number of codes that are transposed at once."""


@dataclass(frozen=True)
class _Linear:
    """A dynamically quantized linear."""

    value: str
    """The input."""
    result: str
    """The output."""
    codes: Tensor
    """int8 or uint8 [K, N]"""
    scales: Array
    """float32 [N]"""
    zeros: Array
    """Zero points of the unsigned codes, uint8 [N]"""

    @property
    def shift(self) -> int:
        """Number that is added to the codes to make them unsigned."""
        return _SIGN_SHIFT if self.codes.element_type == TensorProto.INT8 else 0


def convert_integer_linears(graph: EditableGraph) -> None:
    """Replace every dynamically quantized linear that is recognized."""
    for node in graph.nodes_of("MatMulInteger"):
        linear = _linear(graph, node)
        if linear is not None:
            _replace(graph, node.name or node.output(0), linear)
    graph.sweep()


def _linear(graph: EditableGraph, node: Node) -> _Linear | None:
    quantize = graph.producer_of(node.input(0), "DynamicQuantizeLinear")
    codes = graph.tensors.get(node.input(1))
    cast = _reader(graph, node.output(0), "Cast")
    product = None if cast is None else _reader(graph, cast.output(0), "Mul")
    if quantize is None or codes is None or len(codes.shape) != 2 or cast is None or product is None:
        return None
    if codes.element_type not in (TensorProto.INT8, TensorProto.UINT8) or node.input(2) != quantize.output(2):
        return None
    others = [name for name in product.inputs if name != cast.output(0)]
    combined = graph.producer_of(others[0], "Mul") if len(others) == 1 else None
    if combined is None or quantize.output(1) not in combined.inputs:
        return None
    stored = [graph.array(name) for name in combined.inputs if name != quantize.output(1)]
    scales = _by_column(stored[0] if len(stored) == 1 else None, codes.shape[1])
    zeros = _by_column(graph.array(node.input(3)) if node.input(3) else np.zeros(1), codes.shape[1])
    if scales is None or zeros is None:
        return None
    shift = _SIGN_SHIFT if codes.element_type == TensorProto.INT8 else 0
    unsigned = (zeros.astype(np.int64) + shift).astype(np.uint8)
    return _Linear(quantize.input(0), product.output(0), codes, scales.astype(np.float32), unsigned)


def _by_column(value: Array | None, columns: int) -> Array | None:
    """Broadcast one number, or one per column, to [columns]; None if the value is neither."""
    if value is None or value.size not in (1, columns):
        return None
    return np.broadcast_to(value.reshape(-1), columns)


def _replace(graph: EditableGraph, stem: str, linear: _Linear) -> None:
    columns, rows = linear.codes.shape
    block = next((each for each in _BLOCK_SIZES if columns % each == 0), _BLOCK_SIZES[-1])
    blocks = -(-columns // block)
    packed = Tensor.computed(np.uint8, (rows, blocks, block), lambda: _packed(linear, blocks * block))
    inputs = [
        linear.value,
        graph.add_tensor(f"{stem}.codes", packed),
        graph.add_tensor(f"{stem}.scales", np.repeat(linear.scales[:, None], blocks, axis=1)),
    ]
    if (linear.zeros != _SIGN_SHIFT).any():
        inputs.append(graph.add_tensor(f"{stem}.zeros", np.repeat(linear.zeros[:, None], blocks, axis=1)))
    node = graph.add(
        "MatMulNBits",
        inputs,
        name=stem,
        domain=MICROSOFT,
        N=rows,
        K=columns,
        bits=8,
        block_size=block,
        accuracy_level=INT8_ACTIVATIONS,
    )
    graph.replace_value(linear.result, node.output(0))


def _packed(linear: _Linear, width: int) -> Iterator[Array]:
    """Yield unsigned codes, uint8 [rows, width]; an incomplete last block is padded with the zero point."""
    columns, rows = linear.codes.shape
    stored = linear.codes.array()
    step = max(1, _CHUNK // width)
    for start in range(0, rows, step):
        part = np.ascontiguousarray(stored[:, start : start + step].T).view(np.uint8)
        unsigned = part + np.uint8(linear.shift)  # modulo 256: -128 becomes 0
        padding = np.repeat(linear.zeros[start : start + step, None], width - columns, axis=1)
        yield np.concatenate([unsigned, padding], axis=1)


def _reader(graph: EditableGraph, name: str, op: str) -> Node | None:
    """The only reader of a value, if it is that operator."""
    readers = graph.consumers(name)
    return readers[0] if len(readers) == 1 and readers[0].op == op else None
