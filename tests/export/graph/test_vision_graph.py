"""The exported vision tower: its features, its weights in 8 bits, and checkpoints without one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file, save_file

from edgerun.errors import CheckpointError
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from edgerun.models.bundle import GRAPH_NAME, VISION_GRAPH_NAME, VISION_WEIGHTS_NAME, open_bundle
from edgerun.runtime.images.image_processors import processor_of
from support.tiny_models import write_json
from support.vision_models import FAMILIES, vision_config, write_vision_checkpoint
from support.vision_reference import reference_features, reference_native_features

PIXELS = np.random.default_rng(7).standard_normal((2, 3, 32, 32)).astype(np.float32)


def features_of(bundle: Path) -> np.ndarray:
    return np.asarray(ort.InferenceSession(str(bundle / VISION_GRAPH_NAME)).run(None, {"pixel_values": PIXELS})[0])


NATIVE = [family for family in FAMILIES if family == "lfm2_vl" or family.startswith("qwen")]


@pytest.mark.parametrize("family", NATIVE)
@pytest.mark.parametrize("size", [(40, 64), (24, 24), (8, 96)], ids=str)
def test_features_of_native_resolution_are_those_of_the_definition(
    tmp_path: Path, family: str, size: tuple[int, int]
) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint", family)
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    processor = processor_of(open_bundle(bundle))
    tile = np.random.default_rng(3).integers(0, 256, (*size, 3), np.uint8)
    found = ort.InferenceSession(str(bundle / VISION_GRAPH_NAME)).run(None, processor.inputs(tile))[0]
    weights, pixels = load_file(source / "model.safetensors"), processor.pixel_values(tile)[0]
    reference = reference_features if family == "lfm2_vl" else reference_native_features
    expected = reference(family, vision_config(family), weights, pixels)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - NATIVE))
def test_features_are_those_of_the_definition(tmp_path: Path, family: str) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint", family)
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    weights, config = load_file(source / "model.safetensors"), vision_config(family)
    expected = np.concatenate([reference_features(family, config, weights, each) for each in PIXELS])
    np.testing.assert_allclose(features_of(bundle)[0], expected, atol=2e-5 * np.abs(expected).max())


def test_int8_weights_are_smaller_and_close(tmp_path: Path) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint")
    exact = export_checkpoint(source, tmp_path / "exact", ExportRecipe(FP32)).bundle
    rounded = export_checkpoint(source, tmp_path / "rounded", ExportRecipe(FP32, vision_weights="int8")).bundle
    expected, found = features_of(exact), features_of(rounded)
    assert (rounded / VISION_WEIGHTS_NAME).stat().st_size < 0.6 * (exact / VISION_WEIGHTS_NAME).stat().st_size
    assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
    assert open_bundle(exact).fingerprint != open_bundle(rounded).fingerprint


def test_float16_weights_are_half_as_large_and_closer(tmp_path: Path) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint")
    made = {
        name: export_checkpoint(source, tmp_path / name, ExportRecipe(FP32, vision_weights=name)).bundle
        for name in ("fp32", "fp16", "int8")
    }
    sizes = {name: (bundle / VISION_WEIGHTS_NAME).stat().st_size for name, bundle in made.items()}
    assert sizes["fp16"] < 0.6 * sizes["fp32"]
    features = {name: features_of(bundle) for name, bundle in made.items()}
    errors = [np.linalg.norm(features[name] - features["fp32"]) for name in ("fp16", "int8")]
    assert 0 < errors[0] < 0.1 * errors[1]


def test_weights_too_large_for_float16_are_its_largest(tmp_path: Path) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint")
    weights = load_file(source / "model.safetensors")
    weights["model.vision_model.encoder.layers.0.mlp.fc1.weight"][0, 0] = 1e6
    save_file(weights, source / "model.safetensors")
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32, vision_weights="fp16")).bundle
    assert np.isfinite(features_of(bundle)).all()


def test_the_tower_can_be_left_out(tmp_path: Path) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint")
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32, vision_weights="none")).bundle
    assert not (bundle / VISION_GRAPH_NAME).exists()


def test_checkpoints_of_the_language_model_alone_export_without_a_tower(tmp_path: Path) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint")
    weights = load_file(source / "model.safetensors")
    save_file({name: each for name, each in weights.items() if ".text_model." in name}, source / "model.safetensors")
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    assert not (bundle / VISION_GRAPH_NAME).exists()


@pytest.mark.parametrize("setting", ["hidden_act", "num_position_embeddings"])
@pytest.mark.parametrize("value", [["gelu"], "many", -4], ids=str)
def test_settings_of_another_type_are_refused(tmp_path: Path, setting: str, value: object) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint")
    config = json.loads((source / "config.json").read_bytes())
    write_json(source / "config.json", {**config, "vision_config": {**config["vision_config"], setting: value}})
    with pytest.raises(CheckpointError, match=setting):
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.vision_model.post_layernorm.bias", "lacks the tensor"),
        ("model.vision_model.encoder.layers.1.mlp.fc1.weight", "config.json implies"),
    ],
)
def test_damaged_towers_are_refused(tmp_path: Path, name: str, message: str) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint")
    weights = load_file(source / "model.safetensors")
    tensor = weights.pop(name)
    if tensor.ndim == 2:
        weights[name] = np.ascontiguousarray(tensor[1:])
    save_file(weights, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32))
    assert not (tmp_path / "bundle").exists()


def test_lfm2_vl_without_a_norm_in_its_projector(tmp_path: Path) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint", "lfm2_vl")
    weights = load_file(source / "model.safetensors")
    save_file(
        {name: each for name, each in weights.items() if ".layer_norm." not in name}, source / "model.safetensors"
    )
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    operators = [node.op_type for node in onnx.load(bundle / VISION_GRAPH_NAME, load_external_data=False).graph.node]
    assert (
        operators.count("LayerNormalization") == 2 * vision_config("lfm2_vl")["vision_config"]["num_hidden_layers"] + 1
    )


def test_the_first_checkpoints_of_qwen2_5_vl_do_not_nest_their_settings(tmp_path: Path) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint", "qwen2_5_vl")
    nested = export_checkpoint(source, tmp_path / "nested", ExportRecipe(FP32)).bundle
    config = vision_config("qwen2_5_vl")
    text = config.pop("text_config")
    write_json(source / "config.json", {**text, **config})
    flat = export_checkpoint(source, tmp_path / "flat", ExportRecipe(FP32)).bundle
    for name in (GRAPH_NAME, VISION_GRAPH_NAME, VISION_WEIGHTS_NAME):
        assert (flat / name).read_bytes() == (nested / name).read_bytes()
    axes = processor_of(open_bundle(flat)).axes
    assert axes is not None
    assert axes.tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
