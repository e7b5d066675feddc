"""Matrices of MatMulNBits: their codes decoded to floats, a few rows at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...models.onnx_file.graph_editor import CannotRewriteError, GraphEditor, attributes_of
from ...models.onnx_file.model_messages import Message

Floats = npt.NDArray[np.float32]

OPERATOR: Final = "MatMulNBits"
_CODES, _SCALES, _ZEROS, _ORDER, _BIAS = 1, 2, 3, 4, 5
"""Indices of the operator's inputs."""
_BITS: Final = (2, 4, 8)


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
        attributes = attributes_of(node)
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
