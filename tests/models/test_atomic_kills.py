"""A process that is killed while it writes leaves the old files or the new ones, and no rubbish for good."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import BinaryIO

import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.models.atomic import folder_written_atomically, restore_folder, write_atomically
from edgerun.models.bundle import open_bundle
from edgerun.models.file_system import move
from edgerun.models.find import find_model
from support.killed_process import KillingServer, killing_server, needs_kills, replace_folder, write_file
from support.processes import started
from support.tiny_models import write_checkpoint

pytestmark = needs_kills
MIN_STEPS = 10
"""Fewer steps would mean that the kills miss what they are meant to interrupt."""


@pytest.fixture(scope="module")
def server() -> Iterator[KillingServer]:
    with killing_server() as process:
        yield process


def texts(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file()
    }


def whole(text: str) -> dict[str, str]:
    return {"first": text, "below/second": text}


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "renames"])
@pytest.mark.parametrize("before", ["old", None], ids=["replaced", "new"])
def test_a_folder_is_whole_after_a_kill_at_any_step(
    server: KillingServer, tmp_path: Path, before: str | None, exchange: bool
) -> None:
    steps = 0
    for step in count(1):
        root = tmp_path / str(step)
        root.mkdir()
        if before is not None:
            replace_folder(root, before, exchange=True)
        if server.steps("replace_folder", root, "new", exchange, kill_at=step) is not None:
            break
        steps += 1
        restore_folder(root / "out")
        assert texts(root / "out") in ([whole("new"), whole(before)] if before else [whole("new"), {}])
        replace_folder(root, "newer", exchange=True)
        assert [path.name for path in root.iterdir()] == ["out"]
        assert texts(root / "out") == whole("newer")
    assert steps >= MIN_STEPS


def test_leftovers_of_other_folders_are_removed_and_those_of_living_processes_are_kept(
    server: KillingServer, tmp_path: Path
) -> None:
    for step in (3, 6, 9):
        assert server.steps("replace_folder", tmp_path, "new", True, kill_at=step) is None
    for name in (".keep.old", ".notes.new", ".thesis.lock"):  # not names that edge-run gives
        (tmp_path / name).mkdir()
    with (
        folder_written_atomically(tmp_path / "first", bool) as first,
        folder_written_atomically(tmp_path / "second", bool) as second,
    ):
        (first / "file").write_text("1", encoding="utf-8")
        (second / "file").write_text("2", encoding="utf-8")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".keep.old",
        ".notes.new",
        ".thesis.lock",
        "first",
        "second",
    ]


def test_a_file_is_whole_after_a_kill_at_any_step(server: KillingServer, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("old", encoding="utf-8")
    for step in count(1):
        if server.steps("write_file", tmp_path, "new", kill_at=step) is not None:
            break
        assert (tmp_path / "out").read_text(encoding="utf-8") in ("old", "new")
    assert step > 3
    write_file(tmp_path, "newer")
    assert texts(tmp_path) == {"out": "newer"}


def test_a_file_that_is_being_written_is_not_taken_for_abandoned(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"outer")
        write_file(tmp_path, "inner")

    write_atomically(tmp_path / "out", write)
    assert texts(tmp_path) == {"out": "outer"}


def test_a_file_taken_for_abandoned_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(source: Path, target: Path) -> None:
        monkeypatch.undo()
        source.unlink()
        move(source, target)

    monkeypatch.setattr("edgerun.models.atomic.move", taken)
    write_file(tmp_path, "text")
    assert texts(tmp_path) == {"out": "text"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def exported(checkpoint: Path, root: Path) -> None:
    assert main(["export", str(checkpoint), str(root / "out")]) == 0


def test_a_model_is_found_after_its_export_was_killed(
    server: KillingServer, tmp_path: Path, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    exported(checkpoint, tmp_path)
    # The system has no exchange of folders here, and the process ends between the two renames instead.
    assert server.steps("export", tmp_path, str(checkpoint), False, kill_at=2, event="os.rename") is None
    assert not (tmp_path / "out").exists()
    capfd.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["model"] == str(tmp_path / "out")
    exported(checkpoint, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.nightly
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "renames"])
def test_a_killed_export_leaves_a_whole_model(
    server: KillingServer, tmp_path: Path, checkpoint: Path, exchange: bool
) -> None:
    exported(checkpoint, tmp_path)
    before = open_bundle(tmp_path / "out").fingerprint
    steps = server.steps("export", tmp_path, str(checkpoint), exchange)
    for step in [*range(1, steps - 40, 20), *range(steps - 40, steps + 1)]:
        assert server.steps("export", tmp_path, str(checkpoint), exchange, kill_at=step) is None
        assert open_bundle(find_model(tmp_path / "out")).fingerprint == before
    exported(checkpoint, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


SAVE = """
import os, signal, sys
import edgerun
with edgerun.load(sys.argv[1]) as engine, engine.session() as session:
    session.send("the", max_tokens=4)
    os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
    session.save(sys.argv[2])
"""


def test_a_killed_save_leaves_nothing_after_the_next(tmp_path: Path, tiny_bundle: Path) -> None:
    path = tmp_path / "conversation"
    with started([sys.executable, "-c", SAVE, str(tiny_bundle), str(path)]) as process:
        assert process.wait() == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    with edgerun.load(tiny_bundle) as engine, engine.session() as session:
        session.send("the", max_tokens=4)
        session.save(path)
    assert list(tmp_path.iterdir()) == [path]
