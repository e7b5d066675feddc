"""Vision towers in GGUF files beside their models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the gguf extra")
pytest.importorskip("PIL", reason="needs the images extra")

import gguf

import edgerun
from edgerun.errors import CheckpointError
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from edgerun.models.bundle import VISION_GRAPH_NAME
from support.mmproj_files import write_seeing_gguf
from support.vision_models import random_image, write_vision_checkpoint

ASKED: Any = [
    {
        "role": "user",
        "content": [{"type": "image", "image": random_image(2)}, {"type": "text", "text": "the sea and the sand"}],
    }
]


def answer(bundle: Path) -> list[int]:
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        reply = engine.generate(ASKED, max_tokens=60, temperature=0, ignore_eos=True, logprobs=0)
    return [each.token_id for each in reply.logprobs]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_vision_checkpoint(tmp_path / "checkpoint")


def test_the_same_text_as_from_the_checkpoint(tmp_path: Path, source: Path) -> None:
    model = write_seeing_gguf(tmp_path / "files", source)
    found = export_checkpoint(model, tmp_path / "from-gguf", ExportRecipe(FP32)).bundle
    expected = export_checkpoint(source, tmp_path / "from-checkpoint", ExportRecipe(FP32)).bundle
    assert answer(found) == answer(expected)


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_quantized_towers_are_read(tmp_path: Path, source: Path, kind: str) -> None:
    model = write_seeing_gguf(tmp_path / "files", source, kind)
    features = []
    for path in (model, source):
        bundle = export_checkpoint(path, tmp_path / f"from-{path.name}", ExportRecipe(FP32)).bundle
        with edgerun.load(bundle, threads=1, cache=False) as engine:
            assert engine.model.vision is not None
            seen = engine.model.vision.see(random_image(2))
            features.append(seen.features(0, seen.tokens))
    error = np.linalg.norm(features[0] - features[1]) / np.linalg.norm(features[1])
    assert 0 < error < {"F16": 2e-3, "Q8_0": 3e-2}[kind]


def test_a_model_alone_reads_text(tmp_path: Path, source: Path) -> None:
    model = write_seeing_gguf(tmp_path / "files", source)
    (model.parent / "mmproj-model.gguf").unlink()
    bundle = export_checkpoint(model, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    assert not (bundle / VISION_GRAPH_NAME).exists()


def test_two_towers_and_other_families_are_refused(tmp_path: Path, source: Path) -> None:
    model = write_seeing_gguf(tmp_path / "files", source)
    tower = model.parent / "mmproj-model.gguf"
    (model.parent / "other-mmproj.gguf").write_bytes(tower.read_bytes())
    with pytest.raises(CheckpointError, match="several vision towers"):
        export_checkpoint(model, tmp_path / "bundle", ExportRecipe(FP32))
    (model.parent / "other-mmproj.gguf").unlink()
    writer = gguf.GGUFWriter(tower, "clip")
    writer.add_string("clip.projector_type", "ldpv2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'ldpv2'"):
        export_checkpoint(model, tmp_path / "bundle", ExportRecipe(FP32))
