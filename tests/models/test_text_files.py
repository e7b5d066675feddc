"""Text that users give: line ends of every system, and byte order marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun import InputError
from edgerun.models.user_text import decode_text, read_text


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
