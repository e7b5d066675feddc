"""EAGLE-3 heads in exports: parity with torch, published variants, and what does not fit is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from safetensors.numpy import load_file

import edgerun
from edgerun import BundleError, EdgeError, ExportError
from edgerun.edge.cli.main import main
from edgerun.export import FP32, INT4, INT8, ExportRecipe, WeightFormat
from edgerun.export.checkpoint.config import read_config
from edgerun.export.drafts import draft_head
from edgerun.export.drafts.feature_heads import open_eagle_head
from edgerun.export.graph.inputs_outputs import feature_layers
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import MANIFEST_NAME, HeadKind
from edgerun.models.pairing import find_draft
from support.tiny_heads import eagle_config, eagle_weights, write_eagle_head, write_medusa_heads
from support.tiny_models import exported, tiny_config, write_checkpoint, write_json, write_weights

TARGET = {"num_hidden_layers": 6}
TOKENS = np.array([20, 31, 22, 47, 105, 60, 7])
GIVEN = 4
"""Number of these tokens with features of the target."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("target"), **TARGET)


def export(checkpoint: Path, head: Path, bundle: Path, weight_format: WeightFormat = FP32) -> Path:
    return exported(checkpoint, bundle, ExportRecipe(weight_format, draft=head))


def features_of(head: Path) -> npt.NDArray[np.float32]:
    """Random features of the first tokens."""
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    size = 3 * config.get("target_hidden_size", config["hidden_size"])
    return np.random.default_rng(5).standard_normal((GIVEN, size)).astype(np.float32)


def run_graph(bundle: Path, checkpoint: Path, head: Path) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Logits and states of the exported head: one pass with features, then one for each further token."""
    config = open_eagle_head(head, read_config(checkpoint)).config
    graph = onnx.load(bundle / "draft.onnx", load_external_data=False)
    passes = draft_head.head_passes(bundle, graph, TOKENS, features_of(head), config.hidden_size)
    logits, states, _ = zip(*passes, strict=True)
    return np.concatenate(logits), np.concatenate(states)


def run_torch(checkpoint: Path, head: Path) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The same in torch, written from the description of the format."""
    torch = pytest.importorskip("torch", reason="needs the extra oracle or train")
    functional = torch.nn.functional
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    weights = {name: torch.from_numpy(value) for name, value in load_file(head / "model.safetensors").items()}
    target = {name: torch.from_numpy(value) for name, value in load_file(checkpoint / "model.safetensors").items()}
    embedding = weights.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)

    def norm(value: Any, name: str) -> Any:
        scaled = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
        return scaled * weights[f"{name}.weight"]

    def rotated(value: Any) -> Any:
        frequencies = config["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.arange(len(value)).double()[:, None] * frequencies
        angles = torch.cat([angles, angles], dim=-1).float()[:, None]
        first, second = value.chunk(2, dim=-1)
        return value * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()

    def layer(embedded: Any, hidden: Any) -> Any:
        both = torch.cat([norm(embedded, "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")], dim=-1)
        query, key, value = (
            functional.linear(both, weights[f"midlayer.self_attn.{each}_proj.weight"]).view(len(both), -1, dim)
            for each in "qkv"
        )
        query, key = rotated(query), rotated(key)
        key, value = (each.repeat_interleave(heads // kv_heads, dim=1) for each in (key, value))
        mixed = functional.scaled_dot_product_attention(
            query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), is_causal=True
        )
        mixed = mixed.transpose(0, 1).reshape(len(both), -1)
        hidden = hidden + functional.linear(mixed, weights["midlayer.self_attn.o_proj.weight"])
        normed = norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (functional.linear(normed, weights[f"midlayer.mlp.{each}_proj.weight"]) for each in ("gate", "up"))
        return hidden + functional.linear(functional.silu(gate) * up, weights["midlayer.mlp.down_proj.weight"])

    with torch.no_grad():
        inputs = functional.linear(torch.from_numpy(features_of(head)), weights["fc.weight"])
        embedded = embedding[torch.from_numpy(TOKENS)]
        while len(inputs) < len(TOKENS):
            states = layer(embedded[: len(inputs)], inputs)
            inputs = torch.cat([inputs, states[-1:]])
        states = layer(embedded, inputs)
        logits = functional.linear(norm(states, "norm"), weights["lm_head.weight"])
    return logits.double().numpy(), states.double().numpy()


VARIANTS: dict[str, dict[str, Any]] = {
    "trimmed": {},
    "whole vocabulary": {"draft_vocab_size": 300},
    "one key head": {"num_key_value_heads": 1, "intermediate_size": 48},
    "wide heads": {"head_dim": 32, "rope_theta": 5e5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_equal_those_of_torch(checkpoint: Path, tmp_path: Path, variant: str) -> None:
    head = write_eagle_head(tmp_path / "head", tiny_config(**TARGET), seed=3, **VARIANTS[variant])
    bundle = export(checkpoint, head, tmp_path / "bundle")
    found, expected = run_graph(bundle, checkpoint, head), run_torch(checkpoint, head)
    np.testing.assert_allclose(found[0], expected[0], atol=2e-4)
    np.testing.assert_allclose(found[1], expected[1], atol=2e-4)


def rewritten(head: Path, rename: Callable[[str], str], **more: npt.NDArray[Any] | None) -> Path:
    """The head with tensors of other names, with more tensors, and without those that are None."""
    tensors = {**{rename(name): value for name, value in load_file(head / "model.safetensors").items()}, **more}
    write_weights(head, {name: value for name, value in tensors.items() if value is not None})
    return head


def test_a_head_may_have_an_embedding_and_layers_of_its_own_choice_and_name(checkpoint: Path, tmp_path: Path) -> None:
    settings = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}
    head = write_eagle_head(tmp_path / "head", tiny_config(**TARGET), **settings)
    own = np.random.default_rng(1).standard_normal((300, 64)).astype(np.float32)
    rewritten(head, lambda name: name, **{"embed_tokens.weight": own})
    opened = open_eagle_head(head, read_config(checkpoint))
    assert opened.embedding is not None
    assert opened.features.layers == (1, 3, 5)
    assert feature_layers(32) == (2, 16, 29)
    found = run_graph(export(checkpoint, head, tmp_path / "bundle"), checkpoint, head)
    np.testing.assert_allclose(found[0], run_torch(checkpoint, head)[0], atol=2e-4)
    rewritten(head, lambda name: name.replace("midlayer.", "layers.0."))
    renamed = run_graph(export(checkpoint, head, tmp_path / "renamed"), checkpoint, head)
    np.testing.assert_array_equal(found[0], renamed[0])


@pytest.mark.parametrize("weight_format", [INT4, INT8, WeightFormat(4, 64, half_scales=True)], ids=str)
def test_quantized_heads_pass_their_check(checkpoint: Path, tmp_path: Path, weight_format: WeightFormat) -> None:
    head = write_eagle_head(tmp_path / "head", tiny_config(**TARGET))
    bundle = open_bundle(export(checkpoint, head, tmp_path / "bundle", weight_format))
    pair = find_draft(bundle)
    assert (pair.head, pair.name) == (HeadKind.EAGLE, "eagle head")
    assert pair.target_ids is not None
    offsets = eagle_weights(eagle_config(tiny_config(**TARGET)))["d2t"]
    np.testing.assert_array_equal(pair.target_ids, np.arange(200) + offsets)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("reference_head", "the exported draft head differs from the reference by"),
        ("reference_medusa", "the exported Medusa heads differ from the reference"),
    ],
)
def test_a_graph_that_computes_something_else_fails_the_export(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    right, medusa = getattr(draft_head, reference), reference == "reference_medusa"

    def shifted(*args: Any) -> Any:
        found = right(*args)
        return found[:, ::-1] if medusa else (found[0], found[1] + 0.01)

    monkeypatch.setattr(draft_head, reference, shifted)
    folder = tmp_path / "head"
    head = write_medusa_heads(folder) if medusa else write_eagle_head(folder, tiny_config(**TARGET))
    with pytest.raises(ExportError, match=message):
        export(checkpoint, head, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"hidden_size": 32}, "made for a hidden size of 32, and the model has 64"),
    "vocabulary": ({"vocab_size": 280}, "made for a vocabulary of 280 tokens, and the model has 300"),
    "target's size": ({"target_hidden_size": 128}, "made for a hidden size of 128, and the model has 64"),
    "layers": ({"num_hidden_layers": 2}, "has 2 layers; only EAGLE-3 heads of one layer"),
    **{
        name: ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}, message)
        for name, layers, message in (
            ("layer list", [1, 2], "eagle_aux_hidden_state_layer_ids must be a list of three layers"),
            ("layer out of range", [1, 3, 5], "reads the inputs of layers 2, 4, 6, but the model has 6"),
        )
    },
    "variant": ({"norm_before_residual": True}, r"variant of EAGLE-3 that is not supported \(norm_before_residual\)"),
    "last state alone": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        r"not supported \(use_aux_hidden_state false\)",
    ),
    "architecture": ({"architectures": ["Eagle3Speculator"]}, "draft head of the architecture"),
    **{
        name: ({"tensors": {name: None}}, f"lacks the tensor {name}")
        for name in ("fc.weight", "midlayer.hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t")
    },
    "tokens twice": ({"tensors": {"d2t": -np.arange(200)}}, "d2t does not map 200 tokens to as many of 300"),
}


@pytest.mark.parametrize("case", [*REFUSED, "pickled"])
def test_heads_that_do_not_fit_are_refused_in_one_line(checkpoint: Path, tmp_path: Path, case: str) -> None:
    settings, message = REFUSED.get(case, ({}, "only contains pickled weights"))
    head = write_eagle_head(tmp_path / "head", tiny_config(**TARGET))
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    rewritten(head, lambda name: name, **settings.get("tensors", {}))
    write_json(head / "config.json", {**config, **settings} if "tensors" not in settings else config)
    if case == "pickled":
        (head / "model.safetensors").rename(head / "pytorch_model.bin")
    with pytest.raises(EdgeError, match=message) as raised:
        export(checkpoint, head, tmp_path / "bundle")
    assert "\n" not in str(raised.value)


def test_a_head_alone_or_of_another_model_is_refused_when_it_is_loaded(checkpoint: Path, tmp_path: Path) -> None:
    head = write_eagle_head(tmp_path / "head", tiny_config(**TARGET))
    bundle = export(checkpoint, head, tmp_path / "bundle")
    with pytest.raises(BundleError, match=r"it is a draft head; give the model it belongs to"):
        edgerun.load(bundle / "draft.onnx", cache=False)
    plain = exported(checkpoint, tmp_path / "plain")
    (bundle / "model.onnx").write_bytes((plain / "model.onnx").read_bytes())
    data = json.loads((bundle / MANIFEST_NAME).read_bytes())
    data["files"]["model.onnx"] = json.loads((plain / MANIFEST_NAME).read_bytes())["files"]["model.onnx"]
    write_json(bundle / MANIFEST_NAME, data)
    with edgerun.load(bundle, cache=False) as engine, pytest.raises(BundleError, match="192 features of each token"):
        engine.generate("the", raw=True)


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_from_the_command_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folder, bundle, other = tmp_path / "head", tmp_path / "bundle", "medusa" if kind == "eagle" else "eagle"
    head = write_medusa_heads(folder) if kind == "medusa" else write_eagle_head(folder, tiny_config(**TARGET))
    assert main(["export", str(checkpoint), str(bundle), "--draft", str(head), "--draft-weights", "int8"]) == 0
    capsys.readouterr()
    generate = [str(bundle), "-p", "the other", "--raw", "-n", "8", "--json", "--no-cache", "--spec"]
    assert main([*generate, kind]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] > 0
    assert main([*generate, other]) != 0
    assert f"the drafter {other} is not available" in capsys.readouterr().err
    assert main(["inspect", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"]["head"] == kind
    assert main(["export", str(checkpoint), str(bundle), "--draft", str(head), "--draft-vocab", "100"]) == 2
    assert "--draft-vocab has no effect on the draft head" in capsys.readouterr().err
