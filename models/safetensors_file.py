"""Reading safetensors files: the header, and tensors as float32.

A safetensors file is a little-endian uint64 header length, a JSON header, and the bytes of the tensors. The library
maps files into memory, where every page that was read stays resident, so this module uses plain file reads. It also
reads bfloat16 without a NumPy extension type.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .json_file import is_whole, parse_json_object, shown
from .regular_file import open_regular, os_errors_as

ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the supported float types."""
_KNOWN_BYTES: Final = {**ITEM_BYTES, "U8": 1, "I64": 8, "I32": 4, "BOOL": 1}
_MAX_HEADER_BYTES: Final = 100 << 20
_MAX_DIMENSIONS: Final = 64
DOWNLOAD_AGAIN: Final = "download the checkpoint again"


@dataclass(frozen=True)
class SafetensorsTensor:
    """Position, type and shape of a tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, name: str, start: int, count: int) -> npt.NDArray[np.uint8]:
        """Read bytes of the tensor."""
        return read_bytes(self.file, self.offset + start, count, name, DOWNLOAD_AGAIN)

    def items(self, name: str, start: int, count: int) -> npt.NDArray[np.float32]:
        """Read elements of the flattened tensor as float32."""
        size = ITEM_BYTES[self.dtype]
        raw = self.read(name, start * size, count * size)
        if self.dtype == "F32":
            values = raw.view(np.float32)
        elif self.dtype == "F16":
            values = raw.view(np.float16).astype(np.float32)
        else:  # bfloat16 is the upper half of a float32
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return require_finite(name, values, DOWNLOAD_AGAIN)


def read_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """Read the header of a file: its tensors by name, without their elements.

    Raises:
        CheckpointError: the file cannot be read, is damaged, or is not a safetensors file.
    """
    with os_errors_as(CheckpointError, f"{path} cannot be read", DOWNLOAD_AGAIN), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path} is truncated or not a safetensors file", DOWNLOAD_AGAIN)
        text = file.read(length)
    try:
        header = parse_json_object(text)
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged header: it {error}", DOWNLOAD_AGAIN) from error
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensor, stop = _read_entry(path, entry, 8 + length)
        except ValueError as error:
            raise CheckpointError(f"{path} has a damaged header: {name} {error}", DOWNLOAD_AGAIN) from error
        if stop > size:
            raise CheckpointError(f"{path} is truncated: {name} extends beyond its {size} bytes", DOWNLOAD_AGAIN)
        tensors[name] = tensor
    return tensors


def _read_entry(path: Path, entry: object, start_of_data: int) -> tuple[SafetensorsTensor, int]:
    """Parse a tensor's header entry; returns the tensor and the position of its end in the file."""
    if not isinstance(entry, dict):
        raise ValueError(f"is {shown(entry)}")
    dtype, shape, offsets = entry.get("dtype"), _counts(entry, "shape"), _counts(entry, "data_offsets")
    if not isinstance(dtype, str):
        raise ValueError(f"has the dtype {shown(dtype)}")
    if len(shape) > _MAX_DIMENSIONS or len(offsets) != 2:
        raise ValueError(f"has {len(shape)} dimensions and {len(offsets)} offsets")
    start, stop = offsets
    item = _KNOWN_BYTES.get(dtype)
    if start > stop or (item is not None and stop - start != item * math.prod(shape)):
        raise ValueError(f"has bytes {shown(start)} to {shown(stop)} for shape {shown(shape)}")
    return SafetensorsTensor(path, dtype, tuple(shape), start_of_data + start), start_of_data + stop


def _counts(entry: Mapping[str, Any], name: str) -> list[int]:
    value = entry.get(name)
    if not isinstance(value, list) or not all(is_whole(item, 0) for item in value):
        raise ValueError(f"has the {name} {shown(value)}")
    return value


def read_bytes(file: Path, offset: int, count: int, name: str, hint: str) -> npt.NDArray[np.uint8]:
    """Read bytes of the tensor `name` without mapping the file, whose pages would stay in memory.

    Raises:
        CheckpointError: the file cannot be read or is too short; `hint` says what to do.
    """
    with os_errors_as(CheckpointError, f"{file} cannot be read", hint), file.open("rb", buffering=0) as opened:
        opened.seek(offset)
        raw = np.fromfile(opened, np.uint8, count)
    if raw.size != count:
        raise CheckpointError(f"{file} ended inside {name}", hint)
    return raw


def require_finite(name: str, values: npt.NDArray[np.float32], hint: str) -> npt.NDArray[np.float32]:
    """Return the weights of the tensor `name` if all are finite.

    Raises:
        CheckpointError: some are not; `hint` says what to do.
    """
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name} holds NaN or infinite weights", hint)
    return values
