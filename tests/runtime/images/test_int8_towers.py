"""Vision towers with 8-bit products: features, the copy in the cache, and towers that they are too coarse for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the images extra")
pytest.importorskip("onnx", reason="needs the export extra")

import onnx

import edgerun
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from edgerun.models.bundle import VISION_GRAPH_NAME, open_bundle
from edgerun.runtime.int8_prompts import int8_graph_files
from edgerun.runtime.int8_prompts.int8_graph_files import int8_tower_path
from support.vision_models import FAMILIES, random_image, write_vision_checkpoint


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def bundle_of(folder: Path, family: str, vision_weights: str) -> Path:
    source = write_vision_checkpoint(folder / f"checkpoint-{vision_weights}", family)
    recipe = ExportRecipe(FP32, vision_weights=vision_weights)
    return export_checkpoint(source, folder / vision_weights, recipe).bundle


def features_of(bundle: Path, **options: Any) -> np.ndarray:
    with edgerun.load(bundle, threads=1, **options) as engine:
        assert engine.model.vision is not None
        seen = engine.model.vision.see(random_image(1))
        return np.array(seen.features(0, seen.tokens))


def operators(graph: Path) -> set[str]:
    return {each.op_type for each in onnx.load(graph, load_external_data=False).graph.node}


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_close(tmp_path: Path, cache: Path, family: str) -> None:
    bundle = bundle_of(tmp_path, family, "int8")
    exact = features_of(bundle_of(tmp_path, family, "fp32"))
    assert not list(cache.glob("tower-int8/*"))  # weights in float32 have no 8-bit products
    plain = features_of(bundle, cache=False)
    found = features_of(bundle)
    (graph,) = cache.glob(f"tower-int8/*/{VISION_GRAPH_NAME}")
    assert "MatMulIntegerToFloat" in operators(graph)
    errors = [np.linalg.norm(each - exact) for each in (plain, found)]
    assert not np.array_equal(found, plain)
    assert errors[1] < 3 * errors[0] < 0.12 * np.linalg.norm(exact)


def test_the_copy_is_made_once_and_again_when_damaged(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(tmp_path, "smolvlm", "int8")
    first = features_of(bundle)
    made = []
    write = int8_graph_files._write_tower
    monkeypatch.setattr(int8_graph_files, "_write_tower", lambda *given: (made.append(1), write(*given)))
    np.testing.assert_array_equal(features_of(bundle), first)
    assert not made
    (data,) = cache.glob("tower-int8/*/int8.data")
    data.write_bytes(data.read_bytes()[:-100])
    np.testing.assert_array_equal(features_of(bundle), first)
    assert made == [1]


def test_a_tower_that_8_bits_are_too_coarse_for_stays_as_it_is(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(int8_graph_files, "_MOST_DIFFERENCE", 0.0)
    bundle = bundle_of(tmp_path, "smolvlm", "int8")
    np.testing.assert_array_equal(features_of(bundle), features_of(bundle, cache=False))
    assert "too coarse" in caplog.text
    (graph,) = cache.glob(f"tower-int8/*/{VISION_GRAPH_NAME}")
    assert "MatMulNBits" in operators(graph)
    caplog.clear()
    features_of(bundle)
    assert not caplog.text


def test_a_full_disk_is_one_warning(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(int8_graph_files, "_SPARE_BYTES", 1 << 60)
    bundle = bundle_of(tmp_path, "smolvlm", "int8")
    np.testing.assert_array_equal(features_of(bundle), features_of(bundle, cache=False))
    assert caplog.text.count("disk space") == 1
    assert not list(cache.glob("tower-int8/*"))


def test_towers_without_quantized_weights_have_no_copy(tmp_path: Path, cache: Path) -> None:
    bundle = open_bundle(bundle_of(tmp_path, "smolvlm", "fp32"))
    with edgerun.load(bundle.folder, threads=1) as engine:
        assert engine.model.vision is not None
        assert int8_tower_path(bundle, {}, engine.model.vision._config) is None
    assert not list(cache.glob("tower-int8/*"))
