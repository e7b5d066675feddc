"""Upgrades of foreign ONNX models: same text as before, token trees, and errors that leave no files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import edgerun
from edgerun import GenerateOptions, Speculation
from edgerun.edge.cli.main import main
from edgerun.errors import BundleError, EdgeError, ExportError, InputError
from edgerun.export import FP32, INT4, INT8, ExportRecipe, upgrade_model
from edgerun.export.check.contract_session import ContractSession
from edgerun.export.upgrade.decoder_io import identify_io
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.export.upgrade.parity import require_same, run_reference
from edgerun.models.manifest import GraphLayout, Manifest, WeightFormat
from edgerun.models.onnx_file.graph_editor import GraphEditor
from edgerun.models.onnx_file.model_messages import attribute_values
from edgerun.runtime.graph.attention_edits import serve_plain_passes
from edgerun.runtime.result import Reply
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.layout_kinds import CONTEXT, VOCABULARY, CacheType, Decoders, Layout, LogitOutput, Weights
from support.layout_reference import clear_prompt, greedy_tokens
from support.layouts import COMMUNITY, GENAI, LAYOUTS, LIMITED, OPTIMUM, write_layout
from support.nightly import some_nightly
from support.tiny_models import write_bundle
from support.unsupported_graphs import UNSUPPORTED, write_unsupported

MAX_TOKENS = 48
MIN_MARGIN = 0.02
"""Margin between the two best logits that half precision does not change."""
DECODED = {
    "optimum": OPTIMUM,
    "float16": LAYOUTS["optimum-float16"],
    "merged": replace(OPTIMUM, decoders=Decoders.MERGED),
    "traced-at-one": LAYOUTS["optimum-merged-traced-at-one"],
    "stacked": LAYOUTS["stacked"],
    "genai": GENAI,
    "genai-window-cache": LAYOUTS["genai-window-cache"],
    "genai-fixed-capacity": LAYOUTS["genai-fixed-capacity"],
    "renamed-genai": LAYOUTS["renamed-genai"],
    "community-float16": replace(COMMUNITY, cache_type=CacheType.FLOAT16, float16_logits=True),
    "community-last-token": replace(COMMUNITY, logit_output=LogitOutput.LAST),
}
"""Layouts whose upgrades are compared by decoding; the others are checked by the upgrade itself."""
CHECKED = (
    *("optimum-opset-14", "optimum-open-heads", "optimum-no-positions", "optimum-no-mask", "optimum-int32"),
    *("optimum-three-positions", "optimum-last-token-flat", "optimum-last-n", "optimum-two-decoders"),
    *("stacked-genai", "joined", "keys-transposed", "optimum-two-traced-at-one"),
    *("optimum-bias-mask", "optimum-bias-mask-no-positions", "optimum-bool-mask"),
    *("optimum-external-many", "optimum-bare", "numbered", "renamed", "renamed-genai-positions"),
    *("genai-float16", "genai-positions", "genai-window", "genai-lengths", "genai-fixed-capacity-numbered"),
    *("community-last-n", "community-unfused", "window-cache-fixed"),
)
"""Layouts that are only upgraded, which includes the comparison with the source."""


def upgrade(folder: Path) -> Path:
    return upgrade_model(folder, folder.parent / "upgraded", ExportRecipe(FP32)).bundle


@pytest.mark.parametrize("name", some_nightly(DECODED, every=2))
def test_upgraded_model_decodes_the_same_tokens_with_and_without_trees(name: str, tmp_path: Path) -> None:
    layout = DECODED[name]
    prompt = clear_prompt(layout, 12, MAX_TOKENS, MIN_MARGIN)
    with edgerun.load(upgrade(write_layout(tmp_path / "m", layout)), threads=1, cache=False) as llm:
        assert llm.graph_io.supports_trees
        llm.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        for speculation in (Speculation.OFF, Speculation.AUTO):
            sequence = llm.model.new_sequence()
            options = GenerateOptions(max_tokens=MAX_TOKENS, temperature=0, speculation=speculation)
            reply = Reply.of(llm.model.answer(sequence, prompt, options))
            assert sequence.token_ids[len(prompt) :] == greedy_tokens(layout, prompt, MAX_TOKENS)
            assert (reply.stats.drafted > 0) == (speculation is not Speculation.OFF)


@pytest.mark.parametrize("name", some_nightly(CHECKED, every=2))
def test_other_layouts_are_upgraded(name: str, tmp_path: Path) -> None:
    layout = {**LAYOUTS, **LIMITED}[name]
    folder = upgrade(write_layout(tmp_path / "m", layout))
    manifest = Manifest.from_json((folder / "edge.json").read_bytes())
    architecture = manifest.architecture
    assert architecture.context == CONTEXT
    heads = (architecture.heads, architecture.kv_heads, architecture.head_dim)
    assert (architecture.layers, *heads) == (2, 4, layout.kv_heads, 16)
    assert (architecture.vocab_size, architecture.hidden_size) == (VOCABULARY, 64)
    assert set(manifest.weights) == {
        *("embedding", "head"),
        *(f"layers.{layer}.{part}" for layer in (0, 1) for part in ("qkv", "o", "gate_up", "down")),
    }


def test_window_counts_positions_in_a_tree(tmp_path: Path) -> None:
    """A child with twenty siblings before it sees as far back as it does in a chain."""
    folder = upgrade(write_layout(tmp_path / "m", LAYOUTS["genai-window"]))
    past, siblings = 60, 20
    session = ContractSession(folder, CONTEXT)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, past + siblings + 1)
    session.forward(tokens[:past], np.array([0]))
    chain = session.forward(np.array([tokens[past], tokens[-1]]), np.array([1]))
    session.length = past
    seen = np.eye(siblings + 1, dtype=np.bool_)
    seen[-1, 0] = True
    bias = np.where(np.hstack([np.ones((siblings + 1, past), np.bool_), seen]), np.float32(0), np.float32(-1e9))
    positions = np.array([past] * siblings + [past + 1])
    tree = session.run(tokens[past:], positions, bias, np.array([siblings]))
    np.testing.assert_allclose(tree, chain, atol=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        LAYOUTS["optimum-window"],
        LAYOUTS["genai-window"],
        replace(LAYOUTS["genai-window"], cache_type=CacheType.FLOAT16, float16_logits=True),
    ],
    ids=["optimum", "genai", "genai-float16"],
)
def test_layers_with_a_window_read_the_slots_of_their_window_alone(layout: Layout, tmp_path: Path) -> None:
    prompt = clear_prompt(layout, 600, 24, MIN_MARGIN)
    folder = upgrade(write_layout(tmp_path / "m", layout))
    with edgerun.load(folder, threads=1, cache=False) as llm:
        assert {each.window for each in llm.graph_io.cache} == {0, 24}
        sequence = llm.model.new_sequence()
        options = GenerateOptions(max_tokens=24, temperature=0, speculation=Speculation.OFF)
        Reply.of(llm.model.answer(sequence, prompt, options))
        assert sequence.token_ids[600:] == greedy_tokens(layout, prompt, 24)
    # Passes of consecutive tokens, such as those of prompts, have the window inside attention.
    editor = GraphEditor(folder / "model.onnx")
    serve_plain_passes(editor)
    attributes = [attribute_values(node) for node in editor.graph.node if node.op_type == "GroupQueryAttention"]
    assert [each.get("local_window_size") for each in attributes] == [None, 24]


def test_sinks_and_soft_caps_are_kept(tmp_path: Path) -> None:
    source = write_layout(tmp_path / "m", replace(GENAI, weights=Weights.INSIDE))
    model = onnx.load(source / "model.onnx")
    sinks = np.array([2.0, 0.5, 1.0, 3.0], np.float32)
    model.graph.initializer.append(numpy_helper.from_array(sinks, "sinks"))
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input.extend([""] * (11 - len(node.input)) + ["sinks"])
            node.attribute.append(helper.make_attribute("softcap", 2.0))
    onnx.save(model, source / "model.onnx")
    upgraded = onnx.load(upgrade(source) / "model.onnx")
    attention = [node for node in upgraded.graph.node if node.op_type == "GroupQueryAttention"]
    assert len(attention) == 2
    for node in attention:
        assert list(node.input[5:7]) == ["seqlens_k", "total_sequence_length"]
        assert list(node.input[9:]) == ["position_ids", "attention_bias", "sinks"]
        assert {each.name: each.f for each in node.attribute}["softcap"] == 2.0


def test_float_weights_are_rounded_to_the_requested_format(tmp_path: Path) -> None:
    source = write_layout(tmp_path / "m", OPTIMUM)
    formats = {}
    for name, recipe in {"default": ExportRecipe(None), "int8": ExportRecipe(INT8, head=FP32)}.items():
        report = upgrade_model(source, tmp_path / name, recipe)
        formats[name] = Manifest.from_json((report.bundle / "edge.json").read_bytes()).weights
        assert report.parity.max_abs_diff < 1e-3
    assert formats["default"]["layers.0.qkv"] == formats["default"]["head"] == INT4
    assert formats["int8"]["layers.1.down"] == INT8
    assert formats["int8"]["head"] == WeightFormat(32)


def test_quantized_weights_are_not_rounded_again(tmp_path: Path) -> None:
    """The source is an int4 bundle in GenAI's layout, as its own exporter writes it."""
    source = write_bundle(tmp_path, weights=ExportRecipe(INT4, layout=GraphLayout.GENAI))
    (source / "edge.json").unlink()
    before = (source / "model.onnx.data").stat().st_size
    report = upgrade_model(source, tmp_path / "out", ExportRecipe(INT8))
    assert report.notes == ("weights that have few bits already were not rounded again",)
    assert abs(report.file_bytes["model.onnx.data"] - before) < 20_000
    weights = Manifest.from_json((report.bundle / "edge.json").read_bytes()).weights
    assert set(weights.values()) == {INT4}
    assert report.parity.top1_agreement > 0.8


def test_stop_tokens_are_taken_from_genai_config(tmp_path: Path) -> None:
    source = write_layout(tmp_path / "m", GENAI)
    assert not (source / "generation_config.json").exists()
    settings = json.loads((upgrade(source) / "generation_config.json").read_text(encoding="utf-8"))
    assert settings["eos_token_id"] == 0
    assert settings["do_sample"] is False


def test_export_command_upgrades_an_onnx_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_layout(tmp_path / "m", LAYOUTS["community-float16"])
    assert main(["export", str(tmp_path / "m"), str(tmp_path / "out"), "--weights", "fp32", "--context", "128"]) == 0
    printed = capsys.readouterr().out
    assert "half precision became float32, in which a CPU computes" in printed
    manifest = Manifest.from_json((tmp_path / "out" / "edge.json").read_bytes())
    assert manifest.architecture.context == 128
    assert manifest.command == "edge-run export m out --weights fp32 --context 128"
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert re.search(r"^token trees +yes", capsys.readouterr().out, re.MULTILINE)


def truncate(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.write_bytes(path.read_bytes()[:1000])


def edit_graph(edit: Callable[[onnx.ModelProto], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        edit(model)
        onnx.save(model, folder / "model.onnx")

    return damage


def remove_cache(model: onnx.ModelProto) -> None:
    inputs = [info for info in model.graph.input if not info.name.startswith("past_key_values")]
    inputs += [helper.make_tensor_value_info("unused", TensorProto.INT64, [1])]
    del model.graph.input[:]
    model.graph.input.extend(inputs)


def delete_weights(folder: Path) -> None:
    for path in folder.glob("model.onnx?*"):
        path.unlink()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated graph": (partial(truncate, pattern="model.onnx"), "m/model.onnx is not an ONNX model"),
    "vendor operator": (
        edit_graph(lambda model: setattr(model.graph.node[-1], "domain", "com.amd")),
        "the model uses operators of com.amd",
    ),
    "no cache": (edit_graph(remove_cache), "the model has no key-value cache among its inputs and outputs"),
    "no weights": (delete_weights, "m/model.onnx keeps weights in"),
    "truncated weights": (partial(truncate, pattern="model.onnx?*"), "is damaged: 1000 bytes, "),
    "old opset": (
        edit_graph(lambda model: setattr(model.opset_import[0], "version", 11)),
        "the model has opset 11, older than 13; export it again with a later opset",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "there is no tokenizer.json beside"),
    "invalid config": (
        lambda folder: (folder / "config.json").write_text("{", encoding="utf-8"),
        "config.json is not valid JSON",
    ),
    "no graph": (lambda folder: (folder / "model.onnx").unlink(), "m holds no .onnx file"),
}


@pytest.mark.parametrize("name", ["genai-int8-cache", *DAMAGE, *UNSUPPORTED])
def test_damaged_and_unsupported_models_give_a_one_line_error_and_no_files(name: str, tmp_path: Path) -> None:
    folder, message = tmp_path / "m", ""
    if name in UNSUPPORTED:
        write_unsupported(folder, UNSUPPORTED[name])
    elif name in DAMAGE:
        damage, message = DAMAGE[name]
        damage(write_layout(folder, LAYOUTS["optimum-external"]))
    else:
        message = "the model's key-value cache is quantized to integers; run it as it is"
        write_layout(folder, LAYOUTS[name])
    with pytest.raises(EdgeError) as caught:
        upgrade_model(folder, tmp_path / "out", ExportRecipe(FP32))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_own_bundles_and_invalid_requests_are_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="follows edge-run's graph contract already; run it as it is"):
        upgrade_model(tiny_bundle, tmp_path / "out", ExportRecipe(None))
    source = write_layout(tmp_path / "m", OPTIMUM)
    with pytest.raises(InputError, match="a model in ONNX is upgraded to edge-run's own layout only"):
        upgrade_model(source, tmp_path / "out", ExportRecipe(None, layout=GraphLayout.GENAI))
    with pytest.raises(InputError, match="overlaps"):
        upgrade_model(source, source, ExportRecipe(None))
    with pytest.raises(InputError, match="is more than this model was exported for; give at most 1024"):
        upgrade_model(source, tmp_path / "out", ExportRecipe(None, context=4096))


def test_variant_of_a_folder_is_upgraded(tmp_path: Path) -> None:
    """The source is `folder:q4` in onnx-community's layout, or the graph itself; the destination is next to it."""
    folder = write_layout(tmp_path / "m", replace(COMMUNITY, weights=Weights.INSIDE))
    shutil.copy(folder / "onnx" / "model.onnx", folder / "onnx" / "model_q4.onnx")
    for source in (Path(f"{folder}:q4"), folder / "onnx" / "model.onnx"):
        bundle = upgrade_model(source, folder / "onnx" / "out", ExportRecipe(FP32)).bundle
        assert json.loads((bundle / "config.json").read_text(encoding="utf-8"))["model_type"] == "llama"
    with pytest.raises(BundleError, match="has no variant q8"):
        upgrade_model(Path(f"{folder}:q8"), tmp_path / "out", ExportRecipe(FP32))


def remove_input(model: onnx.ModelProto, index: int) -> None:
    """Remove the positions, which the operator then counts from the length of the cache, or the bias."""
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[index] = ""


def ignore_selection(model: onnx.ModelProto) -> None:
    """Return logits of the first positions instead of the selected ones."""
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[1] == "logit_rows":
            node.input[1] = "first_rows"
    model.graph.node.insert(0, helper.make_node("Size", ["logit_rows"], ["row_count"]))
    model.graph.node.insert(1, helper.make_node("Range", ["from", "row_count", "step"], ["first_rows"]))
    for name, value in (("from", 0), ("step", 1)):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value), name))


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        (partial(remove_input, index=9), "over a token tree"),
        (partial(remove_input, index=10), "over a token tree"),
        (ignore_selection, "in one pass"),
    ],
)
def test_parity_check_detects_wrong_wiring(
    damage: Callable[[onnx.ModelProto], None], where: str, tmp_path: Path
) -> None:
    source = write_layout(tmp_path / "m", GENAI)
    folder = upgrade(source)
    architecture = Manifest.from_json((folder / "edge.json").read_bytes()).architecture
    graph = EditableGraph.open(source / "model.onnx")
    reference = run_reference(graph, identify_io(graph), architecture, VOCABULARY)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    assert require_same(folder, model, reference) < 1e-3
    damage(model)
    with pytest.raises(ExportError, match=f"the upgraded graph differs from the source {where}"):
        require_same(folder, model, reference)
