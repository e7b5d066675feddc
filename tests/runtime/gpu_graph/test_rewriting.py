"""GPU forms of graphs on the CPU: the same logits as the graph that they were made from, in passes and in trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest

from edgerun.export import FP32, WeightFormat
from edgerun.models.bundle import open_bundle
from edgerun.models.onnx_file.graph_editor import CannotRewriteError, GraphEditor
from edgerun.models.onnx_file.model_messages import attribute_values, set_attribute
from edgerun.models.onnx_file.wire import operators_of
from edgerun.runtime.devices.providers import cpu_device
from edgerun.runtime.gpu_graph.expanded_codes import compute_in_float
from edgerun.runtime.gpu_graph.rewriting import CUDA, DIRECTML, WEBGPU, GpuForm, gpu_graph, operator_table
from edgerun.runtime.graph.model_metadata import metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from support.gpu_passes import TREE
from support.tiny_models import ATTENTION_FAMILIES, write_bundle

PROMPT = [5, 250, 17, 99, 3, 42, 181, 7, 64, 200, 11, 12, 13, 14, 15, 16]
INT4 = WeightFormat(4, 32)
EXACT = 1e-5
"""Differences of float32 sums in another order, by the largest logit."""
HALF = 0.01
"""Largest difference that float16 activations make to logits, by the largest logit; 0.005 was seen."""


def load(bundle: Path, model: bytes | None) -> GraphSession:
    opened = open_bundle(bundle)
    return GraphSession(opened.graph, SessionConfig(cpu_device(), 1), metadata_of(opened), model=model)


def original(bundle: Path) -> GraphSession:
    """The bundle's graph at the accuracy level of GPUs."""
    editor = GraphEditor(bundle / "model.onnx")
    compute_in_float(editor)
    return load(bundle, editor.serialized())


def plain_logits(session: GraphSession) -> npt.NDArray[np.float32]:
    """Logits of all tokens of a prompt in two passes, and of single tokens after it."""
    arena = session.arena(64)
    bound, parts = session.bind(arena), []
    for part in (PROMPT[:12], PROMPT[12:], [9], [21]):
        parts.append(bound.forward(part).copy())
        arena.commit(len(part))
    return np.concatenate(parts)


def tree_logits(session: GraphSession) -> npt.NDArray[np.float32]:
    """Logits of all nodes of a tree after a prompt."""
    arena = session.arena(64)
    bound = session.bind(arena)
    bound.forward(PROMPT)
    arena.commit(len(PROMPT))
    return bound.forward(TREE.tokens, positions=16 + TREE.depths, tree_mask=TREE.mask).copy()


def assert_same(bundle: Path, model: bytes, tolerance: float, *, plain: bool = False) -> None:
    expected, found = original(bundle), load(bundle, model)
    for logits in (plain_logits,) if plain else (plain_logits, tree_logits):
        wanted = logits(expected)
        limit = tolerance * max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(logits(found), wanted, atol=limit, rtol=0)


def has_experts(bundle: Path) -> bool:
    return "QMoE" in operators_of(bundle / "model.onnx")


def nodes_of(model: bytes) -> list[onnx.NodeProto]:
    return list(onnx.load_model_from_string(model).graph.node)


def edited(bundle: Path, attribute: str, value: int) -> Path:
    """The bundle, with an attribute of its attention operators set."""
    editor = GraphEditor(bundle / "model.onnx")
    for each in editor.graph.node:
        if each.op_type == "GroupQueryAttention":
            set_attribute(each, attribute, value)
    (bundle / "edge.json").unlink()  # it has the checksum of the graph
    (bundle / "model.onnx").write_bytes(editor.serialized())
    return bundle


@pytest.fixture(scope="module", params=ATTENTION_FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny int4 model of each family that has token trees."""
    return write_bundle(tmp_path_factory.mktemp(request.param), request.param, weights=INT4)


@pytest.mark.parametrize(
    ("form", "plain"),
    [(WEBGPU, False), (CUDA, False), (CUDA, True), (DIRECTML, False)],
    ids=["webgpu", "cuda", "cuda-plain", "directml"],
)
def test_every_family_computes_the_same(family: Path, form: GpuForm, plain: bool) -> None:
    if form is DIRECTML and has_experts(family):
        with pytest.raises(CannotRewriteError, match="the provider has no kernel for QMoE"):
            gpu_graph(family / "model.onnx", form, plain=plain)
        return
    model = gpu_graph(family / "model.onnx", form, plain=plain)
    assert_same(family, model, EXACT if form is WEBGPU else HALF, plain=plain)


@pytest.mark.parametrize("form", [WEBGPU, CUDA], ids=["webgpu", "cuda"])
def test_scales_may_be_stored_in_float16(tmp_path: Path, form: GpuForm) -> None:
    weight_format = WeightFormat(4, 32, zero_points=True, half_scales=True)
    bundle = write_bundle(tmp_path, "llama", weights=weight_format)
    assert_same(bundle, gpu_graph(bundle / "model.onnx", form), EXACT if form is WEBGPU else HALF)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_heads_are_rotated_as_the_operator_rotates_them(tmp_path: Path, size: int, interleaved: bool) -> None:
    bundle = write_bundle(tmp_path, hidden_size=2 * size, num_attention_heads=2, num_key_value_heads=1)
    bundle = edited(bundle, "rotary_interleaved", int(interleaved))
    model = gpu_graph(bundle / "model.onnx", WEBGPU)
    assert_same(bundle, model, EXACT)
    rotations = [attribute_values(each) for each in nodes_of(model) if each.op_type == "RotaryEmbedding"]
    assert [each["num_heads"] for each in rotations] == [2, 1, 2, 1]
    assert {each["interleaved"] for each in rotations} == {int(interleaved)}
    # What an operator does without an attribute differs from provider to provider.
    assert {len(each) for each in rotations} == {5}


@pytest.mark.parametrize(
    "weights",
    [FP32, *(WeightFormat(bits, 32, zero_points=points) for bits in (2, 4, 8) for points in (False, True))],
    ids=str,
)
@pytest.mark.parametrize("form", [WEBGPU, DIRECTML], ids=["webgpu", "directml"])
def test_weights_of_every_format_are_computed_the_same(tmp_path: Path, weights: WeightFormat, form: GpuForm) -> None:
    bundle = write_bundle(tmp_path, weights=weights, vocab_size=301)
    model = gpu_graph(bundle / "model.onnx", form)
    assert_same(bundle, model, EXACT if form is WEBGPU else HALF)
    for each in nodes_of(model):
        if each.op_type == "GatherBlockQuantized":
            assert form.gathers_blocks
            assert len(each.input) == 3
        if each.op_type == "MatMulNBits":
            assert attribute_values(each)["accuracy_level"] == 0
            assert attribute_values(each)["bits"] in form.matmul_bits


def test_the_caller_computes_the_bias_of_windows(family: Path) -> None:
    """The families have a window of 12 tokens, less than the prompt; trees and passes agree in the tests above."""
    model = gpu_graph(family / "model.onnx", WEBGPU)
    biases = [each.name for each in onnx.load_model_from_string(model).graph.input if "bias" in each.name]
    has_window = family.parent.name.startswith(("mistral", "gemma", "gpt_oss"))
    assert biases == ["attention_bias", *(["attention_bias_12"] if has_window else [])]
    assert list(load(family, model).graph_io.window_biases) == ([12] if has_window else [])
    assert not {each.op_type for each in nodes_of(model)} & {"Size", "Range", "GreaterOrEqual", "Where"}


def test_the_best_tokens_are_outputs(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle))
    session = ort.InferenceSession(gpu_graph(bundle / "model.onnx", WEBGPU), options, ["CPUExecutionProvider"])
    shapes = {each.name: (each.type, each.shape[1]) for each in session.get_outputs()}
    assert shapes["top_ids"] == ("tensor(int64)", 64)
    assert shapes["top_logits"] == ("tensor(float)", 64)
    feeds: dict[str, Any] = {
        "input_ids": np.array([PROMPT]),
        "position_ids": np.arange(16)[None],
        "attention_bias": np.zeros((1, 1, 16, 16), np.float32),
        "seqlens_k": np.array([15], np.int32),
        "total_sequence_length": np.array(16, np.int32),
        "logit_rows": np.array([3, 15]),
    }
    for each in session.get_inputs():
        if each.name.startswith("past"):
            feeds[each.name] = np.zeros((1, 2, 32, 16), np.float32)
    logits, ids, values = session.run(["logits", "top_ids", "top_logits"], feeds)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=1, kind="stable")[:, :64])
    np.testing.assert_array_equal(values, np.take_along_axis(logits, ids, axis=1))


def test_a_graph_is_made_the_same_every_time(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, weights=INT4)
    assert gpu_graph(bundle / "model.onnx", CUDA) == gpu_graph(bundle / "model.onnx", CUDA)


def test_directml_graphs_keep_to_its_operators_and_types(family: Path) -> None:
    if has_experts(family):
        return
    model = gpu_graph(family / "model.onnx", DIRECTML)
    types = types_of_values(model, family)
    table = operator_table("DmlExecutionProvider")
    for node in nodes_of(model):
        entry = table[node.domain][node.op_type]
        bound: dict[str, str] = {}
        for names, letters in ((node.input, entry["inputs"]), (node.output, entry["outputs"])):
            repeated = letters[-1].endswith("...")
            expanded = [letter.removesuffix("...") for letter in (letters * len(names) if repeated else letters)]
            assert len(names) <= len(expanded), node.op_type
            for name, letter in zip(names, expanded, strict=False):
                if not name:
                    continue
                allowed = entry["types"].get(letter, [letter] if letter.startswith("int") else [types[name]])
                assert types[name] in allowed, (node.op_type, name, types[name])
                assert bound.setdefault(letter, types[name]) == types[name], (node.op_type, name)


def types_of_values(model: bytes, folder: Path) -> dict[str, str]:
    """Element type of every value of a graph, as ONNX Runtime infers it."""
    proto = onnx.load_model_from_string(model)
    known = {each.name for each in proto.graph.output}
    inner = [name for node in proto.graph.node for name in node.output if name and name not in known]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    values = [*session.get_inputs(), *session.get_outputs()]
    types = {each.name: each.type.removeprefix("tensor(").removesuffix(")") for each in values}
    for tensor in proto.graph.initializer:
        name = onnx.TensorProto.DataType.Name(tensor.data_type).lower()
        types[tensor.name] = name
    return types
