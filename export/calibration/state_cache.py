"""Caches of hidden states, within a limit of memory.

An array that ONNX Runtime returns lies in its session's memory, all of which stays allocated as long as the array does.
So cached arrays are copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ...models.array_file import read_array
from ..checkpoint.source import Float32Array

_Scalar = TypeVar("_Scalar", bound=np.generic)


class RecentArrays:
    """A least-recently-used cache of arrays."""

    def __init__(self, limit: int) -> None:
        """`limit` is the largest total size in bytes."""
        self.limit = limit
        self._bytes = 0
        self._arrays: OrderedDict[Hashable, Float32Array] = OrderedDict()

    def get(self, key: Hashable) -> Float32Array | None:
        """The array with that key, or None."""
        if key not in self._arrays:
            return None
        self._arrays.move_to_end(key)
        return self._arrays[key]

    def put(self, key: Hashable, array: Float32Array) -> None:
        """Cache an array, unless it is larger than the limit."""
        if key in self._arrays or array.nbytes > self.limit:
            return
        self._bytes += array.nbytes
        self._arrays[key] = owned(array)
        while self._bytes > self.limit:
            _, oldest = self._arrays.popitem(last=False)
            self._bytes -= oldest.nbytes

    def clear(self) -> None:
        """Drop all arrays."""
        self._arrays.clear()
        self._bytes = 0


class PinnedArrays:
    """Arrays that are never dropped: in memory up to a limit, further ones in files."""

    def __init__(self, limit: int, folder: Path) -> None:
        """`limit` is the largest total size in memory, in bytes; `folder` takes the files."""
        self._room = limit
        self._folder = folder
        self._arrays: dict[str, Float32Array | None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def get(self, name: str) -> Float32Array:
        """The array with that name."""
        array = self._arrays[name]
        return read_array(self._path(name)) if array is None else array

    def put(self, name: str, array: Float32Array) -> None:
        """Keep an array.

        Raises:
            OSError: The disk refused a write.
        """
        if array.nbytes <= self._room:
            self._room -= array.nbytes
            self._arrays[name] = owned(array)
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        np.save(self._path(name), array, allow_pickle=False)
        self._arrays[name] = None

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"


def owned(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """The array itself if NumPy owns its memory, else a copy."""
    holder: npt.NDArray[Any] = array
    while isinstance(holder.base, np.ndarray):
        holder = holder.base
    return array if holder.base is None else array.copy()
