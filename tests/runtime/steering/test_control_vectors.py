"""Control vectors: what is added where, and files of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("support.tiny_models", reason="needs the export extra")

from safetensors.numpy import load_file, save_file

import edgerun
from edgerun import InputError
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.graph_io import Floats
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.steering.steered_model import control, state, steered_model
from support.adapters import write_adapter, write_control_vector
from support.tiny_models import FAMILY_SETTINGS, exported, write_bundle, write_checkpoint

PROMPT = "the sea and the sand"
OPTIONS: dict[str, Any] = {"raw": True, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
HIDDEN = 64


def direction(seed: int, size: float = 1.0) -> Floats:
    return (size * np.random.default_rng(seed).standard_normal(HIDDEN)).astype(np.float32)


@pytest.mark.parametrize("family", sorted(FAMILY_SETTINGS))
def test_a_vector_is_added_to_the_residual_stream_after_its_layer(family: str, tmp_path: Path) -> None:
    bundle = open_bundle(write_bundle(tmp_path, family))
    model = steered_model(bundle.graph, states=True)
    config = SessionConfig(cpu_device(), 1)
    session = GraphSession(bundle.graph, config, metadata_of(bundle), model=model.serialized)
    assert bundle.manifest is not None
    layers = range(bundle.manifest.architecture.layers)

    def states(inputs: dict[str, npt.NDArray[np.float32]]) -> list[Floats]:
        bound = session.bind(session.arena(32))
        found = [np.zeros((1, 1, HIDDEN), np.float32) for _ in layers]
        for layer in layers:
            bound.observe(state(layer), found[layer])
        bound.supply({**model.defaults, **inputs})
        bound.forward(np.arange(5, 25), logits_for=[19])
        return found

    before, vector = states({}), direction(1)
    for layer in layers:
        after = states({control(layer): vector})
        for each in range(layer):
            np.testing.assert_array_equal(after[each], before[each])
        np.testing.assert_allclose(after[layer], before[layer] + vector, atol=1e-5)
        for each in layers[layer + 1 :]:
            assert np.abs(after[each] - before[each]).max() > 1e-3


def test_a_vector_gives_the_text_of_a_bias(tmp_path: Path) -> None:
    """The bias of the last linear of a layer is a vector added to the residual stream after it."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "llama", mlp_bias=True, num_hidden_layers=3)
    adapter = write_adapter(tmp_path / "adapter", checkpoint)
    bundle = exported(checkpoint, tmp_path / "bundle")
    vectors = {1: direction(1), 2: direction(2)}
    file = write_control_vector(tmp_path / "v.gguf", vectors)
    tensors = load_file(checkpoint / "model.safetensors")
    for strength in (1.0, -0.5):
        changed = dict(tensors)
        for layer, vector in vectors.items():
            changed[f"model.layers.{layer}.mlp.down_proj.bias"] = (
                tensors[f"model.layers.{layer}.mlp.down_proj.bias"] + np.float32(strength) * vector
            )
        save_file(changed, checkpoint / "model.safetensors")
        other = exported(checkpoint, tmp_path / f"other{strength}")
        with edgerun.load(other, threads=1, lora=[f"a={adapter}"]) as engine:
            expected = [engine.generate(PROMPT, **OPTIONS, adapter=name).text for name in (None, "a")]
        with edgerun.load(bundle, threads=1, lora=[f"a={adapter}"], control_vectors=[f"v={file}"]) as engine:
            plain = engine.generate(PROMPT, **OPTIONS).text
            steered = {**OPTIONS, "control": "v", "control_strength": strength}
            assert [engine.generate(PROMPT, **steered, adapter=name).text for name in (None, "a")] == expected
            assert engine.generate(PROMPT, **{**steered, "control_strength": 0.0}).text == plain != expected[0]


def test_caches_of_different_strengths_are_apart(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path)
    file = write_control_vector(tmp_path / "v.gguf", {1: direction(1)})
    with edgerun.load(bundle, threads=1, control_vectors=[f"v={file}"]) as engine:
        reused = []
        for length, strength in enumerate((1.0, 2.0, 1.0), 3):
            reply = engine.generate(PROMPT * length, **OPTIONS, control="v", control_strength=strength)
            reused.append(reply.stats.reused_tokens > 8)
    assert reused == [False, False, True]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({2: direction(1)}, "has direction.2 of the shape"),
        ({1: direction(1)[:32]}, "has direction.1 of the shape [32] and type 0"),
        ({1: direction(1).astype(np.float16)}, "has direction.1 of the shape [64] and type 1"),
        ({1: np.full(HIDDEN, np.nan, np.float32)}, "direction.1 holds NaN"),
    ],
)
def test_a_vector_of_another_model_is_refused(
    tiny_bundle: Path, tmp_path: Path, tensors: dict[int, Any], message: str
) -> None:
    file = write_control_vector(tmp_path / "v.gguf", tensors)
    with pytest.raises(InputError) as caught:
        edgerun.load(tiny_bundle, control_vectors=[f"v={file}"])
    assert message in caught.value.what


def test_other_files_and_strengths_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(b"x")
    with pytest.raises(InputError, match="is truncated or not a GGUF file"):
        edgerun.load(tiny_bundle, control_vectors=[f"v={tmp_path / 'v.gguf'}"])
    with pytest.raises(InputError, match="control_strength is nan; it must be a finite number"):
        edgerun.GenerateOptions(control_strength=float("nan"))
    assert gguf.GGUFReader(write_control_vector(tmp_path / "w.gguf", {1: direction(1)})).tensors
