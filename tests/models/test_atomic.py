"""Files and folders that are written atomically."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edgerun.models.atomic import folder_written_atomically, write_atomically
from support.unusual_files import needs_links


def never(_folder: Path) -> bool:
    return False


def made(folder: Path, name: str) -> Path:
    """A folder with one file."""
    folder.mkdir()
    (folder / name).write_text("0", encoding="utf-8")
    return folder


def entries(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_new_folder_appears_when_the_block_ends(tmp_path: Path) -> None:
    with folder_written_atomically(tmp_path / "a" / "out", never) as staging:
        (staging / "x").write_text("1", encoding="utf-8")
        assert not (tmp_path / "a" / "out").exists()
    assert entries(tmp_path) == ["a", "a/out", "a/out/x"]
    assert (tmp_path / "a" / "out").stat().st_mode == (tmp_path / "a").stat().st_mode


def test_an_existing_folder_is_replaced(tmp_path: Path) -> None:
    with folder_written_atomically(made(tmp_path / "out", "old"), bool) as staging:
        (staging / "new").write_text("1", encoding="utf-8")
        assert (tmp_path / "out" / "old").exists()
    assert entries(tmp_path) == ["out", "out/new"]


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_a_private_file_is_its_owners_alone_also_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", recorded)
    path = tmp_path / "file"
    previous = os.umask(0o022)
    try:
        write_atomically(path, b"1")
        write_atomically(path, b"2", private=True)
    finally:
        os.umask(previous)
    assert modes[0] == 0o644
    assert 0o600 in modes
    assert (path.stat().st_mode & 0o777, path.read_bytes()) == (0o600, b"2")


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes of POSIX")
def test_a_pipe_or_a_folder_is_not_replaced_by_one(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path, kind in ((pipe, "a pipe"), (folder, "a folder"), (Path("/"), "a folder"), (Path(), "a folder")):
        with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
            write_atomically(path, b"1")
    with pytest.raises(OSError, match="null byte"):
        write_atomically(tmp_path / "a\0b", b"1")
    assert sorted(tmp_path.iterdir()) == [folder, pipe]
    assert pipe.is_fifo()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_error_leaves_the_old_folder_and_no_staging_folder(tmp_path: Path, error: BaseException) -> None:
    out = made(tmp_path / "out", "old")
    with pytest.raises(type(error)), folder_written_atomically(out, bool) as staging:  # noqa: PT012
        (staging / "half").write_text("1", encoding="utf-8")
        raise error
    assert entries(tmp_path) == ["out", "out/old"]


def test_a_folder_with_other_files_is_never_replaced_also_if_they_come_during_the_block(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), folder_written_atomically(made(tmp_path / "out", "thesis"), never):
        pass
    (tmp_path / "file").write_text("0", encoding="utf-8")
    with pytest.raises(FileExistsError), folder_written_atomically(tmp_path / "file", bool):
        pass
    with pytest.raises(FileExistsError), folder_written_atomically(tmp_path / "new", never):
        made(tmp_path / "new", "thesis")
    assert entries(tmp_path) == ["file", "new", "new/thesis", "out", "out/thesis"]


@needs_links
@pytest.mark.parametrize("there", [True, False], ids=["a folder", "nowhere"])
def test_a_link_is_followed(tmp_path: Path, there: bool) -> None:
    if there:
        made(tmp_path / "target", "old")
    (tmp_path / "link").symlink_to("target")
    with folder_written_atomically(tmp_path / "link", bool) as staging:
        (staging / "new").write_text("1", encoding="utf-8")
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["new"]


def test_the_old_folder_is_restored_when_the_swap_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, replace = made(tmp_path / "out", "old"), os.replace

    def failing(source: Path, target: Path) -> None:
        if source.suffix == ".new":
            raise PermissionError(13, "Permission denied")
        replace(source, target)

    monkeypatch.setattr("edgerun.models.atomic.exchange", lambda first, second: False)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(PermissionError), folder_written_atomically(out, bool) as staging:
        (staging / "x").write_text("1", encoding="utf-8")
    assert entries(tmp_path) == ["out", "out/old"]


def test_a_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "sub" / "file"
    write_atomically(target, b"one")
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert target.stat().st_mode == plain.stat().st_mode
    plain.unlink()
    write_atomically(target, b"two")
    assert target.read_bytes() == b"two"

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(target, b"three")
    assert target.read_bytes() == b"two"
    assert entries(tmp_path) == ["sub", "sub/file"]
