"""Opening files: only regular ones of a bounded size, without waiting for others."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from edgerun.models.regular_file import open_regular, read_regular, read_regular_or_substitution
from support.unusual_files import needs_pipes, replace_by_pipe, replace_by_sparse_file


def test_a_regular_file_of_a_bounded_size_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x\r\n" * 1000)
    assert read_regular(file, 3000) == b"x\r\n" * 1000
    with open_regular(file) as opened:
        assert opened.read(2) == b"x\r"
    large = replace_by_sparse_file(tmp_path / "large.json", 8 << 30)
    with pytest.raises(OSError, match="it has 8589934592 bytes, and files of its kind at most 1000"):
        read_regular(large, 1000)
    with pytest.raises(OSError, match="it is a folder"):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nothing")


@needs_pipes
def test_an_open_pipe_of_the_shell_is_read_up_to_a_size(tmp_path: Path) -> None:
    for limit in (5, 4):
        reading, writing = os.pipe()
        os.write(writing, b"text\n")
        os.close(writing)
        path = Path(f"/dev/fd/{reading}")
        if limit == 5:
            assert read_regular_or_substitution(path, limit) == b"text\n"
        else:
            with pytest.raises(OSError, match="it has more than 4 bytes"):
                read_regular_or_substitution(path, limit)
        os.close(reading)
    with pytest.raises(OSError, match="it is a pipe"):
        read_regular_or_substitution(replace_by_pipe(tmp_path / "pipe"), 10)
    with pytest.raises(FileNotFoundError):
        read_regular_or_substitution(Path(f"/dev/fd/{reading}"), 10)


@needs_pipes
def test_pipes_devices_and_sockets_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 108 bytes
    Path("link").symlink_to(replace_by_pipe(tmp_path / "pipe"))
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s")
        for name, kind in (("pipe", "a pipe"), ("link", "a pipe"), ("/dev/zero", "a device"), ("s", "a socket")):
            with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
                open_regular(Path(name))


@needs_pipes
def test_a_file_that_becomes_a_pipe_between_look_and_open_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x")
    regular = os.stat(file)
    replace_by_pipe(file)
    monkeypatch.setattr(os, "stat", lambda _: regular)
    with pytest.raises(OSError, match="it is a pipe"):
        open_regular(file)
