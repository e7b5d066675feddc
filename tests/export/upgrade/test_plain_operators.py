"""Fused norms and activations, constant shapes and packed heads compute what the plain operators compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from edgerun.export.upgrade.attention_fusion import pack_heads
from edgerun.export.upgrade.editable import MICROSOFT, EditableGraph
from edgerun.export.upgrade.graph_parts import in_place
from edgerun.export.upgrade.plain_operators import fold_shapes, fuse_gelu, fuse_norms
from support.small_graphs import Nodes, evaluate

WIDTH = 16
Build = Callable[[Nodes, str], str]
"""Adds nodes that compute a value [1, M, ...] from another [1, M, 16]; returns its name."""


def model_of(build: Build, opset: int) -> onnx.ModelProto:
    """A model that applies `build` to rows of a table, gathered by token ids."""
    nodes = Nodes(opset)
    table = nodes.constant(np.random.default_rng(0).standard_normal((30, WIDTH)), np.float32, "table")
    out = build(nodes, nodes.op("Gather", table, "input_ids"))
    nodes.op("Identity", out, outputs=["logits"])
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"])
    return nodes.model([ids], [onnx.ValueInfoProto(name="logits")])


def changed(build: Build, *passes: Callable[[EditableGraph], object], opset: int = 18) -> EditableGraph:
    """Apply graph passes, and check that the graph computes the same."""
    model = model_of(build, opset)
    graph = EditableGraph(model, Path())
    for each in passes:
        each(graph)
    before, after = (evaluate(each, {"input_ids": np.arange(5)[None]})[0] for each in (model, graph.model(in_place)))
    np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-5)
    return graph


def ops(graph: EditableGraph) -> list[str]:
    return sorted(node.op for node in graph.nodes if node.op not in ("Gather", "Identity"))


WEIGHT = np.linspace(0.5, 2, WIDTH)


def inverse_root(nodes: Nodes, value: str, square: str) -> str:
    mean = nodes.op("ReduceMean", square, nodes.constant([-1]), keepdims=1)
    return nodes.op("Sqrt", nodes.op("Add", mean, nodes.constant(1e-3, np.float32)))


def root_of(nodes: Nodes, value: str) -> str:
    return inverse_root(nodes, value, nodes.op("Mul", value, value))


def by_reciprocal(nodes: Nodes, value: str) -> str:
    scaled = nodes.op("Mul", nodes.op("Reciprocal", root_of(nodes, value)), value)
    return nodes.op("Mul", scaled, nodes.constant(WEIGHT, np.float32))


def by_quotient(nodes: Nodes, value: str) -> str:
    root = inverse_root(nodes, value, nodes.op("Pow", value, nodes.constant(2, np.float32)))
    return nodes.op("Mul", nodes.constant(WEIGHT, np.float32), nodes.op("Div", value, root))


def with_casts(nodes: Nodes, value: str) -> str:
    wide = nodes.op("Cast", value, to=TensorProto.FLOAT)
    root = inverse_root(nodes, wide, nodes.op("Pow", wide, nodes.constant(2, np.float32)))
    scaled = nodes.op("Mul", wide, nodes.op("Div", nodes.constant(1, np.float32), root))
    return nodes.op("Mul", nodes.constant(WEIGHT, np.float32), nodes.op("Cast", scaled, to=TensorProto.FLOAT))


@pytest.mark.parametrize("build", [by_reciprocal, by_quotient, with_casts])
def test_rms_norm_becomes_one_node(build: Build) -> None:
    graph = changed(build, fuse_norms)
    (norm,) = graph.nodes_of("SimplifiedLayerNormalization")
    assert ops(graph) == [norm.op]
    assert norm.attribute("epsilon") == pytest.approx(1e-3)


def test_fused_norm_returns_the_sum_if_it_is_read() -> None:
    def build(nodes: Nodes, value: str) -> str:
        total = nodes.op("Add", value, nodes.op("Tanh", value))
        return nodes.op("Sub", by_reciprocal(nodes, total), total)

    graph = changed(build, fuse_norms)
    assert ops(graph) == ["SkipSimplifiedLayerNormalization", "Sub", "Tanh"]


@pytest.mark.parametrize(
    "build",
    [
        lambda nodes, value: nodes.op("Div", value, inverse_root(nodes, value, nodes.op("Abs", value))),
        lambda nodes, value: nodes.op("Div", nodes.op("Neg", value), root_of(nodes, value)),
        lambda nodes, value: nodes.op("Mul", value, nodes.op("Div", number(nodes, 2), root_of(nodes, value))),
    ],
    ids=["mean of magnitudes", "another numerator", "twice the reciprocal"],
)
def test_similar_graphs_are_not_fused_to_a_norm(build: Build) -> None:
    assert not changed(build, fuse_norms).nodes_of("SimplifiedLayerNormalization")


def number(nodes: Nodes, value: float) -> str:
    return nodes.constant(value, np.float32)


def gelu_by_tanh(nodes: Nodes, x: str, factor: float = 0.044715) -> str:
    cubed = nodes.op("Mul", x, nodes.op("Mul", x, x))
    inner = nodes.op("Add", x, nodes.op("Mul", number(nodes, factor), cubed))
    tanh = nodes.op("Tanh", nodes.op("Mul", number(nodes, np.sqrt(2 / np.pi)), inner))
    return nodes.op("Mul", number(nodes, 0.5), nodes.op("Mul", x, nodes.op("Add", number(nodes, 1), tanh)))


def gated(build: Build) -> Build:
    up = np.eye(WIDTH)[::-1]
    return lambda nodes, value: nodes.op(
        "Mul", build(nodes, value), nodes.op("MatMul", value, nodes.constant(up, np.float32, "up"))
    )


def test_gelu_by_tanh_alone_becomes_one_node() -> None:
    assert ops(changed(gated(gelu_by_tanh), fuse_gelu)) == ["FastGelu", "MatMul", "Mul"]
    for build in (partial(gelu_by_tanh, factor=0.04), lambda nodes, x: nodes.op("Tanh", x)):
        assert "FastGelu" not in ops(changed(gated(build), fuse_gelu))


folded = partial(fold_shapes, context=64)


def test_bounds_that_change_only_in_long_passes_are_not_folded() -> None:
    def build(nodes: Nodes, value: str) -> str:
        first = nodes.op("Sub", nodes.extent(value, 1), nodes.constant([30]))
        return nodes.op("Slice", value, nodes.op("Max", first, nodes.constant([0])), nodes.constant([99]))

    graph = changed(build, folded)
    (cut,) = graph.nodes_of("Slice")
    assert graph.producer_of(cut.input(1), "Max")


def test_constant_shapes_and_bounds_are_folded() -> None:
    def build(nodes: Nodes, value: str) -> str:
        batch, new = nodes.extent(value, 0), nodes.extent(value, 1)
        shape = nodes.op("Concat", batch, new, nodes.constant([4]), nodes.constant([-1]), axis=0)
        heads = nodes.op("Reshape", value, shape)
        half = nodes.op("Div", nodes.extent(heads, 2), nodes.constant([2]))
        return nodes.op("Slice", heads, nodes.constant([0]), half, nodes.constant([2]))

    graph = changed(build, folded)
    assert ops(graph) == ["Reshape", "Slice"]
    (reshape,) = graph.nodes_of("Reshape")
    assert graph.integers(reshape.input(1)) == [1, -1, 4, 4]


@pytest.mark.parametrize("heads", [False, True])
def test_gemm_between_reshapes_becomes_a_product_with_a_batch_axis(heads: bool) -> None:
    def build(nodes: Nodes, value: str) -> str:
        if heads:
            apart = nodes.op("Reshape", value, nodes.constant([1, -1, 2, WIDTH // 2]))
            value = nodes.op("Transpose", nodes.op("Neg", apart), perm=[0, 1, 3, 2])
        flat = nodes.op("Reshape", value, nodes.constant([-1, WIDTH]))
        matrix = nodes.constant(np.random.default_rng(1).standard_normal((WIDTH, 6)), np.float32, "matrix")
        product = nodes.op("Gemm", flat, matrix, nodes.constant(np.arange(6), np.float32, "bias"))
        shape = nodes.op("Concat", nodes.extent(value, 0), nodes.extent(value, 1), nodes.constant([6]), axis=0)
        return nodes.op("Reshape", product, shape)

    before = ["Neg", "Reshape", "Reshape", "Transpose"] if heads else []
    assert ops(changed(build, folded)) == sorted(["Add", "MatMul", *before])


def split(nodes: Nodes, value: str) -> list[str]:
    names = ["query", "key", "value"]
    nodes.op("Split", value, nodes.constant([32, 16, 16]), outputs=names, axis=2)
    return names


def slices(
    nodes: Nodes, value: str, bounds: tuple[tuple[int, int], ...] = ((0, 32), (32, 48), (48, 1 << 62))
) -> list[str]:
    return [
        nodes.op("Slice", value, *(nodes.constant([each]) for each in (start, stop, 2, 1))) for start, stop in bounds
    ]


@pytest.mark.parametrize(
    ("cut", "inputs"),
    [
        (split, 1),
        (slices, 1),
        (lambda nodes, value: split(nodes, value)[::-1], 3),
        (lambda nodes, value: slices(nodes, value, ((0, 32), (48, 64), (32, 48))), 3),
        (lambda nodes, value: slices(nodes, value, ((0, 32), (32, 48), (47, 63))), 3),
        (lambda nodes, value: slices(nodes, value, ((16, 48), (48, 64), (0, 16))), 3),
    ],
    ids=["split", "slices", "reversed", "exchanged", "overlapping", "from the middle"],
)
def test_adjacent_heads_alone_are_read_packed(cut: Callable[[Nodes, str], list[str]], inputs: int) -> None:
    nodes = Nodes(18)
    parts = cut(nodes, nodes.op("Gather", nodes.constant(np.zeros((30, 64)), np.float32, "table"), "input_ids"))
    nodes.op("GroupQueryAttention", *parts, outputs=["logits"], domain=MICROSOFT, num_heads=2, kv_num_heads=1)
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "new"])
    graph = EditableGraph(nodes.model([ids], [onnx.ValueInfoProto(name="logits")]), Path())
    pack_heads(graph)
    (attention,) = graph.nodes_of("GroupQueryAttention")
    assert len(attention.inputs) == inputs
    assert (graph.producer_of(attention.input(0), "Gather") is not None) == (inputs == 1)
