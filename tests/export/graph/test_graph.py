"""The exported graph: its inputs and outputs, token trees, and the layout of the weight file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgerun.export import FP32, INT4, INT8, WeightFormat
from edgerun.export.check.contract_session import ContractSession
from support.tiny_models import write_bundle

TOKENS = np.random.default_rng(3).integers(0, 300, 12)
BLOCKED = np.float32(-1e9)


def all_positions(tokens):
    return np.arange(len(tokens))


MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "llama, small heads": ("llama", {"head_dim": 8}),
    "window shorter than the tree": ("mistral", {"sliding_window": 4}),
    "two thetas, windows, norms around each part": ("gemma3_text", {"sliding_window": 3}),
    "partial rotation outside of attention": ("phi3", {"partial_rotary_factor": 0.75}),
    "layers without positions": ("smollm3", {}),
    "norms after each part": ("olmo2", {}),
    "experts, sinks and windows": ("gpt_oss", {"sliding_window": 4}),
}


@pytest.fixture(scope="module", params=MODELS)
def bundle(request, tmp_path_factory) -> Path:
    family, overrides = MODELS[request.param]
    return write_bundle(tmp_path_factory.mktemp("graph"), family, weights=FP32, **overrides)


@pytest.fixture
def session(bundle: Path) -> ContractSession:
    return ContractSession(bundle, 64)


@pytest.mark.parametrize("rows", [[11], [0], [2, 5, 11], [7, 7, 1]], ids=str)
def test_logit_rows_only_select_logits(session: ContractSession, rows: list[int]) -> None:
    whole = session.forward(TOKENS, all_positions(TOKENS))
    following = session.forward(TOKENS[:2], np.array([1]))
    session.length = 0
    np.testing.assert_allclose(session.forward(TOKENS, np.array(rows)), whole[rows], atol=1e-5)
    # All tokens are cached, whether or not their logits were requested.
    np.testing.assert_allclose(session.forward(TOKENS[:2], np.array([1])), following, atol=1e-5)


def test_a_tree_and_its_compaction_equal_decoding_its_paths(session: ContractSession) -> None:
    """Each node of a tree with two branches attends to its ancestors only, and siblings share a position."""
    prompt = TOKENS[:5]
    nodes = np.array([10, 20, 30, 40, 50, 60])
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    expected = []
    for path in paths:
        session.length = 0
        whole = np.concatenate([prompt, nodes[path]])
        expected.append(session.forward(whole, np.array([len(whole) - 1]))[0])

    session.length = 0
    session.forward(prompt, np.array([4]))
    bias = np.full((len(nodes), len(prompt) + len(nodes)), BLOCKED)
    bias[:, : len(prompt)] = 0
    for node, path in enumerate(paths):
        bias[node, len(prompt) + np.array(path)] = 0
    depths = np.array([len(path) - 1 for path in paths])
    logits = session.run(nodes, len(prompt) + depths, bias, all_positions(nodes))
    np.testing.assert_allclose(logits, expected, atol=1e-4)

    accepted = paths[5]
    for _, _, buffer in session.buffers:
        buffer[:, :, 5 : 5 + len(accepted)] = buffer[:, :, 5 + np.array(accepted)]
    session.length = len(prompt) + len(accepted)
    compacted = session.forward(np.array([70]), np.array([0]))
    session.length = 0
    path = np.concatenate([prompt, nodes[accepted], [70]])
    np.testing.assert_allclose(compacted, session.forward(path, np.array([len(path) - 1])), atol=1e-4)


@pytest.mark.parametrize("weight_format", [FP32, INT8, INT4], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "separate"])
def test_inputs_outputs_and_operators(tmp_path, weight_format: WeightFormat, tied: bool) -> None:
    bundle = write_bundle(tmp_path, "qwen2", weights=weight_format, tie_word_embeddings=tied)
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph

    def types_and_shapes(values):
        types = onnx.TensorProto.DataType
        return {
            value.name: (
                types.Name(value.type.tensor_type.elem_type),
                [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim],
            )
            for value in values
        }

    buffers = ("FLOAT", [1, 2, "capacity", 16])
    assert types_and_shapes(graph.input) == {
        "input_ids": ("INT64", [1, "M"]),
        "position_ids": ("INT64", [1, "M"]),
        "attention_bias": ("FLOAT", [1, 1, "M", "T"]),
        "seqlens_k": ("INT32", [1]),
        "total_sequence_length": ("INT32", []),
        "logit_rows": ("INT64", ["R"]),
        **{f"past_key_values.{layer}.{name}": buffers for layer in (0, 1) for name in ("key", "value")},
    }
    assert types_and_shapes(graph.output) == {
        "logits": ("FLOAT", ["R", 300]),
        **{f"present.{layer}.{name}": buffers for layer in (0, 1) for name in ("key", "value")},
    }
    operators = [node.op_type for node in graph.node]
    attention = [list(node.input) for node in graph.node if node.op_type == "GroupQueryAttention"]
    packed, places = ["", ""], ["rope.cos", "rope.sin", "position_ids", "attention_bias"]
    assert [(names[1:3], names[7:11]) for names in attention] == [(packed, places)] * 2
    linears = 2 * 4 + 1
    if weight_format == FP32:
        assert operators.count("MatMul") == linears - 1
        assert operators.count("Gemm") == 1
    else:
        assert operators.count("MatMulNBits") == linears
        assert operators.count("GatherBlockQuantized") == 1
        levels = [a.i for node in graph.node for a in node.attribute if a.name == "accuracy_level"]
        assert levels == [4] * linears
        names = [node.input[0] for node in graph.node if node.op_type == "GatherBlockQuantized"]
        head = next(node for node in graph.node if "logits" in node.output)
        assert (head.input[1] in names) is tied


def test_external_data_is_aligned_disjoint_and_shared(tmp_path) -> None:
    bundle = write_bundle(tmp_path, weights=INT8, vocab_size=500, hidden_size=256, intermediate_size=2100)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    size = (bundle / "model.onnx.data").stat().st_size
    extents = {}
    for tensor in model.graph.initializer:
        if tensor.external_data:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries["location"] == "model.onnx.data"
            extents[tensor.name] = (int(entries["offset"]), int(entries["length"]))
    assert extents.pop("head.scales") == extents["embedding.scales"]
    assert any(length >= 1 << 20 for _, length in extents.values())
    for offset, length in extents.values():
        assert offset % (65536 if length >= 1 << 20 else 64) == 0
    ordered = sorted(extents.values())
    assert all(a + length <= b for (a, length), (b, _) in itertools.pairwise(ordered))
    assert sum(ordered[-1]) == size
    assert (bundle / "model.onnx").stat().st_size < 100_000
