"""Special tokens of a bundle, and where the last turn of a text begins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgerun.runtime.text.turn_markers import Markers, answer_start, read_markers
from support.tiny_models import write_checkpoint


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **settings}), encoding="utf-8")


def test_markers_are_read_from_all_files_that_name_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    assert read_markers(folder) == Markers(frozenset(range(5)), frozenset({0}))
    change(folder / "generation_config.json", eos_token_id=[2, 7])
    change(folder / "config.json", eos_token_id=9)
    change(folder / "tokenizer_config.json", eos_token={"content": "<|system|>"})
    assert read_markers(folder).ending == {1, 2, 7, 9}
    for name in ("generation_config.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert read_markers(folder) == Markers(frozenset(range(5)), frozenset({9}))


@pytest.mark.parametrize(
    ("text", "start"),
    [([2, 40, 41, 3, 50, 51, 0], 4), ([40, 41], 0), ([2, 40, 3], 1), ([3, 50, 0, 2, 40, 3, 50], 6), ([], 0)],
)
def test_an_answer_begins_behind_the_last_token_that_opens_a_turn(text: list[int], start: int) -> None:
    assert answer_start(np.array(text, np.int64), Markers(frozenset({0, 2, 3}), frozenset({0}))) == start
