"""The GenAI layout: what ONNX Runtime GenAI is given; it decodes our text from it, and that edge-run does too."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import onnx
import pytest

import edgerun
from drafters import NEARLY_FREE, FixedCost
from edgerun import ExportError, Speculation
from edgerun.edge.cli import main
from edgerun.export import FP32, INT4, ExportRecipe, WeightFormat, export_checkpoint
from edgerun.export.config import read_config
from edgerun.export.genai_layout import write_genai_layout
from edgerun.models.bundle import open_bundle
from edgerun.models.manifest import GraphLayout
from foreign import SCRIPT, Exporter, run_in
from tiny import write_bundle, write_checkpoint, write_json

TOKENS = 60
PROMPT = "the cat and the other"
FAMILIES = {
    "llama": {},
    "llama, narrow heads": {"head_dim": 8},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {},
    "gemma2": {"sliding_window": 6},
    "phi3": {},
}
"""Settings by case; heads of 8 channels are rotated in front of the attention, which takes positions."""
CASES = [(case, form) for case in FAMILIES for form in (FP32, INT4)]


def both_layouts(folder: Path, case: str, form: WeightFormat) -> tuple[Path, Path]:
    """The same model in edge-run's layout and in GenAI's."""
    family, settings = case.partition(",")[0], FAMILIES[case]
    edge = write_bundle(folder / "edge", family, weights=form, **settings)
    genai = export_checkpoint(
        folder / "edge" / "checkpoint", folder / "genai", ExportRecipe(form, layout=GraphLayout.GENAI)
    ).bundle
    return edge, genai


def greedy(bundle: Path, speculation: Speculation = Speculation.OFF) -> tuple[list[int], list[int]]:
    """The prompt's tokens and those edge-run continues them with."""
    with edgerun.load(bundle, threads=1, cache=False) as llm:
        llm._workshop._cost = FixedCost(NEARLY_FREE)
        prompt, text = llm.tokenizer.encode(PROMPT, add_special_tokens=True), llm.new_text()
        options = edgerun.GenerateOptions(max_tokens=TOKENS, temperature=0, speculation=speculation)
        stats = edgerun.Reply.of(llm.run(text, prompt, options)).stats
        assert (stats.drafted > 0) == (speculation is not Speculation.OFF)
    return prompt, text.tokens[len(prompt) :]


@pytest.mark.parametrize(("case", "form"), CASES, ids=str)
def test_text_is_the_same_in_every_layout_and_runtime(tmp_path: Path, case: str, form: WeightFormat) -> None:
    edge, genai = both_layouts(tmp_path, case, form)
    prompt, expected = greedy(edge)
    assert len(expected) > 10
    assert greedy(genai) == (prompt, expected)
    assert greedy(genai, Speculation.AUTO) == (prompt, expected)
    # GenAI keeps the token that ends a text, if it got there.
    ids = [str(number) for number in (len(expected), *prompt)]
    assert json.loads(run_in(Exporter.GENAI, str(SCRIPT), "decode", str(genai), *ids)) == expected


@pytest.mark.parametrize("case", ["llama", "llama, narrow heads"])
def test_the_graph_takes_what_genai_gives(tmp_path: Path, case: str) -> None:
    _, bundle = both_layouts(tmp_path, case, INT4)
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    caches = [f"{{}}.{layer}.{part}" for layer in range(2) for part in ("key", "value")]
    positions = ["position_ids"] if "narrow" in case else []
    past = [name.format("past_key_values") for name in caches]
    assert [port.name for port in graph.input] == ["input_ids", "attention_mask", *positions, *past]
    assert [port.name for port in graph.output] == ["logits", *(name.format("present") for name in caches)]
    shapes = [[size.dim_param or size.dim_value for size in port.type.tensor_type.shape.dim] for port in graph.output]
    heads = 8 if "narrow" in case else 16
    assert shapes[:2] == [["batch_size", "sequence_length", 300], ["batch_size", 2, "total_sequence_length", heads]]
    used = {name for node in graph.node for name in node.input}
    assert {port.name for port in [*graph.input, *graph.initializer]} <= used
    inputs = json.loads((bundle / "genai_config.json").read_text())["model"]["decoder"]["inputs"]
    assert set(inputs) == {"input_ids", "attention_mask", *positions, "past_key_names", "past_value_names"}


def test_what_genai_is_told(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", "qwen2", bos_token_id=3)
    settings = {"eos_token_id": [0, 2], "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": None}
    write_json(source / "generation_config.json", settings)
    recipe = ExportRecipe(INT4, context=200, layout=GraphLayout.GENAI)
    report = export_checkpoint(source, tmp_path / "bundle", recipe)
    config = json.loads((report.bundle / "genai_config.json").read_text())
    model, search = config["model"], config["search"]
    assert [model[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [3, [0, 2], 0]
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
    assert manifest is not None
    assert manifest.layout is GraphLayout.GENAI
    assert "genai_config.json" in manifest.files
    assert set(report.file_bytes) == {*manifest.files, "edge.json"}


def test_without_ids_nothing_is_made_up(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", eos_token_id=None, pad_token_id=None, bos_token_id=None)
    write_json(source / "generation_config.json", {})
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(INT4, layout=GraphLayout.GENAI)).bundle
    model = json.loads((bundle / "genai_config.json").read_text())["model"]
    assert not [name for name in model if name.endswith("_token_id")]


def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, weights=FP32)
    config = read_config(bundle)
    narrowed = tuple(dataclasses.replace(layer, window=3) for layer in config.attention)
    with pytest.raises(ExportError, match=r"the graph for GenAI differs by .* from the one it was made of"):
        write_genai_layout(bundle, dataclasses.replace(config, attention=narrowed), 256)


def test_the_command_writes_it_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "checkpoint")
    for _ in range(2):  # the second one replaces the first
        assert main(["export", str(source), str(tmp_path / "out"), "--layout", "genai"]) == 0
    manifest = open_bundle(tmp_path / "out").manifest
    assert manifest is not None
    assert manifest.command == "edge-run export checkpoint out --weights int4 --block 32 --layout genai"
    capsys.readouterr()
    assert main([str(tmp_path / "out"), "-p", "the other", "-n", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] == 5
