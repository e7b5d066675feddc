"""The folder with the intermediate results of a long export."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgerun.errors import DestinationError, InputError
from edgerun.export.calibration.work_folder import work_folder
from support.tiny_models import write_checkpoint


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


pytestmark = pytest.mark.usefixtures("cache")


def interrupted_run(source: Path, settings: str, kept: Path | None = None) -> Path:
    run = work_folder(source, settings, kept)
    folder = run.__enter__()
    (folder / "result").write_text("out", encoding="utf-8")
    interrupt = KeyboardInterrupt()
    assert not run.__exit__(KeyboardInterrupt, interrupt, None)
    return folder


@pytest.mark.parametrize("change", ["nothing", "settings", "time", "size", "file"])
def test_an_interrupted_run_is_resumed_unless_something_changed(source: Path, change: str) -> None:
    left = interrupted_run(source, "4 bits")
    weights = source / "model.safetensors"
    if change == "time":
        os.utime(weights, ns=(0, 0))
    elif change == "size":
        weights.write_bytes(b"more weights")
    elif change == "file":
        (source / "tokenizer.json").touch()
    with work_folder(source, "2 bits" if change == "settings" else "4 bits") as folder:
        assert (folder == left) == (folder / "result").exists() == (change == "nothing")
    assert left.exists() == (change != "nothing")


def test_a_given_folder_is_kept_and_others_are_named(source: Path, tmp_path: Path) -> None:
    def use(settings: str, folder: Path) -> None:
        with work_folder(source, settings, folder) as used:
            assert used == folder
            (used / "result").touch()

    kept = tmp_path / "work"
    use("4 bits", kept)
    assert (kept / "result").exists()
    with pytest.raises(InputError, match="holds work on another model, or with other settings"):
        use("2 bits", kept)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter.txt").touch()
    with pytest.raises(InputError, match="holds other files"):
        use("", tmp_path / "letters")
    with pytest.raises(DestinationError, match="cannot be written"):
        use("", tmp_path / "letters" / "letter.txt")


def test_a_folder_in_the_cache_without_a_record_is_emptied(source: Path) -> None:
    left = interrupted_run(source, "4 bits")
    (left / "made-from.json").unlink()
    with work_folder(source, "4 bits") as folder:
        assert [path.name for path in folder.iterdir()] == ["made-from.json"]


def test_work_that_was_not_continued_is_removed_after_two_weeks(source: Path) -> None:
    old, recent = interrupted_run(source, "4 bits"), interrupted_run(source, "2 bits")
    os.utime(old, (0, 0))
    with work_folder(source, "8 bits"):
        assert not old.exists()
        assert recent.exists()


EXPORT = """
import sys
sys.path[:0] = sys.argv[1:2]
from support.windows_files import WindowsFileRules
from edgerun.edge.cli.main import main
sys.addaudithook(WindowsFileRules())
sys.exit(main(["export", *sys.argv[2:], "--weights", "int4", "--method", "gptq"]))
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the rules read /proc/self")
def test_a_gptq_export_leaves_no_work_under_the_file_rules_of_windows(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the end of the {number}" for number in range(300)), encoding="utf-8")
    tests = Path(__file__).parents[2]
    command = [sys.executable, "-c", EXPORT, tests, checkpoint, tmp_path / "out", "--calibration", text]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert list((tmp_path / "cache" / "exports").iterdir()) == []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_one_export_at_a_time(source: Path) -> None:
    with work_folder(source, ""), pytest.raises(InputError, match="another export uses"), work_folder(source, ""):
        pass
