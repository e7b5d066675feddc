"""Reading NumPy arrays from .npy files and .npz archives, which may be untrusted.

NumPy's own reader parses a header with `ast.literal_eval`. In Python 3.11 two threads cannot do that at the same time:
if one waits for the interpreter lock in the middle, as it does when garbage is collected there, the other changes the
counter that both share, and "SystemError: AST constructor recursion depth mismatch" ends the first. An export reads
arrays on two threads, and a program that embeds the runtime may parse Python meanwhile, so headers are parsed here.
"""

from __future__ import annotations

import errno
import math
import re
import zipfile
import zlib
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from .regular_file import open_regular

_LENGTH_BYTES: Final = {(1, 0): 2, (2, 0): 4}
"""Size of the field with the header's length, by version of the format."""
_MAX_HEADER_BYTES: Final = 10_000
_ENTRY: Final = r"'(descr|fortran_order|shape)'\s*:\s*('[<>|=]?[a-zA-Z]\d{0,9}'|True|False|\([\d,\s]{0,999}\))"
_ENTRIES: Final = re.compile(_ENTRY)
_HEADER: Final = re.compile(rf"\s*{{\s*{_ENTRY}\s*,\s*{_ENTRY}\s*,\s*{_ENTRY}\s*,?\s*}}\s*")
"""A Python dictionary of three values: the type, whether columns are contiguous, and the shape."""
_SHAPE: Final = re.compile(r"\(\s*(?:\d{1,18}\s*,\s*)*(?:\d{1,18}\s*)?\)")


def read_array(path: Path, max_bytes: int | None = None) -> npt.NDArray[Any]:
    """Read an .npy file of at most `max_bytes` bytes, or of any size.

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
                    raise OSError(
                        errno.EFBIG, f"its contents have {total} bytes, and at most {max_bytes} are possible", str(path)
                    )
                for member in members:
                    with archive.open(member) as stream:
                        arrays[member.filename.removesuffix(".npy")] = _read(
                            cast("BufferedIOBase", stream), member.file_size
                        )
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"it is not an archive of arrays: {error}") from error
    return arrays


def map_array(path: Path) -> npt.NDArray[Any]:
    """Map an .npy file into memory, read-only: what is not used is not read; errors as for `map_arrays`."""
    return map_arrays(path, 1)[0]


def map_arrays(path: Path, count: int | None = None) -> list[npt.NDArray[Any]]:
    """Map the arrays of a file that has several .npy arrays one after the other, read-only.

    Args:
        path: the file, as `numpy.save` writes it when it is called several times with one open file.
        count: number of arrays to map, from the first on; None for all.

    Raises:
        OSError: the file cannot be read or is not a regular file.
        ValueError: it has something else, or fewer arrays.
    """
    arrays: list[npt.NDArray[Any]] = []
    with open_regular(path) as file:
        size = path.stat().st_size
        while file.tell() < size if count is None else len(arrays) < count:
            shape, fortran_order, dtype = _read_header(file, size - file.tell())
            begin = file.tell()
            end = begin + math.prod(shape) * dtype.itemsize
            if end > size:
                raise ValueError("it ends too early")
            if begin == end:  # nothing can be mapped
                arrays.append(np.empty(shape, dtype))
            else:
                arrays.append(np.memmap(file, dtype, "r", begin, shape, "F" if fortran_order else "C"))
            file.seek(end)
    return arrays


def _read(file: BufferedIOBase, size: int) -> npt.NDArray[Any]:
    """Read an array from a stream of `size` bytes, whose header may claim more."""
    shape, fortran_order, dtype = _read_header(file, size)
    array = np.empty(math.prod(shape), dtype)
    if array.nbytes and file.readinto(array.view(np.uint8).data) != array.nbytes:
        raise ValueError("it ends too early")
    return array.reshape(shape[::-1]).T if fortran_order else array.reshape(shape)


def _read_header(file: BufferedIOBase, size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """The shape of an array in a stream of `size` bytes, whether its columns are contiguous, and its type."""
    length_bytes = _LENGTH_BYTES.get(np.lib.format.read_magic(file))
    if length_bytes is None:
        raise ValueError("it has an unknown version")
    length = int.from_bytes(file.read(length_bytes), "little")
    header = file.read(min(length, _MAX_HEADER_BYTES)).decode("latin-1")
    entries = dict(_ENTRIES.findall(header)) if _HEADER.fullmatch(header) else {}
    descr, order, shape_text = (entries.get(name, "") for name in ("descr", "fortran_order", "shape"))
    if descr[:1] != "'" or order not in ("True", "False") or not _SHAPE.fullmatch(shape_text):
        raise ValueError("it is not an array of numbers")
    shape = tuple(map(int, re.findall(r"\d+", shape_text)))
    try:
        dtype = np.dtype(descr[1:-1])
    except TypeError as error:
        raise ValueError("it is not an array of numbers") from error
    if dtype.hasobject or math.prod(shape) * dtype.itemsize > size:
        raise ValueError("it is not an array of numbers")
    return shape, order == "True", dtype
