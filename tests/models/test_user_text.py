"""Text that users give: line ends of every system, byte order marks, and sizes in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun import InputError
from edgerun.models.user_text import decode_text, format_bytes, parse_bytes, read_text


@pytest.mark.parametrize("data", [b"\xef\xbb\xbfone\r\ntwo\r\n", b"one\ntwo\n", b"one\rtwo\r\n"])
def test_every_line_end_is_one_character(tmp_path: Path, data: bytes) -> None:
    assert decode_text(data, "here") == "one\ntwo\n"
    (tmp_path / "a.txt").write_bytes(data)
    assert read_text(tmp_path / "a.txt") == "one\ntwo\n"


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="standard input is not UTF-8 text; convert it first"):
        decode_text(b"\xff\xfeo\0n\0e\0", "standard input")
    with pytest.raises(InputError, match="is not a path"):
        read_text(tmp_path / "a\0b")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("0 MB", 0),
        ("17b", 17),
        ("17 bytes", 17),
        ("12kB", 12_000),
        ("12K", 12_000),
        ("512MB", 512_000_000),
        (" 1.5 gb ", 1_500_000_000),
        ("2GiB", 2 << 30),
        ("1ti", 1 << 40),
    ],
)
def test_sizes_are_read_with_their_unit(text: str, count: int) -> None:
    assert parse_bytes(text, "--memory") == count


@pytest.mark.parametrize(
    "text", ["", "512", "-1MB", "MB", "1 5MB", "1e3MB", "1.MB", "nanGB", "٣MB", "9" * 5000, "1MBs", "1iB", "9999999TB"]
)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--memory is .*; write a number and a unit, such as 512MB"):
        parse_bytes(text, "--memory")


@pytest.mark.parametrize("count", [0, 999, 12_000, 3_400_000, 5_600_000_000])
def test_what_is_shown_can_be_given(count: int) -> None:
    assert parse_bytes(format_bytes(count), "--memory") == count
