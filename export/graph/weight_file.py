"""Writing and hashing the external data file of an ONNX model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import FileDigest

_MAPPED_FROM: Final = 1 << 20
_MAP_ALIGNMENT: Final = 1 << 16
"""Windows maps files at multiples of 64 KiB; pages of other systems divide it."""
_SMALL_ALIGNMENT: Final = 64


class WeightFile:
    """Appends tensors to the file; a context manager. Methods raise OSError when the disk refuses a write."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._file = path.open("wb", buffering=0)
        self._sha = hashlib.sha256()
        self._size = 0

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def start(self, length: int) -> int:
        """Align the file for a tensor of that many bytes and return its offset; call `append` for its bytes."""
        alignment = _MAP_ALIGNMENT if length >= _MAPPED_FROM else _SMALL_ALIGNMENT
        self._write(memoryview(bytes(-self._size % alignment)))
        return self._size

    def append(self, part: npt.NDArray[np.generic]) -> None:
        """Write the next bytes of the current tensor."""
        self._write(np.ascontiguousarray(part).data.cast("B"))

    def digest(self) -> FileDigest:
        """Size and SHA-256 of the bytes written so far."""
        return FileDigest(self._size, self._sha.hexdigest())

    def _write(self, view: memoryview) -> None:
        self._sha.update(view)
        self._size += len(view)
        while view:  # an unbuffered write may be partial
            view = view[self._file.write(view) or 0 :]
