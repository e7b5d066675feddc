"""Arrays of untrusted files: what their headers claim is checked before memory is taken."""

from __future__ import annotations

import gc
import io
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edgerun.models.array_file import map_array, read_array, read_arrays


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype="<i8").reshape(3, 4),
        np.asfortranarray(np.arange(12, dtype="<f4").reshape(3, 4)),
        np.zeros((0, 5), np.float16),
        np.float64(3),
        np.ones((1, 2, 3), np.bool_),
        np.arange(4, dtype=">u2"),
        np.arange(3, dtype="<c16"),
    ],
)
def test_arrays_are_those_that_numpy_wrote(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "a.npz", first=array, second=np.ones(3))
    alone = read_array(tmp_path / "a.npy", 10_000)
    mapped = map_array(tmp_path / "a.npy")
    packed = read_arrays(tmp_path / "a.npz", 10_000)
    assert list(packed) == ["first", "second"]
    for read in (alone, mapped, packed["first"]):
        assert read.shape == array.shape
        np.testing.assert_array_equal(read, array)
        assert read.dtype == array.dtype


def npy(shape: str, kind: str = "'<f4'") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f4", "fortran_order": False, "shape": (1,)})
    header = buffer.getvalue()
    changed = header.replace(b"'<f4'", kind.encode()).replace(b"(1,)", shape.encode())
    return changed[:8] + (len(changed) - 10).to_bytes(2, "little") + changed[10:] + b"\0" * 4


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x03\0",
        b"\x93NUMPY\x01\0\xff\xff",
        npy("(1000000000000,)"),
        npy("(-1,)"),
        npy("(1, 1 << 3)"),
        npy("(1,)", "'|O'"),
        npy("(1,)", "'x'"),
        npy("(1,)", "['<f4', " + "[" * 40 + "]" * 40 + "]"),
        npy("(2,)"),
        npy("(,)"),
        npy("(1,", "'<f4'"),
        npy("(1)" + "," * 30_000),
        npy("True"),
        npy("(1,)", "True"),
        npy("(1,)", "'<f99'"),
        npy("(1,), 'shape': (1,)"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        read_array(tmp_path / "a.npy", 100_000)
    with pytest.raises(ValueError, match=r"."):
        map_array(tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", content)
    with pytest.raises(ValueError, match=r"."):
        read_arrays(tmp_path / "a.npz", 100_000)


def test_headers_are_read_on_several_threads(tmp_path: Path) -> None:
    """Collected garbage that waits makes another thread run in the middle: Python's parser is not made for that."""

    class Waiting:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            time.sleep(0)

    def read(_: int) -> int:
        Waiting()
        return int(read_array(tmp_path / "a.npy", 1000).sum())

    np.save(tmp_path / "a.npy", np.arange(4))
    threshold = gc.get_threshold()
    gc.set_threshold(10)
    try:
        with ThreadPoolExecutor(2) as pool:
            assert set(pool.map(read, range(5000))) == {6}
    finally:
        gc.set_threshold(*threshold)


def test_an_archive_that_inflates_or_whose_table_lies_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, zeros=np.zeros(50_000_000, np.uint8))
    assert path.stat().st_size < 100_000
    with pytest.raises(OSError, match="its contents have 50000128 bytes, and at most 1000000 are possible"):
        read_arrays(path, 1_000_000)
    # Python's zipfile reads no more of a member than the table says, and an array of less is not one.
    np.savez_compressed(path, zeros=np.zeros(50_000, np.uint8))
    data = path.read_bytes()
    path.write_bytes(data.replace((50_128).to_bytes(4, "little"), (200).to_bytes(4, "little")))
    with pytest.raises(ValueError, match=r"."):
        read_arrays(path, 1_000_000)
