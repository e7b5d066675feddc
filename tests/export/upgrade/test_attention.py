"""Attention and rotary embedding in variant operators are recognized by what they compute, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgerun import BundleError, EdgeError
from edgerun.export.upgrade.attention_fusion import fuse_operators
from edgerun.export.upgrade.attention_pattern import Attention, find_attention
from edgerun.export.upgrade.contract_inputs import window_of_bias, wire_attention
from edgerun.export.upgrade.decoder_io import identify_io
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.export.upgrade.graph_parts import in_place
from edgerun.export.upgrade.parity import require_same, run_reference
from edgerun.export.upgrade.rotary_pattern import Rotation, find_rotation
from edgerun.export.upgrade.selected_logits import select_positions
from edgerun.export.upgrade.subgraph_runner import SubgraphRunner
from support.attention_variants import VOCABULARY, DecoderVariant, Masking, RotaryPairs, plain_decoder
from support.layout_nodes import Nodes

CONTEXT = 96
NOWHERE = Path()
CANNOT = "such a graph cannot be upgraded; edge-run may run it as it is"


def graph_of(variant: DecoderVariant) -> EditableGraph:
    return EditableGraph(plain_decoder(variant), NOWHERE)


def found(variant: DecoderVariant) -> tuple[Attention, Rotation | None]:
    runner = SubgraphRunner(graph_of(variant))
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
    graph = check_upgrade(plain_decoder(variant))
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
        check_upgrade(plain_decoder(variant))
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
    graph = graph_of(DecoderVariant())
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
        model = plain_decoder(DecoderVariant(window=7))
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
