"""Reading a checkpoint's weights a few rows at a time.

The safetensors format is a little-endian uint64 header length, a JSON header, and the tensors' bytes. The library maps
files into memory, and pages once touched stay resident; an export should cost the memory of a piece of one tensor, so
this reads pieces with plain file reads. (It also reads bfloat16 without a NumPy extension type.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any, Final

import numpy as np

from ...errors import CheckpointError
from ...models.json_file import is_whole, parse_json_object, shown
from ...models.manifest import Method, WeightFormat
from ..quantization.methods import QUANTIZERS
from .json_fields import read_json
from .prefetch import in_order
from .source import Float32Array, QuantizedRows, RowRange, UInt8Array
from .stacked_experts import FloatStack, Mxfp4Stack

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""Of the types that a tensor of weights may have."""
_KNOWN_BYTES: Final = {**_ITEM_BYTES, "U8": 1}
_BLOCKS: Final = "_blocks"
"""Ends the name of codes in MXFP4."""
_HEADER_LIMIT: Final = 100 << 20
_MOST_DIMENSIONS: Final = 64
_PIECE_WEIGHTS: Final = 1 << 20
_AGAIN: Final = "download the checkpoint again"


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
        self._prefixes = _prefixes(self._tensors)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor is there, of that shape and of a float type.

        Raises:
            CheckpointError: it is not.
        """
        if self.shape(name) != shape:
            raise CheckpointError(
                f"{name} has shape {list(self.shape(name))}, config.json asks for {list(shape)}",
                "config.json and weights are not of the same model",
            )
        dtype = "BF16" if self._has(f"{name}{_BLOCKS}") else self._find(name).dtype
        if dtype not in _ITEM_BYTES:
            raise CheckpointError(
                f"{name} is of type {dtype}", "supported are F32, F16 and BF16: export the float checkpoint"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's dimensions; a matrix's for experts that are stacked."""
        stack = self._stack(name)
        return self._find(name).shape if stack is None else stack.shape

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
        if (stack := self._stack(rows.name)) is not None:
            return _finite(rows.name, stack.read_rows(rows.start, rows.stop))
        tensor = self._find(rows.name)
        columns = tensor.shape[1]
        count = (rows.stop - rows.start) * columns
        return self._read_items(rows.name, tensor, rows.start * columns, count).reshape(-1, columns)

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        """Ranges that cover a matrix from top to bottom, each of about a million weights."""
        rows, columns = self.shape(name)
        stack = self._stack(name)
        step = stack.rows if isinstance(stack, FloatStack) else max(1, _PIECE_WEIGHTS // columns)
        for start in range(0, rows, step):
            yield RowRange(name, start, min(start + step, rows))

    def chunks(self, name: str) -> Iterator[Float32Array]:
        """A matrix from top to bottom, about a million weights at a time.

        Raises:
            CheckpointError: it holds a NaN or an infinity, or cannot be read.
        """
        return in_order(self.read_rows, self.row_ranges(name))

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Some rows of a matrix in few bits, by the method that the format names.

        Raises:
            CheckpointError: they hold a NaN or an infinity, or cannot be read.
        """
        return QUANTIZERS[weight_format.method or Method.RTN](self.read_rows(rows), weight_format)

    def stored_format(self, name: str) -> WeightFormat:  # noqa: ARG002 -- a checkpoint folder holds floats
        """Float32, in which any of a checkpoint's tensors is exact."""
        return WeightFormat(32)

    def _stack(self, name: str) -> FloatStack | Mxfp4Stack | None:
        """All experts of a layer, if that is what the name stands for."""
        if self._has(f"{name}{_BLOCKS}"):
            return self._mxfp4(name)
        tensor = self._find(name)
        if len(tensor.shape) != 3 or tensor.dtype not in _ITEM_BYTES:
            return None
        many, columns, rows = tensor.shape
        return FloatStack(many, rows, columns, lambda start, count: self._read_items(name, tensor, start, count))

    def _mxfp4(self, name: str) -> Mxfp4Stack:
        blocks, scales = self._find(f"{name}{_BLOCKS}"), self._find(f"{name}_scales")
        fits = len(blocks.shape) == 4 and blocks.shape[3] == 16 and scales.shape == blocks.shape[:3]
        if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            raise CheckpointError(f"{name} is not in the MXFP4 form of gpt-oss", _AGAIN)
        many, rows, each, _ = blocks.shape
        return Mxfp4Stack(
            many,
            rows,
            32 * each,
            lambda start, count: self._read_bytes(name, blocks, start, count),
            lambda start, count: self._read_bytes(name, scales, start, count),
        )

    def _has(self, name: str) -> bool:
        return self._own_name(name) in self._tensors

    def _own_name(self, name: str) -> str:
        wrapper, own = self._prefixes
        return own + name.removeprefix(wrapper) if name.startswith(wrapper) else name

    def _find(self, name: str) -> _Tensor:
        tensor = self._tensors.get(self._own_name(name))
        if tensor is None:
            raise CheckpointError(f"{self.folder} holds no tensor {name}", "the checkpoint is incomplete: " + _AGAIN)
        return tensor

    def _read_items(self, name: str, tensor: _Tensor, start: int, count: int) -> Float32Array:
        size = _ITEM_BYTES[tensor.dtype]
        raw = self._read_bytes(name, tensor, start * size, count * size)
        if tensor.dtype == "F32":
            values = raw.view(np.float32)
        elif tensor.dtype == "F16":
            values = raw.view(np.float16).astype(np.float32)
        else:  # bfloat16 is the upper half of a float32
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return _finite(name, values)

    def _read_bytes(self, name: str, tensor: _Tensor, start: int, count: int) -> UInt8Array:
        try:
            with tensor.file.open("rb", buffering=0) as file:
                file.seek(tensor.offset + start)
                raw = np.fromfile(file, dtype=np.uint8, count=count)
        except OSError as error:
            raise CheckpointError(f"{tensor.file} cannot be read: {error}", _AGAIN) from error
        if raw.size != count:
            raise CheckpointError(f"{tensor.file} ended inside {name}", _AGAIN)
        return raw


def _finite(name: str, values: Float32Array) -> Float32Array:
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name} holds NaN or infinite weights", _AGAIN)
    return values


def _prefixes(names: Collection[str]) -> tuple[str, str]:
    """A prefix of the names a causal model's tensors have, and what these ones have in its place."""
    # A multimodal model has a language model inside, as transformers before and after 4.52 save it.
    for wrapper, own in (("", "language_model."), ("model.", "model.language_model.")):
        if any(name.startswith(f"{own}{'' if wrapper else 'model.'}layers.") for name in names):
            return wrapper, own
    # Base models are sometimes saved without the wrapper's name in front.
    wrapped = any(name.startswith("model.") for name in names)
    return "model.", "model." if wrapped else ""


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
    names = sorted(set(places.values()))
    for name in names:
        if PureWindowsPath(name).name != name:  # these know the separators of every system
            raise CheckpointError(f"{index} names a file outside the checkpoint: {shown(name)}", _AGAIN)
    files = [index.parent / name for name in names]
    for file in files:
        if not os.path.isfile(file):  # Path.is_file raises for names that are too long
            raise CheckpointError(f"shard {file.name} is missing from {index.parent}", _AGAIN)
    return files


def _read_header(path: Path) -> dict[str, _Tensor]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _HEADER_LIMIT):
                raise CheckpointError(f"{path} is truncated or not a safetensors file", _AGAIN)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", _AGAIN) from error
    try:
        header = parse_json_object(text)
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged header: it {error}", _AGAIN) from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensor, stop = _read_entry(path, entry, 8 + length)
        except ValueError as error:
            raise CheckpointError(f"{path} has a damaged header: {name} {error}", _AGAIN) from error
        if stop > size:
            raise CheckpointError(f"{path} is truncated: {name} lies beyond its {size} bytes", _AGAIN)
        tensors[name] = tensor
    return tensors


def _read_entry(path: Path, entry: object, start_of_data: int) -> tuple[_Tensor, int]:
    """A tensor from its entry of the header, and where in the file it ends."""
    if not isinstance(entry, dict):
        raise ValueError(f"is {shown(entry)}")
    dtype, shape, offsets = entry.get("dtype"), _counts(entry, "shape"), _counts(entry, "data_offsets")
    if not isinstance(dtype, str):
        raise ValueError(f"has the dtype {shown(dtype)}")
    if len(shape) > _MOST_DIMENSIONS or len(offsets) != 2:
        raise ValueError(f"has {len(shape)} dimensions and {len(offsets)} offsets")
    start, stop = offsets
    item = _KNOWN_BYTES.get(dtype)
    if start > stop or (item is not None and stop - start != item * math.prod(shape)):
        raise ValueError(f"has bytes {shown(start)} to {shown(stop)} for shape {shown(shape)}")
    return _Tensor(path, dtype, tuple(shape), start_of_data + start), start_of_data + stop


def _counts(entry: Mapping[str, Any], name: str) -> list[int]:
    value = entry.get(name)
    if not isinstance(value, list) or not all(is_whole(item, 0) for item in value):
        raise ValueError(f"has the {name} {shown(value)}")
    return value
