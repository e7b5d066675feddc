"""What an export needs of a model: named tensors in float32 or as codes, and a folder with its small files.

A checkpoint folder (`checkpoint.Checkpoint`) and a GGUF file (`gguf`) are the two kinds; everything after, graph,
quantization, parity and manifest, is the same for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of the matrix `name`."""

    name: str
    start: int
    stop: int


class LowRankFactors(NamedTuple):
    """Two thin matrices, in `quantization.codes.factor_format`, whose product is added to rows of rounded weights."""

    down_codes: UInt8Array
    """Of the matrix [rank, K] that inputs meet first, uint8 [rank, blocks, block]; the same for all rows of a unit."""
    down_scales: Float32Array
    """[rank, blocks]."""
    up_codes: UInt8Array
    """Of the rows of the other one [rows, rank], uint8 [rows, blocks, block]."""
    up_scales: Float32Array
    """[rows, blocks]."""


class QuantizedRows(NamedTuple):
    """Rows of a matrix in few bits (see `quantization.codes`)."""

    packed: UInt8Array
    """Codes, uint8 [rows, blocks, block * bits / 8]."""
    scales: Float32Array
    """[rows, blocks]."""
    offsets: Float32Array | None = None
    """[rows, blocks], where the format has them."""
    zero_points: UInt8Array | None = None
    """The codes that stand for 0, packed along the blocks of a row, uint8 [rows, ceil(blocks * bits / 8)]; None where
    that is the middle code, 2 ** (bits - 1)."""
    factors: LowRankFactors | None = None
    """What repairs these rows, where the format has a rank."""


class ModelSource(Protocol):
    """The tensors of a model by their Hugging Face names. Methods raise CheckpointError for what cannot be read."""

    @property
    def folder(self) -> Path:
        """Where config.json, tokenizer.json and the other `COMPANIONS` lie."""
        ...

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor is there, of that shape and of a type that can be read."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions."""
        ...

    def read(self, name: str) -> Float32Array:
        """A whole tensor, finite."""
        ...

    def read_rows(self, rows: RowRange) -> Float32Array:
        """Some rows of a matrix, float32 [stop - start, columns], finite."""
        ...

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        """Ranges that cover a matrix from top to bottom, each of about a million weights."""
        ...

    def chunks(self, name: str) -> Iterator[Float32Array]:
        """A matrix from top to bottom, about a million weights at a time."""
        ...

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Some rows of a matrix in few bits.

        Those of the file itself where it has them in that form, else such as the form's method chooses.
        """
        ...

    def stored_format(self, name: str) -> WeightFormat:
        """The format of the operators that comes nearest to how a matrix is stored."""
        ...


class ModelSourceWrapper:
    """A `ModelSource` that hands everything to the one it is made of."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    @property
    def folder(self) -> Path:
        """See `ModelSource.folder`."""
        return self._source.folder

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """See `ModelSource.require`."""
        self._source.require(name, shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `ModelSource.shape`."""
        return self._source.shape(name)

    def read(self, name: str) -> Float32Array:
        """See `ModelSource.read`."""
        return self._source.read(name)

    def read_rows(self, rows: RowRange) -> Float32Array:
        """See `ModelSource.read_rows`."""
        return self._source.read_rows(rows)

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        """See `ModelSource.row_ranges`."""
        return self._source.row_ranges(name)

    def chunks(self, name: str) -> Iterator[Float32Array]:
        """See `ModelSource.chunks`."""
        return self._source.chunks(name)

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """See `ModelSource.quantized`."""
        return self._source.quantized(rows, weight_format)

    def stored_format(self, name: str) -> WeightFormat:
        """See `ModelSource.stored_format`."""
        return self._source.stored_format(name)
