"""Models whose layers differ (Gemma 4) from the outside: shared caches, rewinds, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.errors import CheckpointError, EdgeError, InputError
from edgerun.export import FP32, INT4, ExportRecipe, export_checkpoint
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import GraphLayout
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from support.tiny_models import tiny_config, write_bundle, write_checkpoint, write_json

FAMILY = "gemma4_text"
PROMPT = "the and of the and of to in the and of the and of to in the and of"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("gemma4"), FAMILY, weights=INT4, max_position_embeddings=512)


def test_layers_that_share_a_cache_have_none_of_their_own(bundle: Path) -> None:
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    attentions = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    assert [len(node.output) for node in attentions] == [3, 3, 3, 1, 1]
    # Layers 3 and 4 have full attention, whose last layer with keys of its own is layer 1.
    assert [node.input[3] for node in attentions[3:]] == ["present.1.key", "present.1.key"]
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in graph.input
        if value.name.endswith(".key")
    }
    assert shapes == {
        "past_key_values.0.key": [1, 2, 0, 16],
        "past_key_values.1.key": [1, 2, 0, 32],
        "past_key_values.2.key": [1, 2, 0, 16],
    }


def test_random_rewinds_leave_the_logits_of_one_pass(tmp_path: Path) -> None:
    graph = GraphSession(write_bundle(tmp_path, FAMILY) / "model.onnx", SessionConfig(choose_device("cpu"), 1))
    random = np.random.default_rng(3)
    tokens = random.integers(0, 300, 60).tolist()
    bound, once = graph.bind(graph.arena(128)), graph.bind(graph.arena(128))
    expected = once.forward(tokens).copy()
    for _ in range(500):
        arena = bound.arena
        arena.rewind_to(int(random.integers(0, min(arena.length, 59) + 1)))
        start = arena.length
        part = tokens[start : start + int(random.integers(1, 9))]
        logits = bound.forward(part)
        arena.commit(len(part))
        np.testing.assert_allclose(logits, expected[start : start + len(part)], atol=2e-4)


def test_the_command_line_exports_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", FAMILY)
    assert main(["export", str(source), str(tmp_path / "bundle"), "--weights", "int4"]) == 0
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert manifest is not None
    assert manifest.weights["per_layer_embedding"] == INT4
    capsys.readouterr()
    assert main(["run", str(tmp_path / "bundle"), "--prompt", PROMPT, "--raw", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()


def test_an_int8_cache_is_refused_in_one_line(bundle: Path) -> None:
    with pytest.raises(EdgeError, match="layers that read the cache of another layer") as error:
        edgerun.load(bundle, device="cpu", kv="int8").close()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (ExportRecipe(INT4, calibration=Path("self")), "calibration"),
        (ExportRecipe(INT4, draft_layers="auto"), "--draft"),
        (ExportRecipe(INT4, report=True), "--report"),
        (ExportRecipe(INT4, layout=GraphLayout.GENAI), "--layout genai"),
    ],
    ids=["calibration", "draft", "report", "genai"],
)
def test_exports_that_it_cannot_have_are_refused(tmp_path: Path, recipe: ExportRecipe, message: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", FAMILY)
    with pytest.raises(InputError, match=f"{message}.*gemma4_text models, which have layers that differ"):
        export_checkpoint(source, tmp_path / "bundle", recipe)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is not supported; the graph cannot have experts beside"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers 4 leaves layer 1 without a layer of its kind"),
        ({"vocab_size_per_layer_input": 200}, "vocab_size_per_layer_input 200 differs from vocab_size 300"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, r"per_layer_config of layer 1 is .*sliding_window"),
        ({"per_layer_config": [1]}, r"per_layer_config of layer 0 is \[1\]"),
        ({"global_head_dim": 12}, "head_dim 12 is not a multiple of 8"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"hidden_size_per_layer_input": 24}, r"embed_tokens_per_layer.weight has shape \[300, 80\]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_graph_cannot_have_is_named(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", FAMILY)
    write_json(source / "config.json", {**tiny_config(FAMILY), **settings})
    with pytest.raises(CheckpointError, match=message) as error:
        export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32))
    assert "\n" not in str(error.value)
