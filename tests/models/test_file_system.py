"""Operations on files that Windows refuses while they are in use."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgerun.models import file_system
from edgerun.models.file_system import exchange, is_in_use, move, remove


class InUse(PermissionError):
    """What Windows raises for a file in use."""

    winerror = 32


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(file_system.time, "sleep", found.append)
    return found


def refusals(monkeypatch: pytest.MonkeyPatch, count: int, error: OSError) -> None:
    """Let the first renames and removals fail."""
    left = count

    def refused_first(operation: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left >= 0:
                raise error
            return operation(*arguments, **options)

        return attempt

    monkeypatch.setattr(os, "replace", refused_first(os.replace))
    monkeypatch.setattr(Path, "unlink", refused_first(Path.unlink))


def test_a_file_in_use_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    (tmp_path / "one").write_text("1", encoding="utf-8")
    refusals(monkeypatch, 3, InUse(13, "in use"))
    move(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two").read_text(encoding="utf-8") == "1"
    refusals(monkeypatch, 2, InUse(13, "in use"))
    remove(tmp_path / "two")
    assert list(tmp_path.iterdir()) == []
    assert len(pauses) == 5


@pytest.mark.parametrize(("error", "least", "most"), [(InUse(13, "in use"), 1, 2), (PermissionError(13, "no"), 0, 0)])
def test_it_gives_up_within_two_seconds_and_other_errors_are_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], error: PermissionError, least: int, most: int
) -> None:
    (tmp_path / "one").write_text("1", encoding="utf-8")
    refusals(monkeypatch, 100, error)
    for operation in (lambda: move(tmp_path / "one", tmp_path / "two"), lambda: remove(tmp_path / "one")):
        pauses.clear()
        with pytest.raises(PermissionError) as raised:
            operation()
        assert is_in_use(raised.value) == bool(most)
        assert least <= sum(pauses) <= most


def test_what_is_not_there_is_not_removed(tmp_path: Path) -> None:
    remove(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    remove(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_folders_exchange_their_names_where_the_system_can(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    done = exchange(tmp_path / "one", tmp_path / "two")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["two" if done else "one"]
    assert not exchange(tmp_path / "one", tmp_path / "missing")
