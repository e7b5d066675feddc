"""The source of a model: its tensors, float32 or quantized, and its folder.

The two kinds are a checkpoint folder (`safetensors_files.Checkpoint`) and a GGUF file (`gguf.gguf_model.GgufModel`).
Graph, quantization, parity check and manifest are the same for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ...models.manifest import WeightFormat

Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

_WORKERS: Final = 2
_CHUNK_WEIGHTS: Final = 1 << 20
_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


class RowRange(NamedTuple):
    """Rows `start` to `stop` of the matrix `name`."""

    name: str
    start: int
    stop: int


class QuantizedRows(NamedTuple):
    """Quantized rows of a matrix (see `quantization.codes`)."""

    packed: UInt8Array
    """Packed codes, uint8 [rows, blocks, block * bits / 8]."""
    scales: Float32Array
    """[rows, blocks]."""
    offsets: Float32Array | None = None
    """[rows, blocks]; None where the format has no offsets."""
    zero_points: UInt8Array | None = None
    """Zero points packed along the blocks of a row, uint8 [rows, ceil(blocks * bits / 8)]; None where all of them are
    the middle code, 2 ** (bits - 1)."""


def joined_rows(parts: Sequence[QuantizedRows]) -> QuantizedRows:
    """Several parts of a matrix as one, from top to bottom."""
    joined: list[Any] = [None if each[0] is None else np.concatenate(each) for each in zip(*parts, strict=True)]
    return QuantizedRows(*joined)


class ModelSource:
    """The tensors of a model by their Hugging Face names; methods raise CheckpointError for unreadable tensors.

    A source that wraps another one overrides what it changes; one that reads files overrides all that refers to it.
    """

    folder: Path
    """The folder of config.json, tokenizer.json and the other tokenizer and config files."""

    def __init__(self, source: ModelSource) -> None:
        """Wrap another source."""
        self.folder = source.folder
        self._source = source

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor exists with that shape and a supported type."""
        self._source.require(name, shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._source.shape(name)

    def read(self, name: str) -> Float32Array:
        """Read a whole tensor, float32; all values are finite."""
        return self._source.read(name)

    def read_rows(self, rows: RowRange) -> Float32Array:
        """Read rows of a matrix, float32 [stop - start, columns]; all values are finite."""
        return self._source.read_rows(rows)

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        """Yield ranges that cover a matrix from top to bottom, each of about a million weights."""
        return self._source.row_ranges(name)

    def chunks(self, name: str) -> Iterator[Float32Array]:
        """Yield a matrix from top to bottom, about a million weights at a time."""
        return in_order(self.read_rows, self.row_ranges(name))

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Return rows in a format: the stored codes if the source has it, else those of the format's method."""
        return self._source.quantized(rows, weight_format)

    def stored_format(self, name: str) -> WeightFormat:  # noqa: ARG002 -- the same for all tensors
        """The weight format of the operators that is nearest to how a matrix is stored: float32, if not codes."""
        return WeightFormat(32)


def ranges_of_rows(name: str, rows: int, columns: int) -> Iterator[RowRange]:
    """Yield ranges that cover a matrix from top to bottom, each of about a million weights."""
    step = max(1, _CHUNK_WEIGHTS // columns)
    for start in range(0, rows, step):
        yield RowRange(name, start, min(start + step, rows))


def in_order(work: Callable[[_Part], _Result], parts: Iterable[_Part]) -> Iterator[_Result]:
    """Yield the results of `work` in the order of `parts`; two threads work a few parts ahead.

    File reads and NumPy release the interpreter lock, so this uses two cores. Only a few results are in memory at once.
    """
    with ThreadPoolExecutor(_WORKERS) as pool:
        ahead: deque[Future[_Result]] = deque()
        for part in parts:
            ahead.append(pool.submit(work, part))
            if len(ahead) > _WORKERS:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
