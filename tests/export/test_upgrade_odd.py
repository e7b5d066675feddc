"""Models that are unusual in one way: a head wider than the embedding, weights without lengths, few positions."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

import edgerun
from edgerun import GenerateOptions
from edgerun.errors import ExportError
from edgerun.export import FP32, INT4, ExportRecipe, ExportRequest, upgrade_model
from edgerun.export.check.contract_session import ContractSession
from edgerun.models.manifest import Manifest, WeightFormat
from edgerun.runtime.result import Reply
from support.layout_kinds import HEAD_DIM, VOCABULARY, Layout, Weights
from support.layout_reference import greedy_tokens
from support.layouts import COMMUNITY, GENAI, OPTIMUM, write_layout

Change = Callable[[ModelProto], None]
PROMPT = [7, 30, 112, 9, 260, 41]
TOKENS = 12


def changed(folder: Path, layout: Layout, change: Change) -> Path:
    """A layout whose graph is changed in one way."""
    write_layout(folder, layout)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    onnx.save(model, folder / "model.onnx")
    return folder


def upgraded(source: Path, form: WeightFormat) -> Manifest:
    """Upgrade a model to `upgraded` beside it."""
    folder = upgrade_model(ExportRequest(source, source.parent / "upgraded", ExportRecipe(form))).bundle
    return Manifest.from_json((folder / "edge.json").read_bytes())


def require_same_text(folder: Path, layout: Layout) -> None:
    """An upgraded model says what its source does."""
    with edgerun.load(folder, threads=1, cache=False) as llm:
        text = llm.model.new_sequence()
        Reply.of(llm.model.answer(text, PROMPT, GenerateOptions(max_tokens=TOKENS, temperature=0)))
        assert text.token_ids[len(PROMPT) :] == greedy_tokens(layout, PROMPT, TOKENS)


def pad_head(model: ModelProto) -> None:
    """Give the head rows for tokens that the embedding does not have."""
    (head,) = (tensor for tensor in model.graph.initializer if tensor.name == "lm_head.transposed")
    wide = np.pad(numpy_helper.to_array(head), ((0, 0), (0, 5000)))
    head.CopyFrom(numpy_helper.from_array(wide, head.name))
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = VOCABULARY + 5000


@pytest.mark.parametrize("form", [FP32, INT4], ids=str)
def test_a_head_may_be_wider_than_the_embedding(form: WeightFormat, tmp_path: Path) -> None:
    manifest = upgraded(changed(tmp_path / "m", OPTIMUM, pad_head), form)
    assert manifest.architecture.vocab_size == VOCABULARY


def clip_ids(model: ModelProto) -> None:
    """Work on int32 ids before anything is looked up by them."""
    bounds = {"lowest": 0, "highest": VOCABULARY - 1}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(at, np.int32), name) for name, at in bounds.items())
    for node in model.graph.node:
        if node.op_type == "Gather" and "input_ids" in node.input:
            node.input[1] = "clipped"
    model.graph.node.insert(0, helper.make_node("Clip", ["input_ids", *bounds], ["clipped"]))


def test_narrow_ids_stay_narrow_for_what_works_on_them(tmp_path: Path) -> None:
    layout = replace(OPTIMUM, narrow_ids=True)
    source = changed(tmp_path / "m", layout, clip_ids)
    upgraded(source, FP32)
    require_same_text(tmp_path / "upgraded", layout)
    manifest = upgraded(source, INT4)
    assert manifest.weights["embedding"].bits == 4
    assert manifest.architecture.tied_head


def call(value: Callable[[ModelProto], str], name: str) -> Change:
    """Call a result something else."""

    def change(model: ModelProto) -> None:
        old = value(model)
        for node in model.graph.node:
            node.input[:] = [name if each == old else each for each in node.input]
            node.output[:] = [name if each == old else each for each in node.output]
        for port in model.graph.output:
            port.name = name if port.name == old else port.name

    return change


@pytest.mark.parametrize("name", ["attention_bias", "seqlens_k", "total_sequence_length", "logit_rows"])
@pytest.mark.parametrize("place", ["logits", "cache", "embedding"])
@pytest.mark.parametrize("layout", [OPTIMUM, replace(COMMUNITY, subfolder="")], ids=["plain", "fused"])
def test_a_result_may_be_called_what_one_of_our_inputs_is(
    layout: Layout, place: str, name: str, tmp_path: Path
) -> None:
    values: dict[str, Callable[[ModelProto], str]] = {
        "logits": lambda model: model.graph.output[0].name,
        "cache": lambda model: model.graph.output[1].name,
        "embedding": lambda model: next(node.output[0] for node in model.graph.node if "input_ids" in node.input),
    }
    upgraded(changed(tmp_path / "m", layout, call(values[place], name)), FP32)
    require_same_text(tmp_path / "upgraded", layout)


def tie_by_turning(model: ModelProto) -> None:
    """Make the head the embedding, turned over where it is read."""
    head = next(node for node in model.graph.node if "lm_head.transposed" in node.input)
    turned = helper.make_node("Transpose", ["model.embed_tokens.weight"], ["turned"], perm=[1, 0])
    head.input[1] = "turned"
    model.graph.node.insert(0, turned)


@pytest.mark.parametrize("layout", [OPTIMUM, replace(COMMUNITY, subfolder="")], ids=["plain", "fused"])
def test_a_head_that_is_the_embedding_turned_over_stays_whole(layout: Layout, tmp_path: Path) -> None:
    source = changed(tmp_path / "m", layout, tie_by_turning)
    assert upgraded(source, FP32).architecture.tied_head
    require_same_text(tmp_path / "upgraded", layout)


def attend_in_one(grouped: bool, truths: bool) -> Change:
    """Attention as one operator of opset 23, as PyTorch's exporter writes it."""

    def change(model: ModelProto) -> None:
        made = {name: node for node in model.graph.node for name in node.output}

        def before(name: str, *places: int) -> str:
            for place in places:
                name = made[name].input[place]
            return name

        for node in list(model.graph.node):
            if node.op_type == "MatMul" and made.get(node.input[0], node).op_type == "Softmax":
                scores, bias = made[before(node.input[0], 0)].input
                key, value = before(scores, 0, 1, 0), node.input[1]
                if grouped:  # what stands before Reshape, Expand and Unsqueeze
                    key, value = before(key, 0, 0, 0), before(value, 0, 0, 0)
                if truths:
                    seen = helper.make_node("Greater", [bias, "hardly"], [f"{bias}.{node.output[0]}"])
                    model.graph.node.insert(list(model.graph.node).index(made[node.input[0]]), seen)
                    bias = seen.output[0]
                inputs = [before(scores, 0, 0), key, value, bias]
                node.CopyFrom(helper.make_node("Attention", inputs, node.output, scale=HEAD_DIM**-0.5))
        model.graph.initializer.append(numpy_helper.from_array(np.array(-1, np.float32), "hardly"))

    return change


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("truths", [False, True])
def test_attention_of_the_standard_becomes_ours(grouped: bool, truths: bool, tmp_path: Path) -> None:
    layout = replace(OPTIMUM, opset=23)
    source = changed(tmp_path / "m", layout, attend_in_one(grouped, truths))
    assert upgraded(source, FP32).architecture.kv_heads == 2
    require_same_text(tmp_path / "upgraded", layout)


def forget_head(model: ModelProto) -> None:
    """A head of zeros."""
    (head,) = (tensor for tensor in model.graph.initializer if tensor.name == "lm_head.transposed")
    head.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(head)), head.name))


def test_a_model_that_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="logits correlate by only nan with the source's"):
        upgraded(changed(tmp_path / "m", OPTIMUM, forget_head), FP32)


def forget_lengths(model: ModelProto) -> None:
    """Leave out how long each constant is, as ONNX allows: its shape tells it."""
    for tensor in model.graph.initializer:
        kept = [entry for entry in tensor.external_data if entry.key != "length"]
        del tensor.external_data[:]
        tensor.external_data.extend(kept)


@pytest.mark.parametrize("weights", [Weights.ONE_FILE, Weights.MANY_FILES])
def test_weights_need_not_say_how_long_they_are(weights: Weights, tmp_path: Path) -> None:
    layout = replace(OPTIMUM, weights=weights)
    upgraded(changed(tmp_path / "m", layout, forget_lengths), FP32)
    require_same_text(tmp_path / "upgraded", layout)


@pytest.mark.parametrize("layout", [OPTIMUM, GENAI], ids=["optimum", "genai"])
@pytest.mark.parametrize("context", [2, 16, 20, 30])
def test_a_context_may_be_shorter_than_the_check(layout: Layout, context: int, tmp_path: Path) -> None:
    source = write_layout(tmp_path / "m", layout)
    report = upgrade_model(ExportRequest(source, tmp_path / "upgraded", ExportRecipe(FP32, context=context)))
    manifest = json.loads((report.bundle / "edge.json").read_text(encoding="utf-8"))
    assert manifest["architecture"]["context"] == context
    assert report.parity.max_abs_diff < 1e-3


def test_what_a_graph_cannot_run_is_one_line(tiny_bundle: Path) -> None:
    form = Manifest.from_json((tiny_bundle / "edge.json").read_bytes()).architecture
    session = ContractSession(tiny_bundle, form, 8)
    with pytest.raises(ExportError, match="the graph cannot be run: "):
        session.forward(np.array([form.vocab_size + 9]), np.array([0]))
