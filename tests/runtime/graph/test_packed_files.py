"""Digests of packed files: samples notice damage of any larger part, whole checks that of any byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgerun.errors import BundleError
from edgerun.runtime.graph.packed_files import RECORD_NAME, check_folder, write_record

SIZE = 9 << 20


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(0).bytes(SIZE)


@pytest.mark.parametrize("start", [0, SIZE // 3, SIZE - SIZE // 32])
def test_a_sample_notices_a_damaged_thirtysecond_anywhere(tmp_path: Path, content: bytes, start: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    write_record(tmp_path)
    check_folder(tmp_path)
    damaged = bytearray(content)
    damaged[start : start + SIZE // 32] = bytes(SIZE // 32)
    path.write_bytes(damaged)
    with pytest.raises(BundleError, match="is damaged"):
        check_folder(tmp_path)


def test_a_byte_between_the_samples_is_noticed_by_a_whole_check(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    write_record(tmp_path)
    damaged = bytearray(content)
    damaged[SIZE // 2 + 12345] ^= 1
    path.write_bytes(damaged)
    check_folder(tmp_path)
    with pytest.raises(BundleError, match="checksum"):
        check_folder(tmp_path, whole=True)


@pytest.mark.parametrize("size", [0, 1, 5000, SIZE - 1])
def test_size_and_every_byte_of_a_small_file_are_compared(tmp_path: Path, content: bytes, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(content[:size])
    write_record(tmp_path)
    path.write_bytes(content[: size + 1])
    with pytest.raises(BundleError):
        check_folder(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "files": {}}', '{"format": 2, "files": {"a": 1}}'])
def test_a_damaged_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_bytes(b"1")
    write_record(tmp_path)
    check_folder(tmp_path, whole=True)
    (tmp_path / RECORD_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(BundleError):
        check_folder(tmp_path)
