"""The GenAI layout: its files, and that ONNX Runtime GenAI and edge-run decode the same text from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import onnx
import pytest

import edgerun
from edgerun import ExportError, Speculation
from edgerun.edge.cli.main import main
from edgerun.export import FP32, INT4, ExportRecipe, WeightFormat, export_checkpoint
from edgerun.export.checkpoint.config import read_config
from edgerun.export.graph.genai_layout import write_genai_layout
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import GraphLayout
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.foreign_exporters import SCRIPT, Exporter, run_in
from support.nightly import some_nightly
from support.tiny_models import exported, write_bundle, write_checkpoint, write_json

TOKENS = 60
PROMPT = "the cat and the other"
FAMILIES = {
    "llama": {},
    "llama, narrow heads": {"head_dim": 8},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {},
    "gemma2": {"sliding_window": 6},
    "phi3": {},
    "smollm3": {},
    "olmo2": {},
}
"""Settings by case; heads of 8 channels are rotated outside of attention, and GenAI has no type for olmo2."""
ZERO_POINTS = WeightFormat(4, 32, zero_points=True)
CASES = [*((case, weight_format) for case in FAMILIES for weight_format in (FP32, INT4)), ("llama", ZERO_POINTS)]


@pytest.fixture(scope="module", params=some_nightly(CASES, every=2), ids=lambda case: f"{case[0]}-{case[1]}")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Bundles of one model in edge-run's layout and in GenAI's."""
    case, weight_format = request.param
    folder = tmp_path_factory.mktemp("both")
    edge = write_bundle(folder / "edge", case.partition(",")[0], weights=weight_format, **FAMILIES[case])
    recipe = ExportRecipe(weight_format, layout=GraphLayout.GENAI)
    return edge, exported(folder / "edge" / "checkpoint", folder / "genai", recipe)


def greedy(bundle: Path, speculation: Speculation = Speculation.OFF) -> tuple[list[int], list[int]]:
    """Token ids of the prompt, and those that edge-run generates."""
    with edgerun.load(bundle, threads=1, cache=False) as llm:
        llm.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        prompt, text = llm.tokenizer.encode(PROMPT, add_special_tokens=True), llm.model.new_sequence()
        options = edgerun.GenerateOptions(max_tokens=TOKENS, temperature=0, speculation=speculation)
        stats = edgerun.Reply.of(llm.model.answer(text, prompt, options)).stats
        assert (stats.drafted > 0) == (speculation is not Speculation.OFF)
    return prompt, text.token_ids[len(prompt) :]


def test_edge_run_decodes_the_same_text_from_both_layouts(both: tuple[Path, Path]) -> None:
    prompt, expected = greedy(both[0])
    assert len(expected) > 10
    assert greedy(both[1]) == (prompt, expected)
    assert greedy(both[1], Speculation.AUTO) == (prompt, expected)


def test_genai_decodes_the_same_text(both: tuple[Path, Path]) -> None:
    prompt, expected = greedy(both[0])
    ids = [str(number) for number in (len(expected), *prompt)]
    assert json.loads(run_in(Exporter.GENAI, str(SCRIPT), "decode", str(both[1]), *ids)) == expected


@pytest.mark.parametrize("settings", [{}, {"head_dim": 8}], ids=str)
def test_inputs_and_outputs_of_the_graph(tmp_path: Path, settings: dict[str, int]) -> None:
    recipe = ExportRecipe(INT4, layout=GraphLayout.GENAI)
    bundle = write_bundle(tmp_path, weights=recipe, **settings)
    size = settings.get("head_dim", 16)
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    caches = [f"{{}}.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    positions = ["position_ids"] if size % 16 else []
    past = [name.format("past_key_values") for name in caches]
    assert [value.name for value in graph.input] == ["input_ids", "attention_mask", *positions, *past]
    assert [value.name for value in graph.output] == ["logits", *(name.format("present") for name in caches)]
    shapes = [[size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim] for value in graph.output]
    assert shapes[:2] == [["batch_size", "sequence_length", 300], ["batch_size", 2, "total_sequence_length", size]]
    used = {name for node in graph.node for name in node.input}
    assert {value.name for value in [*graph.input, *graph.initializer]} <= used
    inputs = json.loads((bundle / "genai_config.json").read_text(encoding="utf-8"))["model"]["decoder"]["inputs"]
    assert set(inputs) == {"input_ids", "attention_mask", *positions, "past_key_names", "past_value_names"}
    with edgerun.load(bundle, cache=False) as llm:
        assert llm.graph_io.supports_verification
        assert not llm.graph_io.supports_trees


def test_genai_config(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen2", bos_token_id=3)
    settings = {"eos_token_id": [2, 1], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": None}
    write_json(source / "generation_config.json", settings)
    recipe = ExportRecipe(INT4, context=200, layout=GraphLayout.GENAI)
    report = export_checkpoint(source, tmp_path / "bundle", recipe)
    config = json.loads((report.bundle / "genai_config.json").read_text(encoding="utf-8"))
    model, search = config["model"], config["search"]
    # 0 is the end token of the tokenizer.
    assert [model[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [3, [2, 1, 0], 0]
    assert (model["type"], model["vocab_size"], model["context_length"]) == ("qwen2", 300, 200)
    decoder = model["decoder"]
    sizes = ("head_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    assert [decoder[name] for name in sizes] == [16, 64, 4, 2, 2]
    assert search == {
        "do_sample": True,
        "max_length": 200,
        "past_present_share_buffer": True,
        "temperature": 0.7,
        "top_k": 20,
    }
    manifest = open_bundle(report.bundle).manifest
    assert manifest.layout is GraphLayout.GENAI
    assert "genai_config.json" in manifest.files
    assert set(report.file_bytes) == {*manifest.files, "edge.json"}


def test_unknown_special_tokens_are_omitted(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", eos_token_id=None, pad_token_id=None, bos_token_id=None)
    for name in ("generation_config.json", "tokenizer_config.json"):
        write_json(source / name, {})
    bundle = exported(source, tmp_path / "bundle", ExportRecipe(INT4, layout=GraphLayout.GENAI))
    model = json.loads((bundle / "genai_config.json").read_text(encoding="utf-8"))["model"]
    assert not [name for name in model if name.endswith("_token_id")]


def test_a_graph_with_other_logits_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, weights=FP32)
    config = read_config(bundle)
    narrowed = tuple(dataclasses.replace(layer, window=3) for layer in config.attention)
    with pytest.raises(ExportError, match=r"the graph for GenAI differs from the one it was made of by"):
        write_genai_layout(bundle, dataclasses.replace(config, attention=narrowed), 256)


def test_the_command_writes_the_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    for _ in range(2):  # the second one replaces the first
        assert main(["export", str(source), str(tmp_path / "out"), "--layout", "genai"]) == 0
    manifest = open_bundle(tmp_path / "out").manifest
    assert manifest.command == "edge-run export checkpoint out --weights int4 --block 32 --layout genai"
    capsys.readouterr()
    assert main([str(tmp_path / "out"), "-p", "the other", "-n", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] == 5


def test_the_check_ignores_rounded_activations(tmp_path: Path) -> None:
    """The check compares graphs in float, since passes of different widths round 8-bit activations differently."""
    recipe = ExportRecipe(INT4, layout=GraphLayout.GENAI)
    bundle = write_bundle(tmp_path, weights=recipe, hidden_size=128, num_hidden_layers=4)
    nodes = onnx.load(bundle / "model.onnx", load_external_data=False).graph.node
    levels = [each.i for node in nodes for each in node.attribute if each.name == "accuracy_level"]
    assert set(levels) == {4}
