"""Whether this machine multiplies by 4-bit weights with zero points as it should.

ONNX Runtime's kernel for one row of 8-bit activations against such weights was reported to be wrong on x86 processors
with AVX2 and without AVX-512 (onnxruntime issue 29853). Releases 1.23 to 1.31 do not show that on an emulated processor
of the kind, since zero points that are constants are packed with the scales beforehand. But nothing in a text that
comes out of a wrong kernel says why it is bad, so whoever runs or writes a graph with such weights tries a product of
one row and of two first. Other widths of codes have kernels of their own, and weights without zero points are not
concerned.

The model is put together here, field by field as in onnx.proto, for a runtime that has no onnx package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from .onnx_file.wire import number_field, packed_field

Float32Array = npt.NDArray[np.float32]

INPUT: Final = "rows"
"""Of the model: the rows that are multiplied."""
OUTPUTS: Final = 96
INPUTS: Final = 256
BLOCK: Final = 32
_TOLERANCE: Final = 0.05
"""Largest error, as a share of the largest product; rounding the rows to 8 bits makes one of a hundredth."""
_FLOAT, _UINT8 = 1, 2  # types of a tensor
_INTEGER: Final = 2  # type of an attribute

Multiply = Callable[[Float32Array], Float32Array]
"""Rows [m, INPUTS] in, products [m, OUTPUTS] out."""


def zero_points_work(multiply: Multiply) -> bool:
    """Whether products with the model's weights come out right, of one row and of two.

    Args:
        multiply: runs `zero_point_model`.
    """
    weights = _weights()
    rows = np.random.default_rng(1).standard_normal((2, INPUTS)).astype(np.float32)
    return all(_is_right(multiply(rows[:count]), rows[:count] @ weights.T) for count in (1, 2))


def _is_right(products: Float32Array, expected: Float32Array) -> bool:
    # Comparisons with NaN are false.
    return bool(np.abs(products - expected).max() <= _TOLERANCE * np.abs(expected).max())


def _drawn() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], Float32Array]:
    """Packed codes [OUTPUTS, blocks, BLOCK / 2], packed zero points [OUTPUTS, blocks / 2], and scales."""
    random = np.random.default_rng(0)
    blocks = INPUTS // BLOCK
    return (
        random.integers(0, 256, (OUTPUTS, blocks, BLOCK // 2), np.uint8),
        random.integers(0, 256, (OUTPUTS, blocks // 2), np.uint8),
        random.uniform(0.5, 1.5, (OUTPUTS, blocks)).astype(np.float32),
    )


def _weights() -> Float32Array:
    """What the model's codes stand for, [OUTPUTS, INPUTS]."""
    codes, points, scales = _drawn()
    weights: Float32Array = (_nibbles(codes) - _nibbles(points)[:, :, None]) * scales[:, :, None]
    return weights.reshape(OUTPUTS, INPUTS)


def _nibbles(packed: npt.NDArray[np.uint8]) -> Float32Array:
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1).astype(np.float32)


def zero_point_model() -> bytes:
    """An ONNX model of one MatMulNBits with activations in 8 bits, as bytes."""
    codes, points, scales = _drawn()
    attributes = {"K": INPUTS, "N": OUTPUTS, "bits": 4, "block_size": BLOCK, "accuracy_level": 4}
    node = b"".join(
        (
            *(packed_field(1, name) for name in (INPUT, "codes", "scales", "zero_points")),
            packed_field(2, "products"),
            packed_field(4, "MatMulNBits"),
            *(
                packed_field(5, packed_field(1, name) + number_field(3, value) + number_field(20, _INTEGER))
                for name, value in attributes.items()
            ),
            packed_field(7, "com.microsoft"),
        )
    )
    graph = b"".join(
        (
            packed_field(1, node),
            packed_field(2, "zero_points"),
            _constant("codes", _UINT8, codes),
            _constant("scales", _FLOAT, scales),
            _constant("zero_points", _UINT8, points),
            packed_field(11, _port(INPUT, INPUTS)),
            packed_field(12, _port("products", OUTPUTS)),
        )
    )
    opset = packed_field(8, packed_field(1, "com.microsoft") + number_field(2, 1))
    return number_field(1, 10) + packed_field(7, graph) + packed_field(8, number_field(2, 21)) + opset


def _constant(name: str, kind: int, value: npt.NDArray[np.generic]) -> bytes:
    shape = b"".join(number_field(1, extent) for extent in value.shape)
    return packed_field(5, shape + number_field(2, kind) + packed_field(8, name) + packed_field(9, value.tobytes()))


def _port(name: str, columns: int) -> bytes:
    """A float tensor of any number of rows."""
    shape = packed_field(1, packed_field(2, "m")) + packed_field(1, number_field(1, columns))
    tensor = number_field(1, _FLOAT) + packed_field(2, shape)
    return packed_field(1, name) + packed_field(2, packed_field(1, tensor))
