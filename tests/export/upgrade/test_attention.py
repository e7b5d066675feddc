"""Attention and rotary embedding in variant operators are recognized by what they compute, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgerun import BundleError, EdgeError
from edgerun.export.upgrade.attention_fusion import Rotation, find_rotation, fuse_operators
from edgerun.export.upgrade.attention_pattern import Attention, find_attention
from edgerun.export.upgrade.contract_inputs import select_positions, window_of_bias, wire_attention
from edgerun.export.upgrade.decoder_io import identify_io
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.export.upgrade.graph_parts import in_place
from edgerun.export.upgrade.parity import require_same, run_reference
from edgerun.export.upgrade.subgraph_runner import SubgraphRunner
from support.small_graphs import Nodes

VOCABULARY: Final = 50
WIDTH: Final = 32
OPSET: Final = 17


class Masking(Enum):
    """How positions are masked."""

    ADDED = "0 or minus infinity is added"
    SELECTED = "Where selects the score or a large negative number"
    ALIBI = "a penalty that grows with the distance is added (ALiBi)"
    UNMASKED = "every token sees all, which is correct for one new token"
    BLOCKS = "a token sees the positions before it in its own block of 4"


class RotaryPairs(Enum):
    """Which channels are rotated as a pair."""

    NONE = "no rotation"
    HALVES = "i and i + n/2"
    ADJACENT = "2i and 2i + 1"
    LENGTH_DEPENDENT = "i and i + n/2, by an angle that also depends on the length of the sequence"


@dataclass(frozen=True)
class DecoderVariant:
    """One way to write a decoder with attention."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 1
    scale: float = 0.25
    scale_on_both: bool = False
    """Whether queries and keys are both multiplied by the root of the scale, instead of the scores by the scale."""
    softcap: float = 0.0
    window: int = 0
    masking: Masking = Masking.ADDED
    rotary: RotaryPairs = RotaryPairs.HALVES
    rotary_dim: int = 16
    """Number of channels of a head that are rotated."""
    rotary_scale: float = 1.0
    """Factor of cosines and sines (YaRN, LongRoPE)."""
    tokens_first: bool = False
    """Whether heads are rotated before the axes of tokens and heads are exchanged."""
    key_rotary_scale: float = 1.0
    """Additional factor of the cosines and sines of keys."""


class DecoderWriter:
    """Writes a decoder with random weights."""

    def __init__(self, variant: DecoderVariant) -> None:
        self._variant = variant
        self._nodes = Nodes(OPSET)
        self._random = np.random.default_rng(0)

    def model(self) -> onnx.ModelProto:
        variant, nodes = self._variant, self._nodes
        declare = helper.make_tensor_value_info
        total = nodes.extent("attention_mask", 1)
        first = nodes.extent("past_key_values.0.key", 2)
        slots = nodes.op("Unsqueeze", nodes.span(nodes.constant([0]), total), nodes.constant([0]))
        queries = nodes.op("Unsqueeze", nodes.span(first, total), nodes.constant([1]))
        value = nodes.op("Gather", self._weight("table", VOCABULARY, WIDTH), "input_ids")
        for layer in range(variant.layers):
            attended = self._attention(layer, value, slots, queries, total)
            output = self._weight(f"o.{layer}", variant.heads * variant.head_dim, WIDTH)
            value = nodes.op("Add", value, nodes.op("MatMul", attended, output))
        nodes.op("MatMul", value, self._weight("head", WIDTH, VOCABULARY), outputs=["logits"])
        ids = [declare(name, TensorProto.INT64, ["batch", "new"]) for name in ("input_ids", "position_ids")]
        mask = declare("attention_mask", TensorProto.INT64, ["batch", "total"])
        caches = {
            side: [
                declare(
                    f"{name}.{layer}.{half}", TensorProto.FLOAT, ["batch", variant.kv_heads, side, variant.head_dim]
                )
                for layer in range(variant.layers)
                for half in ("key", "value")
            ]
            for side, name in (("past", "past_key_values"), ("total", "present"))
        }
        logits = declare("logits", TensorProto.FLOAT, ["batch", "new", VOCABULARY])
        return nodes.model([*ids, mask, *caches["past"]], [logits, *caches["total"]])

    def _attention(self, layer: int, value: str, slots: str, queries: str, total: str) -> str:
        variant, nodes = self._variant, self._nodes
        query = self._heads(value, f"q.{layer}", variant.heads, total)
        key = self._heads(value, f"k.{layer}", variant.kv_heads, total, variant.key_rotary_scale)
        new_value = self._heads(value, f"v.{layer}", variant.kv_heads, None)
        keys, values = (
            nodes.op("Concat", f"past_key_values.{layer}.{half}", new, outputs=[f"present.{layer}.{half}"], axis=2)
            for half, new in (("key", key), ("value", new_value))
        )
        keys, values = self._repeated(keys), self._repeated(values)
        transposed = nodes.op("Transpose", keys, perm=[0, 1, 3, 2])
        if variant.scale_on_both:
            root = nodes.constant(variant.scale**0.5, np.float32)
            scores = nodes.op("MatMul", nodes.op("Mul", query, root), nodes.op("Mul", transposed, root))
        else:
            inverse = nodes.constant(1 / variant.scale, np.float32)
            scores = nodes.op("Div", nodes.op("MatMul", query, transposed), inverse)
        if variant.softcap:
            cap = nodes.constant(variant.softcap, np.float32)
            scores = nodes.op("Mul", nodes.op("Tanh", nodes.op("Div", scores, cap)), cap)
        weights = nodes.op("Softmax", self._masked(scores, slots, queries), axis=-1)
        merged = nodes.op("Transpose", nodes.op("MatMul", weights, values), perm=[0, 2, 1, 3])
        return nodes.op("Reshape", merged, nodes.constant([0, 0, -1]))

    def _heads(self, value: str, name: str, count: int, total: str | None, scale: float = 1.0) -> str:
        variant, nodes = self._variant, self._nodes
        wide = nodes.op("MatMul", value, self._weight(name, WIDTH, count * variant.head_dim))
        split = nodes.op("Reshape", wide, nodes.constant([0, 0, count, variant.head_dim]))
        rotates = total is not None and variant.rotary is not RotaryPairs.NONE
        if rotates and variant.tokens_first:
            split = self._rotate(split, total or "", 2, scale)
        heads = nodes.op("Transpose", split, perm=[0, 2, 1, 3])
        return self._rotate(heads, total or "", 1, scale) if rotates and not variant.tokens_first else heads

    def _rotate(self, heads: str, total: str, axis: int, scale: float) -> str:
        """Rotate the first `rotary_dim` channels; `axis` is that of the heads."""
        variant, nodes = self._variant, self._nodes
        pairs = variant.rotary_dim // 2
        angles = self._angles(total, pairs)
        scale *= variant.rotary_scale
        cosines, sines = (
            nodes.op(
                "Mul",
                nodes.op("Unsqueeze", nodes.op(kind, angles), nodes.constant([axis])),
                nodes.constant(scale, np.float32),
            )
            for kind in ("Cos", "Sin")
        )
        adjacent = variant.rotary is RotaryPairs.ADJACENT
        starts, length, step = ((0, 1), 2 * pairs - 1, 2) if adjacent else ((0, pairs), pairs, 1)
        first, second = (self._cut(heads, start, start + length, step) for start in starts)
        left = nodes.op("Sub", nodes.op("Mul", first, cosines), nodes.op("Mul", second, sines))
        right = nodes.op("Add", nodes.op("Mul", second, cosines), nodes.op("Mul", first, sines))
        if adjacent:
            last = nodes.constant([-1])
            parts = [nodes.op("Unsqueeze", each, last) for each in (left, right)]
            shape = nodes.constant([0, 0, 0, variant.rotary_dim])
            rotated = nodes.op("Reshape", nodes.op("Concat", *parts, axis=-1), shape)
        else:
            rotated = nodes.op("Concat", left, right, axis=-1)
        if variant.rotary_dim == variant.head_dim:
            return rotated
        return nodes.op("Concat", rotated, self._cut(heads, variant.rotary_dim, variant.head_dim, 1), axis=-1)

    def _angles(self, total: str, pairs: int) -> str:
        nodes = self._nodes
        positions = nodes.op("Cast", "position_ids", to=TensorProto.FLOAT)
        if self._variant.rotary is RotaryPairs.LENGTH_DEPENDENT:
            positions = nodes.op("Div", positions, nodes.op("Cast", total, to=TensorProto.FLOAT))
        split = nodes.op("Unsqueeze", positions, nodes.constant([-1]))
        return nodes.op("Mul", split, nodes.constant(100.0 ** -(np.arange(pairs) / pairs), np.float32))

    def _cut(self, value: str, start: int, stop: int, step: int) -> str:
        return self._nodes.op("Slice", value, *(self._nodes.constant([each]) for each in (start, stop, -1, step)))

    def _repeated(self, heads: str) -> str:
        variant, nodes = self._variant, self._nodes
        group = variant.heads // variant.kv_heads
        if group == 1:
            return heads
        split = nodes.op("Unsqueeze", heads, nodes.constant([2]))
        many = nodes.op("Tile", split, nodes.constant([1, 1, group, 1, 1]))
        return nodes.op("Reshape", many, nodes.constant([0, variant.heads, -1, variant.head_dim]))

    def _masked(self, scores: str, slots: str, queries: str) -> str:
        variant, nodes = self._variant, self._nodes
        seen = nodes.op("LessOrEqual", slots, queries)
        if variant.masking is Masking.UNMASKED:
            return scores
        if variant.masking is Masking.BLOCKS:
            four = nodes.constant(4)
            same = nodes.op("Equal", nodes.op("Div", slots, four), nodes.op("Div", queries, four))
            seen = nodes.op("And", seen, same)
        if variant.window:
            since = nodes.op("Sub", queries, nodes.constant(variant.window))
            seen = nodes.op("And", seen, nodes.op("Greater", slots, since))
        if variant.masking is Masking.SELECTED:
            return nodes.op("Where", seen, scores, nodes.constant(-1e9, np.float32))
        bias = nodes.op("Where", seen, nodes.constant(0, np.float32), nodes.constant(-np.inf, np.float32))
        if variant.masking is Masking.ALIBI:
            distance = nodes.op("Cast", nodes.op("Sub", slots, queries), to=TensorProto.FLOAT)
            bias = nodes.op("Add", bias, nodes.op("Mul", distance, nodes.constant(0.1, np.float32)))
        return nodes.op("Add", scores, bias)

    def _weight(self, name: str, first: int, second: int) -> str:
        value = self._random.standard_normal((first, second)) / np.sqrt(WIDTH)
        return self._nodes.constant(value, np.float32, name)


CONTEXT = 96
NOWHERE = Path()
CANNOT = "such a graph cannot be upgraded; edge-run may run it as it is"


def found(variant: DecoderVariant) -> tuple[Attention, Rotation | None]:
    runner = SubgraphRunner(EditableGraph(DecoderWriter(variant).model(), NOWHERE))
    (attention,) = find_attention(runner, CONTEXT)
    return attention, find_rotation(runner, attention, CONTEXT, [])


def check_upgrade(model: onnx.ModelProto) -> EditableGraph:
    """Upgrade a graph, and compare it with its source in one pass, in steps and over a token tree."""
    source, graph = EditableGraph(model, NOWHERE), EditableGraph(model, NOWHERE)
    fuse_operators(graph, CONTEXT)
    caches = identify_io(graph)
    attention = wire_attention(graph, caches, CONTEXT, None)
    select_positions(graph)
    reference = run_reference(source, identify_io(source), attention, VOCABULARY)
    assert require_same(NOWHERE, graph.model(in_place), reference) < 1e-3
    return graph


HEADS = st.sampled_from([{"heads": heads, "kv_heads": kv} for heads, kv in ((4, 2), (4, 4), (3, 1), (6, 2))])
WITHOUT_ROTATION = st.builds(
    lambda heads, **rest: DecoderVariant(**heads, **rest, rotary=RotaryPairs.NONE),
    heads=HEADS,
    head_dim=st.sampled_from([8, 16, 24]),
    scale=st.floats(0.01, 2.0),
    scale_on_both=st.booleans(),
    softcap=st.sampled_from([0.0, 5.0, 50.0]),
    window=st.sampled_from([0, 2, 7, 40, 95, 96, 200]),
    masking=st.sampled_from([Masking.ADDED, Masking.SELECTED]),
)


@settings(max_examples=20)
@given(variant=WITHOUT_ROTATION)
@example(DecoderVariant(head_dim=24, scale=24**-0.5, rotary=RotaryPairs.NONE))
def test_heads_scale_cap_and_window_are_found(variant: DecoderVariant) -> None:
    attention, rotation = found(variant)
    for name in ("heads", "kv_heads", "head_dim"):
        assert getattr(attention, name) == getattr(variant, name)
    usual = variant.scale == variant.head_dim**-0.5  # is found exactly
    assert attention.scale == (variant.scale if usual else pytest.approx(variant.scale, rel=1e-4))
    assert attention.softcap == pytest.approx(variant.softcap, rel=1e-4)
    assert attention.window == (variant.window if 0 < variant.window < CONTEXT else -1)
    assert rotation is None


@settings(max_examples=15)
@given(
    variant=st.builds(
        DecoderVariant,
        head_dim=st.just(24),
        rotary=st.sampled_from([RotaryPairs.HALVES, RotaryPairs.ADJACENT]),
        rotary_dim=st.sampled_from([4, 10, 16, 24]),
        rotary_scale=st.sampled_from([1.0, 1.3]),
        tokens_first=st.booleans(),
    )
)
def test_rotation_is_found(variant: DecoderVariant) -> None:
    _, rotation = found(variant)
    table, pairs = rotation[2], variant.rotary_dim // 2
    assert (table.pairs, table.interleaved) == (pairs, variant.rotary is RotaryPairs.ADJACENT)
    angles = np.arange(CONTEXT)[:, None] * 100.0 ** -(np.arange(pairs) / pairs)
    np.testing.assert_allclose(table.cosines, variant.rotary_scale * np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(table.sines, variant.rotary_scale * np.sin(angles), atol=1e-5)


FUSED = {
    "halves": (DecoderVariant(), 0),
    "none": (DecoderVariant(rotary=RotaryPairs.NONE), 0),
    "neighbours": (DecoderVariant(rotary=RotaryPairs.ADJACENT, head_dim=16, rotary_dim=16), 0),
    "some": (DecoderVariant(head_dim=32, rotary_dim=16), 0),
    "outside": (DecoderVariant(head_dim=24, rotary_dim=12, tokens_first=True), 2),
    "unlike": (DecoderVariant(key_rotary_scale=2.0), 0),
    "of-the-length": (DecoderVariant(rotary=RotaryPairs.LENGTH_DEPENDENT), 0),
    "window": (DecoderVariant(layers=2, window=6, masking=Masking.SELECTED), 0),
    "softcap": (DecoderVariant(softcap=5.0, scale=0.9, scale_on_both=True), 0),
    "one-key-head": (DecoderVariant(heads=3, kv_heads=1), 0),
    "traced-at-one": (DecoderVariant(masking=Masking.UNMASKED), 0),
}
"""Decoders, and how many rotations are outside of attention, which rotates multiples of 16 channels."""


@pytest.mark.parametrize(("variant", "outside"), FUSED.values(), ids=FUSED)
def test_fused_attention_computes_the_same(variant: DecoderVariant, outside: int) -> None:
    graph = check_upgrade(DecoderWriter(variant).model())
    attention = graph.nodes_of("GroupQueryAttention")
    assert len(attention) == variant.layers
    assert len(graph.nodes_of("RotaryEmbedding")) == outside
    by_position = variant.rotary in (RotaryPairs.HALVES, RotaryPairs.ADJACENT) and variant.key_rotary_scale == 1
    inside = by_position and not outside
    assert [node.attribute("do_rotary") for node in attention] == [int(inside)] * variant.layers
    assert not graph.nodes_of("Softmax", "Tile", "Expand")


@pytest.mark.parametrize(
    ("variant", "what"),
    [
        (DecoderVariant(masking=Masking.ALIBI), "something other than a mask is added to its scores"),
        (DecoderVariant(masking=Masking.BLOCKS), "its mask is neither causal nor a sliding window"),
        (DecoderVariant(scale=0.0, scale_on_both=True), "its scores are neither scaled nor capped in a known way"),
        (DecoderVariant(scale=-0.25), "its scores are neither scaled nor capped in a known way"),
        (DecoderVariant(head_dim=20, rotary=RotaryPairs.NONE), "requires a multiple of 8; run it as it is"),
    ],
    ids=["alibi", "blocks", "zero-scale", "negative-scale", "head size"],
)
def test_unknown_masks_scales_and_sizes_are_refused(variant: DecoderVariant, what: str) -> None:
    with pytest.raises(BundleError) as refused:
        check_upgrade(DecoderWriter(variant).model())
    unknown = f"the model's attention in layer 0 is not recognized: {what}; {CANNOT}"
    sized = "the model's heads have 20 channels, and fused attention requires a multiple of 8; run it as it is"
    assert str(refused.value) == (sized if variant.head_dim == 20 else unknown)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("slope", [0.0, 0.5])
def test_window_of_a_bias_is_found(window: int, slope: float) -> None:
    """The bias is computed over slots from the length of the mask: causal, or with a window; a slope is refused."""
    nodes = Nodes(17)
    total, new = nodes.extent("attention_mask", 1), nodes.extent("input_ids", 1)
    queries = nodes.span(nodes.op("Sub", total, new), total)
    columns = nodes.op("Unsqueeze", queries, nodes.constant([1]))
    distance = nodes.op("Sub", columns, nodes.span(nodes.constant([0]), total))
    near = nodes.op("Less", distance, nodes.constant(window or 1 << 40))
    seen = nodes.op("And", near, nodes.op("GreaterOrEqual", distance, nodes.constant(0)))
    sloped = nodes.op("Mul", nodes.op("Cast", distance, to=TensorProto.FLOAT), nodes.constant(slope, np.float32))
    flat = nodes.op("Where", seen, sloped, nodes.constant(-3e38, np.float32))
    bias = nodes.op("Unsqueeze", flat, nodes.constant([0, 1]))
    axes = {"input_ids": "new", "attention_mask": "total"}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [1, axis]) for name, axis in axes.items()]
    model = nodes.model(inputs, [onnx.ValueInfoProto(name=bias)])
    runner = SubgraphRunner(EditableGraph(model, NOWHERE))
    if slope:
        with pytest.raises(BundleError, match="neither a mask nor a window"):
            window_of_bias(runner, bias, 100)
    else:
        assert window_of_bias(runner, bias, 100) == window
        assert window_of_bias(runner, bias, 30) == 0  # a sequence this short is inside the window


def test_output_that_is_not_a_cache_is_refused() -> None:
    graph = EditableGraph(DecoderWriter(DecoderVariant()).model(), NOWHERE)
    (softmax,) = graph.nodes_of("Softmax")
    weights = softmax.output(0)
    graph.outputs[weights] = graph.outputs["logits"]
    with pytest.raises(BundleError) as refused:
        find_attention(SubgraphRunner(graph), CONTEXT)
    assert str(refused.value) == (
        f"the model's attention is not recognized: the output {weights} is not a cache of an attention; {CANNOT}"
    )


@pytest.mark.parametrize("examples", [10, pytest.param(200, marks=pytest.mark.nightly)])
def test_replaced_nodes(examples: int) -> None:
    """Replace any one node by another: the upgrade is refused in one line, or agrees with its source."""

    @settings(max_examples=examples)
    @given(data=st.data())
    def upgraded_or_refused(data: st.DataObject) -> None:
        model = DecoderWriter(DecoderVariant(window=7)).model()
        node = model.graph.node[data.draw(st.integers(0, len(model.graph.node) - 1), label="node")]
        ops = ["Add", "Sub", "Mul", "Identity", "Neg", "Exp", "Softmax", "MatMul"]
        node.op_type = data.draw(st.sampled_from(ops), label="op")
        del node.attribute[:]
        inputs = 1 if node.op_type in ("Identity", "Neg", "Exp", "Softmax") else 2
        node.input[:] = [*node.input, node.input[0]][:inputs]
        message = ""
        try:
            check_upgrade(model)
        except EdgeError as error:
            message = str(error)
        assert "\n" not in message

    upgraded_or_refused()
