"""Reading a checkpoint's weights a few rows at a time.

The safetensors format is a little-endian uint64 header length, a JSON header, and the tensors' bytes. The library maps
files into memory, and pages once touched stay resident; an export should cost the memory of a piece of one tensor, so
this reads pieces with plain file reads. (It also reads bfloat16 without a NumPy extension type.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..edge.errors import CheckpointError
from .config import read_json
from .prefetch import in_order

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_HEADER_LIMIT: Final = 100 << 20
_PIECE_WEIGHTS: Final = 1 << 20
_AGAIN: Final = "download the checkpoint again"

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RowRange:
    """Rows `start` to `stop` of the matrix `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Tensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Checkpoint:
    """The tensors of a checkpoint folder by name, as float32 whatever they are stored as."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of every weight file; no weights yet.

        Raises:
            CheckpointError: there are no safetensors weights, or a file is missing, truncated or malformed.
        """
        self.folder = folder
        self._tensors: dict[str, _Tensor] = {}
        for file in _weight_files(folder):
            self._tensors.update(_read_header(file))
        # Base models are sometimes saved without the wrapper's name in front.
        wrapped = any(name.startswith("model.") for name in self._tensors)
        self._drop = "" if wrapped else "model."

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor is there, of that shape and of a float type.

        Raises:
            CheckpointError: it is not.
        """
        tensor = self._find(name)
        if tensor.shape != shape:
            raise CheckpointError(
                f"{name} has shape {list(tensor.shape)}, config.json asks for {list(shape)}",
                "config.json and weights are not of the same model",
            )
        if tensor.dtype not in _ITEM_BYTES:
            raise CheckpointError(
                f"{name} is of type {tensor.dtype}", "supported are F32, F16 and BF16: export the float checkpoint"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions."""
        return self._find(name).shape

    def read(self, name: str) -> Float32Array:
        """A whole tensor as float32.

        Raises:
            CheckpointError: it holds a NaN or an infinity, or cannot be read.
        """
        tensor = self._find(name)
        return self._read_items(name, tensor, 0, math.prod(tensor.shape)).reshape(tensor.shape)

    def read_rows(self, rows: RowRange) -> Float32Array:
        """Some rows of a matrix as float32 [stop - start, columns].

        Raises:
            CheckpointError: they hold a NaN or an infinity, or cannot be read.
        """
        tensor = self._find(rows.name)
        columns = tensor.shape[1]
        count = (rows.stop - rows.start) * columns
        return self._read_items(rows.name, tensor, rows.start * columns, count).reshape(-1, columns)

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        """Ranges that cover a matrix from top to bottom, each of about a million weights."""
        rows, columns = self._find(name).shape
        step = max(1, _PIECE_WEIGHTS // columns)
        for start in range(0, rows, step):
            yield RowRange(name, start, min(start + step, rows))

    def pieces(self, name: str) -> Iterator[Float32Array]:
        """A matrix from top to bottom, about a million weights at a time.

        Raises:
            CheckpointError: it holds a NaN or an infinity, or cannot be read.
        """
        return in_order(self.read_rows, self.row_ranges(name))

    def _find(self, name: str) -> _Tensor:
        tensor = self._tensors.get(name.removeprefix(self._drop))
        if tensor is None:
            raise CheckpointError(f"{self.folder} holds no tensor {name}", "the checkpoint is incomplete: " + _AGAIN)
        return tensor

    def _read_items(self, name: str, tensor: _Tensor, start: int, count: int) -> Float32Array:
        size = _ITEM_BYTES[tensor.dtype]
        try:
            with tensor.file.open("rb", buffering=0) as file:
                file.seek(tensor.offset + start * size)
                raw = np.fromfile(file, dtype=np.uint8, count=count * size)
        except OSError as error:
            raise CheckpointError(f"{tensor.file} cannot be read: {error}", _AGAIN) from error
        if raw.size != count * size:
            raise CheckpointError(f"{tensor.file} ended inside {name}", _AGAIN)
        if tensor.dtype == "F32":
            values = raw.view(np.float32)
        elif tensor.dtype == "F16":
            values = raw.view(np.float16).astype(np.float32)
        else:  # bfloat16 is the upper half of a float32
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{name} holds NaN or infinite weights", _AGAIN)
        return values


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).is_file():
        return _shards(folder / INDEX_FILE)
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise CheckpointError(
            f"{folder} holds pickled weights only, which can run code when opened",
            "save the checkpoint as safetensors (save_pretrained with safe_serialization=True)",
        )
    raise CheckpointError(f"{folder} holds no {SINGLE_FILE}", "give the folder of a Hugging Face checkpoint")


def _shards(index: Path) -> list[Path]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise CheckpointError(f"{index} holds no weight_map", _AGAIN)
    files = [index.parent / name for name in sorted(set(places.values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"shard {file.name} is missing from {index.parent}", _AGAIN)
    return files


def _read_header(path: Path) -> dict[str, _Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _HEADER_LIMIT):
            raise CheckpointError(f"{path} is truncated or not a safetensors file", _AGAIN)
        text = file.read(length)
    tensors: dict[str, _Tensor] = {}
    try:
        header: dict[str, Any] = json.loads(text)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, stop = entry["data_offsets"]
            tensor = _Tensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start)
            item = _ITEM_BYTES.get(tensor.dtype)
            if start < 0 or (item is not None and stop - start != item * math.prod(tensor.shape)):
                raise ValueError(f"{name} has bytes {start} to {stop} for shape {list(tensor.shape)}")
            if 8 + length + stop > size:
                raise CheckpointError(f"{path} is truncated: {name} lies beyond its {size} bytes", _AGAIN)
            tensors[name] = tensor
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} has a damaged header: {error}", _AGAIN) from error
    return tensors
