"""Control vectors: what is added where, and files of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("support.tiny_models", reason="needs the export extra")

from safetensors.numpy import load_file, save_file

import edgerun
from edgerun import InputError
from edgerun.export import FP32, ExportRecipe
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.graph.graph_io import Floats
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.steering.steered_model import SteeredModel, control, state
from support.adapters import write_adapter, write_control_vector
from support.commands import Capture, fails, output_of
from support.tiny_models import FAMILY_SETTINGS, exported, write_bundle, write_checkpoint

PROMPT = "the sea and the sand"
OPTIONS: dict[str, Any] = {"raw": True, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
HIDDEN = 64


def direction(seed: int, size: float = 1.0) -> Floats:
    return (size * np.random.default_rng(seed).standard_normal(HIDDEN)).astype(np.float32)


def states_of(path: Path, tokens: list[int], inputs: dict[str, Floats]) -> list[Floats]:
    """The hidden states of a model after each layer at the last token."""
    bundle = open_bundle(path)
    model = SteeredModel(bundle, bundle.graph)
    serialized = model.serialized((), vectors=True, states=True)
    session = GraphSession(bundle.graph, SessionConfig(cpu_device(), 1), metadata_of(bundle), model=serialized)
    bound = session.bind(session.arena(64))
    found = [np.zeros((1, 1, HIDDEN), np.float32) for _ in range(model.size.layers)]
    for layer, array in enumerate(found):
        bound.observe(state(layer), array)
    bound.supply({**model.defaults, **inputs})
    bound.forward(tokens, logits_for=[len(tokens) - 1])
    return [array[0, 0] for array in found]


@pytest.mark.parametrize("family", sorted(FAMILY_SETTINGS))
def test_a_vector_is_added_to_the_residual_stream_after_its_layer(family: str, tmp_path: Path) -> None:
    bundle, tokens, vector = write_bundle(tmp_path, family), list(range(5, 25)), direction(1)
    before = states_of(bundle, tokens, {})
    for layer in range(len(before)):
        after = states_of(bundle, tokens, {control(layer): vector})
        for each in range(layer):
            np.testing.assert_array_equal(after[each], before[each])
        np.testing.assert_allclose(after[layer], before[layer] + vector, atol=1e-5)
        for each in range(layer + 1, len(before)):
            assert np.abs(after[each] - before[each]).max() > 1e-3


def test_the_states_of_layers_are_those_of_models_that_end_there(tmp_path: Path) -> None:
    """Weights are drawn layer by layer, so a model of fewer layers has the same ones."""
    tokens = list(range(5, 25))
    states = states_of(write_bundle(tmp_path / "whole", num_hidden_layers=3), tokens, {})
    recipe = ExportRecipe(FP32, hidden_states=True)
    for layers in (1, 2):
        bundle = write_bundle(tmp_path / str(layers), num_hidden_layers=layers, weights=recipe)
        weight = load_file(bundle.parent / "checkpoint" / "model.safetensors")["model.norm.weight"]
        with edgerun.load(bundle, threads=1) as engine:
            hidden = engine.model.new_sequence(hidden_states=True).bound.hidden_states(tokens, [len(tokens) - 1])[0]
        found = states[layers - 1]
        np.testing.assert_allclose(found / np.sqrt(np.mean(found**2) + 1e-5) * weight, hidden, atol=1e-4)


def test_the_command_writes_mean_differences(tmp_path: Path, capsys: Capture) -> None:
    bundle, out = write_bundle(tmp_path, num_hidden_layers=3), tmp_path / "v.gguf"
    prompts = {"positive": ["the sea", "and sand"], "negative": ["of the", "in"]}
    for name, lines in prompts.items():
        (tmp_path / name).write_text("\n".join(lines), encoding="utf-8")
    made = ("control-vector", bundle, tmp_path / "positive", tmp_path / "negative", out, "--threads", "1")
    with edgerun.load(bundle, threads=1) as engine:
        for options in ((), ("--raw",)):
            assert "2 layers, from 2 pairs of prompts" in output_of(capsys, *made, *options)
            expected = np.zeros((3, HIDDEN))
            for name, sign in (("positive", 0.5), ("negative", -0.5)):
                for text in prompts[name]:
                    ids = engine.tokenizer.encode(text, add_special_tokens=True)
                    if not options:
                        ids = engine.encode_chat([{"role": "user", "content": text}])
                    expected += sign * np.array(states_of(bundle, ids, {}))
            found = {each.name: each.data for each in gguf.GGUFReader(out).tensors}
            assert sorted(found) == ["direction.1", "direction.2"]
            for layer in (1, 2):
                np.testing.assert_allclose(found[f"direction.{layer}"], expected[layer], atol=1e-4)
    steered = ("--control-vector", f"v={out}", "--control", "v", "--control-strength", "9")
    asked = (bundle, "-p", "the sea", "-n", "12", "-t", "0", "--threads", "1")
    assert output_of(capsys, *asked, *steered) != output_of(capsys, *asked)
    (tmp_path / "negative").write_text("one", encoding="utf-8")
    assert "has 2 prompts, and" in fails(capsys, *made)


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
        ({}, "has no tensors"),
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
    for strength in (float("nan"), 1e300, -1e300):
        with pytest.raises(InputError, match="control_strength is .*; it must be between -1000 and 1000"):
            edgerun.GenerateOptions(control_strength=strength)
    assert gguf.GGUFReader(write_control_vector(tmp_path / "w.gguf", {1: direction(1)})).tensors
