"""Reading NumPy arrays from untrusted .npy files and .npz archives."""

from __future__ import annotations

import errno
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from .regular_file import UnsuitableFileError, open_regular

_VERSIONS: Final = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_array(path: Path, max_bytes: int) -> npt.NDArray[Any]:
    """Read an .npy file of at most `max_bytes` bytes.

    Raises:
        OSError: the file cannot be read, is not a regular file or is larger.
        ValueError: it is not an .npy file of numbers.
    """
    with open_regular(path, max_bytes) as file:
        return _read(file, path.stat().st_size)


def read_arrays(path: Path, max_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of an .npz archive that have at most `max_bytes` bytes together.

    The size of what was compressed is known before anything is decompressed: from the archive's table, and from the
    header of each array.

    Raises:
        OSError: the file cannot be read or is not a regular file, or it or its contents are larger.
        ValueError: it is not such an archive.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    with open_regular(path, max_bytes) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                total = sum(member.file_size for member in members)
                if total > max_bytes:
                    raise UnsuitableFileError(
                        errno.EFBIG, f"its contents have {total} bytes, and at most {max_bytes} are possible", str(path)
                    )
                for member in members:
                    with archive.open(member) as stream:
                        arrays[member.filename.removesuffix(".npy")] = _read(stream, member.file_size)
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"it is not an archive of arrays: {error}") from error
    return arrays


def _read(file: BinaryIO | Any, size: int) -> npt.NDArray[Any]:
    """Read an array from a stream of `size` bytes, whose header may claim more."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in _VERSIONS:
            raise ValueError(f"it has the unknown version {version}")
        shape, fortran_order, dtype = _VERSIONS[version](file)
    except (EOFError, TypeError, KeyError, SyntaxError, UnicodeDecodeError, RecursionError, MemoryError) as error:
        raise ValueError("it is not an array of numbers") from error
    count = math.prod(shape)
    if dtype.hasobject or not all(length >= 0 for length in shape) or count * dtype.itemsize > size:
        raise ValueError("it is not an array of numbers")
    data = file.read(count * dtype.itemsize)
    if len(data) != count * dtype.itemsize:
        raise ValueError("it ends too early")
    array = np.frombuffer(data, dtype) if count else np.empty(0, dtype)
    return array.reshape(shape[::-1]).T if fortran_order else array.reshape(shape)
