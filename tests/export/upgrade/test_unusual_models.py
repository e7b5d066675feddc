"""Upgrades of models that are unusual in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

import edgerun
from edgerun import GenerateOptions
from edgerun.errors import ExportError
from edgerun.export import FP32, INT4, ExportRecipe, upgrade_model
from edgerun.export.check.contract_session import ContractSession
from edgerun.models.manifest import Manifest, WeightFormat
from edgerun.runtime.result import Reply
from support.layout_kinds import HEAD_DIM, VOCABULARY, Layout, Weights
from support.layout_reference import greedy_tokens
from support.layouts import COMMUNITY, GENAI, OPTIMUM, write_layout
from support.nightly import some_nightly
from support.small_graphs import Array

Change = Callable[[ModelProto], None]
PROMPT = [7, 30, 112, 9, 260, 41]
MAX_TOKENS = 12


def changed(folder: Path, layout: Layout, change: Change) -> Path:
    """Write a layout and change its graph."""
    write_layout(folder, layout)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    change(model)
    onnx.save(model, folder / "model.onnx")
    return folder


def upgraded(source: Path, weight_format: WeightFormat) -> Manifest:
    """Upgrade a model to the folder `upgraded` beside it."""
    folder = upgrade_model(source, source.parent / "upgraded", ExportRecipe(weight_format)).bundle
    return Manifest.from_json((folder / "edge.json").read_bytes())


def require_same_text(folder: Path, layout: Layout) -> None:
    """An upgraded model decodes the same tokens as its source."""
    with edgerun.load(folder, threads=1, cache=False) as llm:
        sequence = llm.model.new_sequence()
        Reply.of(llm.model.answer(sequence, PROMPT, GenerateOptions(max_tokens=MAX_TOKENS, temperature=0)))
        assert sequence.token_ids[len(PROMPT) :] == greedy_tokens(layout, PROMPT, MAX_TOKENS)


def change_head(model: ModelProto, change: Callable[[Array], Array]) -> None:
    (head,) = (tensor for tensor in model.graph.initializer if tensor.name == "lm_head.transposed")
    head.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(head)), head.name))


def pad_head(model: ModelProto) -> None:
    """Add rows to the LM head for tokens that the embedding does not have."""
    change_head(model, lambda head: np.pad(head, ((0, 0), (0, 5000))))
    model.graph.output[0].type.tensor_type.shape.dim[2].dim_value = VOCABULARY + 5000


@pytest.mark.parametrize("weight_format", [FP32, INT4], ids=str)
def test_lm_head_may_be_larger_than_the_embedding(weight_format: WeightFormat, tmp_path: Path) -> None:
    manifest = upgraded(changed(tmp_path / "m", OPTIMUM, pad_head), weight_format)
    assert manifest.architecture.vocab_size == VOCABULARY


def clip_ids(model: ModelProto) -> None:
    """Clip int32 ids before the embedding lookup."""
    bounds = {"lowest": 0, "highest": VOCABULARY - 1}
    model.graph.initializer.extend(numpy_helper.from_array(np.array(at, np.int32), name) for name, at in bounds.items())
    for node in model.graph.node:
        if node.op_type == "Gather" and "input_ids" in node.input:
            node.input[1] = "clipped"
    model.graph.node.insert(0, helper.make_node("Clip", ["input_ids", *bounds], ["clipped"]))


def test_int32_token_ids_are_converted_for_operators_that_need_them(tmp_path: Path) -> None:
    layout = replace(OPTIMUM, int32_ids=True)
    source = changed(tmp_path / "m", layout, clip_ids)
    upgraded(source, FP32)
    require_same_text(tmp_path / "upgraded", layout)
    manifest = upgraded(source, INT4)
    assert manifest.weights["embedding"].bits == 4
    assert manifest.architecture.tied_head


def rename_value(value: Callable[[ModelProto], str], name: str) -> Change:
    """Rename a result."""

    def change(model: ModelProto) -> None:
        old = value(model)
        for node in model.graph.node:
            node.input[:] = [name if each == old else each for each in node.input]
            node.output[:] = [name if each == old else each for each in node.output]
        for info in model.graph.output:
            info.name = name if info.name == old else info.name

    return change


CLASHES = product(
    ("plain", "fused"),
    ("logits", "cache", "embedding"),
    ("attention_bias", "seqlens_k", "total_sequence_length", "logit_rows"),
)
"""Layout, renamed result and its new name."""


@pytest.mark.parametrize("clash", some_nightly(CLASHES, every=5), ids=str)
def test_result_may_have_the_name_of_a_contract_input(clash: tuple[str, str, str], tmp_path: Path) -> None:
    layout_name, place, name = clash
    layout = OPTIMUM if layout_name == "plain" else replace(COMMUNITY, subfolder="")
    values: dict[str, Callable[[ModelProto], str]] = {
        "logits": lambda model: model.graph.output[0].name,
        "cache": lambda model: model.graph.output[1].name,
        "embedding": lambda model: next(node.output[0] for node in model.graph.node if "input_ids" in node.input),
    }
    upgraded(changed(tmp_path / "m", layout, rename_value(values[place], name)), FP32)
    require_same_text(tmp_path / "upgraded", layout)


def tie_by_transpose(model: ModelProto) -> None:
    """Make the LM head the transposed embedding."""
    head = next(node for node in model.graph.node if "lm_head.transposed" in node.input)
    transposed = helper.make_node("Transpose", ["model.embed_tokens.weight"], ["transposed"], perm=[1, 0])
    head.input[1] = "transposed"
    model.graph.node.insert(0, transposed)


@pytest.mark.parametrize("layout", [OPTIMUM, replace(COMMUNITY, subfolder="")], ids=["plain", "fused"])
def test_lm_head_tied_by_a_transpose_stays_tied(layout: Layout, tmp_path: Path) -> None:
    source = changed(tmp_path / "m", layout, tie_by_transpose)
    assert upgraded(source, FP32).architecture.tied_head
    require_same_text(tmp_path / "upgraded", layout)


def use_standard_attention(grouped: bool, boolean_mask: bool) -> Change:
    """Replace attention by the operator of opset 23, as PyTorch's exporter writes it."""

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
                if grouped:  # the values before Reshape, Expand and Unsqueeze
                    key, value = before(key, 0, 0, 0), before(value, 0, 0, 0)
                if boolean_mask:
                    seen = helper.make_node("Greater", [bias, "hardly"], [f"{bias}.{node.output[0]}"])
                    model.graph.node.insert(list(model.graph.node).index(made[node.input[0]]), seen)
                    bias = seen.output[0]
                inputs = [before(scores, 0, 0), key, value, bias]
                node.CopyFrom(helper.make_node("Attention", inputs, node.output, scale=HEAD_DIM**-0.5))
        model.graph.initializer.append(numpy_helper.from_array(np.array(-1, np.float32), "hardly"))

    return change


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("boolean_mask", [False, True])
def test_standard_attention_operator_is_upgraded(grouped: bool, boolean_mask: bool, tmp_path: Path) -> None:
    layout = replace(OPTIMUM, opset=23)
    source = changed(tmp_path / "m", layout, use_standard_attention(grouped, boolean_mask))
    assert upgraded(source, FP32).architecture.kv_heads == 2
    require_same_text(tmp_path / "upgraded", layout)


def test_model_with_constant_logits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="logits correlate by only nan with the source's"):
        upgraded(changed(tmp_path / "m", OPTIMUM, lambda model: change_head(model, np.zeros_like)), FP32)


def remove_lengths(model: ModelProto) -> None:
    """Remove the byte length of each constant, which ONNX allows: it follows from the shape."""
    for tensor in model.graph.initializer:
        kept = [entry for entry in tensor.external_data if entry.key != "length"]
        del tensor.external_data[:]
        tensor.external_data.extend(kept)


@pytest.mark.parametrize("weights", [Weights.ONE_FILE, Weights.MANY_FILES])
def test_external_weights_may_have_no_byte_length(weights: Weights, tmp_path: Path) -> None:
    layout = replace(OPTIMUM, weights=weights)
    upgraded(changed(tmp_path / "m", layout, remove_lengths), FP32)
    require_same_text(tmp_path / "upgraded", layout)


@pytest.mark.parametrize("layout", [OPTIMUM, GENAI], ids=["optimum", "genai"])
@pytest.mark.parametrize("context", [2, 16, 20, 30])
def test_context_may_be_shorter_than_the_parity_check(layout: Layout, context: int, tmp_path: Path) -> None:
    source = write_layout(tmp_path / "m", layout)
    report = upgrade_model(source, tmp_path / "upgraded", ExportRecipe(FP32, context=context))
    assert Manifest.from_json((report.bundle / "edge.json").read_bytes()).architecture.context == context
    assert report.parity.max_abs_diff < 1e-3


def test_failed_run_gives_a_one_line_error(tiny_bundle: Path) -> None:
    architecture = Manifest.from_json((tiny_bundle / "edge.json").read_bytes()).architecture
    session = ContractSession(tiny_bundle, 8)
    with pytest.raises(ExportError, match="the graph cannot be run: "):
        session.forward(np.array([architecture.vocab_size + 9]), np.array([0]))
