"""Hostile images: each is seen or refused in one line, within a bound of memory, and nothing else is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs the images extra")
pytest.importorskip("onnx", reason="needs the export extra")

from edgerun.export import FP32, ExportRecipe, export_checkpoint
from support import hostile_images_child
from support.hostile_images import hostile_images
from support.nightly import some_nightly
from support.processes import started
from support.vision_models import FAMILIES, write_vision_checkpoint

COUNT = 36
"""Three of each kind every day."""
CASES = [(family, COUNT) for family in FAMILIES] + [("smolvlm", 300)]
MEGABYTES = 300


@pytest.mark.skipif(sys.platform != "linux", reason="peaks of memory are read from /proc")
@pytest.mark.parametrize("case", some_nightly(CASES, len(CASES)), ids=str)
def test_every_image_is_one_line_at_most(tmp_path: Path, case: tuple[str, int]) -> None:
    family, count = case
    source = write_vision_checkpoint(tmp_path / "checkpoint", family)
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    command = [sys.executable, hostile_images_child.__file__, str(count), str(bundle)]
    folder = str(Path(hostile_images_child.__file__).parents[1])
    with started(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": folder}) as child:
        assert child.stdout is not None
        results = [json.loads(line) for line in child.stdout]
        assert child.wait() == 0
    assert len(results) == count
    for result in results:
        assert "\n" not in result["said"]
        assert "0x" not in result["said"]
        assert len(result["said"]) < 300
        assert result["megabytes"] < MEGABYTES, result
    assert 0.2 * count < sum(bool(result["said"]) for result in results) < count


def test_images_are_the_same_for_a_seed() -> None:
    assert hostile_images(12) == hostile_images(12) != hostile_images(12, seed=1)
