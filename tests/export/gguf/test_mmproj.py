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
from edgerun.export.gguf.mmproj import find_mmproj
from edgerun.models.bundle import VISION_GRAPH_NAME
from support.mmproj_files import write_seeing_gguf
from support.vision_models import FAMILIES, random_image, write_vision_checkpoint

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


def features(bundle: Path) -> np.ndarray:
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        assert engine.model.vision is not None
        seen = engine.model.vision.see(random_image(2))
        return seen.features(0, seen.tokens)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_vision_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_text_and_features_as_from_the_checkpoint(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out_what_files_lack(family, monkeypatch)
    source = write_vision_checkpoint(tmp_path / "checkpoint", family)
    model = write_seeing_gguf(tmp_path / "files", source)
    found = export_checkpoint(model, tmp_path / "from-gguf", ExportRecipe(FP32)).bundle
    expected = export_checkpoint(source, tmp_path / "from-checkpoint", ExportRecipe(FP32)).bundle
    assert answer(found) == answer(expected)
    np.testing.assert_allclose(features(found), features(expected), atol=1e-5)


def leave_out_what_files_lack(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checkpoints have the usual values of settings that the files do not have."""
    settings = FAMILIES[family]
    if family == "gemma3":
        usual = {"sliding_window_pattern": 6, "query_pre_attn_scalar": 32}
        monkeypatch.setitem(settings, "settings", settings["settings"] | usual)
    elif family == "lfm2_vl":
        kept = ("encoder_patch_size", "downsample_factor", "image_mean", "image_std", "image_processor_type")
        monkeypatch.setitem(settings, "images", {name: settings["images"][name] for name in kept})


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_vl", "lfm2_vl"])
def test_language_models_alone_give_the_same_text(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_what_files_lack(family, monkeypatch)
    source = write_vision_checkpoint(tmp_path / "checkpoint", family)
    model = write_seeing_gguf(tmp_path / "files", source)
    (model.parent / "mmproj-model.gguf").unlink()
    answers = []
    for path in (model, source):
        bundle = export_checkpoint(path, tmp_path / f"from-{path.name}", ExportRecipe(FP32)).bundle
        with edgerun.load(bundle, threads=1, cache=False) as engine:
            assert (engine.model.vision is None) == (path == model)
            said: Any = [{"role": "user", "content": [{"type": "text", "text": "the sea and the sand"}]}]
            reply = engine.generate(said, max_tokens=60, temperature=0, ignore_eos=True, logprobs=0)
            answers.append([each.token_id for each in reply.logprobs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_quantized_towers_are_read(tmp_path: Path, source: Path, kind: str) -> None:
    model = write_seeing_gguf(tmp_path / "files", source, kind)
    bundles = [
        export_checkpoint(path, tmp_path / f"from-{path.name}", ExportRecipe(FP32)).bundle for path in (model, source)
    ]
    found, expected = map(features, bundles)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
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


def test_files_of_different_models_are_refused(tmp_path: Path, source: Path) -> None:
    other = write_vision_checkpoint(tmp_path / "other", "qwen3_vl")
    (write_seeing_gguf(tmp_path / "others", other).parent / "mmproj-model.gguf").replace(
        write_seeing_gguf(tmp_path / "files", source).parent / "mmproj-model.gguf"
    )
    with pytest.raises(CheckpointError, match="qwen3vl_merger.* not one for models of the architecture llama"):
        export_checkpoint(tmp_path / "files" / "model.gguf", tmp_path / "bundle", ExportRecipe(FP32))


@pytest.mark.parametrize(
    ("family", "without", "message"),
    [
        ("qwen2_5_vl", "clip.vision.n_wa_pattern", "n_wa_pattern is missing"),
        ("qwen3_vl", "v.position_embd.weight", "v.position_embd.weight is missing"),
        ("lfm2_vl", "mm.1.weight", "mm.1.weight is missing"),
        ("smolvlm", "clip.vision.projector.scale_factor", "scale_factor is missing"),
    ],
)
def test_towers_that_lack_something_are_refused(tmp_path: Path, family: str, without: str, message: str) -> None:
    model = write_seeing_gguf(
        tmp_path / "files", write_vision_checkpoint(tmp_path / "checkpoint", family), without=(without,)
    )
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(model, tmp_path / "bundle", ExportRecipe(FP32))


def test_a_tower_with_millions_of_layers_takes_no_memory(tmp_path: Path) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint", "qwen2_5_vl")
    many = {"clip.vision.block_count": 3_000_000, "clip.vision.n_wa_pattern": 1}
    model = write_seeing_gguf(tmp_path / "files", source, changes=many)
    tower = find_mmproj(model, "qwen2vl")
    assert tower is not None
    assert len(tower.seeing_config({"tie_word_embeddings": False}, 0)["vision_config"]["fullatt_block_indexes"]) <= 1000
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        export_checkpoint(model, tmp_path / "bundle", ExportRecipe(FP32))
