"""Attention and rotary embedding in plain operators are recognized by what they compute, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun import BundleError, EdgeError
from edgerun.export.upgrade.contract_inputs import wire_attention
from edgerun.export.upgrade.decoder_io import identify_io
from edgerun.export.upgrade.edit.editable import EditableGraph
from edgerun.export.upgrade.edit.tensor_writers import InPlace
from edgerun.export.upgrade.parity import require_same, run_reference
from edgerun.export.upgrade.patterns.attention_pattern import Attention, find_attention
from edgerun.export.upgrade.patterns.plain_operators import fuse_operators
from edgerun.export.upgrade.patterns.rotary_pattern import Rotation, find_rotation
from edgerun.export.upgrade.selected_logits import select_positions
from edgerun.export.upgrade.subgraph_runner import SubgraphRunner
from support.naive_decoder import VOCABULARY, Masking, Plain, Turning, plain_decoder

CONTEXT = 96
NOWHERE = Path()
CANNOT = "such a graph cannot be upgraded; edge-run may run it as it is"


def graph_of(plain: Plain) -> EditableGraph:
    return EditableGraph(plain_decoder(plain), NOWHERE)


def found(plain: Plain) -> tuple[Attention, Rotation | None]:
    runner = SubgraphRunner(graph_of(plain))
    (attention,) = find_attention(runner, CONTEXT)
    return attention, find_rotation(runner, attention, CONTEXT, [])


def upgraded(plain: Plain) -> EditableGraph:
    return check_upgrade(plain_decoder(plain))


def check_upgrade(model: onnx.ModelProto) -> EditableGraph:
    """Upgrade a graph, and compare it with its source in one pass, in steps and over a token tree."""
    source, graph = EditableGraph(model, NOWHERE), EditableGraph(model, NOWHERE)
    fuse_operators(graph, CONTEXT)
    io = identify_io(graph)
    attention = wire_attention(graph, io, CONTEXT, None)
    select_positions(graph, io.logits)
    graph.forget_types()
    reference = run_reference(source, identify_io(source), attention, VOCABULARY)
    assert require_same(NOWHERE, attention, graph.model(InPlace()), reference) < 1e-3
    return graph


@settings(max_examples=20)
@given(
    heads=st.sampled_from([(4, 2), (4, 4), (3, 1), (6, 2)]),
    head_dim=st.sampled_from([8, 16, 24]),
    scale=st.floats(0.01, 2.0),
    both=st.booleans(),
    softcap=st.sampled_from([0.0, 5.0, 50.0]),
    window=st.sampled_from([0, 2, 7, 40, 95, 96, 200]),
    masking=st.sampled_from([Masking.ADDED, Masking.CHOSEN]),
)
def test_heads_scale_cap_and_window_are_found(
    heads: tuple[int, int],
    head_dim: int,
    scale: float,
    both: bool,
    softcap: float,
    window: int,
    masking: Masking,
) -> None:
    plain = Plain(
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        scale=scale,
        scale_on_both=both,
        softcap=softcap,
        window=window,
        masking=masking,
        turning=Turning.NONE,
    )
    attention, rotation = found(plain)
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (*heads, head_dim)
    assert attention.scale == pytest.approx(scale, rel=1e-4)
    assert attention.softcap == pytest.approx(softcap, rel=1e-4)
    assert attention.window == (window if 0 < window < CONTEXT else -1)
    assert rotation is None


def test_default_scale_is_exact() -> None:
    attention, _ = found(Plain(head_dim=24, scale=24**-0.5, turning=Turning.NONE))
    assert attention.scale == 24**-0.5


@settings(max_examples=15)
@given(
    turning=st.sampled_from([Turning.HALVES, Turning.NEIGHBOURS]),
    turned=st.sampled_from([4, 10, 16, 24]),
    factor=st.sampled_from([1.0, 1.3]),
    rows_first=st.booleans(),
)
def test_rotation_is_found(turning: Turning, turned: int, factor: float, rows_first: bool) -> None:
    plain = Plain(head_dim=24, turning=turning, turned=turned, factor=factor, rows_first=rows_first)
    _, rotation = found(plain)
    assert rotation is not None
    table = rotation.table
    assert (table.pairs, table.interleaved) == (turned // 2, turning is Turning.NEIGHBOURS)
    angles = np.arange(CONTEXT)[:, None] * 100.0 ** -(np.arange(turned // 2) / (turned // 2))
    np.testing.assert_allclose(table.cosines, factor * np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(table.sines, factor * np.sin(angles), atol=1e-5)


@pytest.mark.parametrize(
    "plain",
    [Plain(turning=Turning.BY_LENGTH), Plain(key_factor=2.0)],
    ids=["depends on the length", "scales keys differently"],
)
def test_rotation_that_depends_on_more_than_position_is_not_recognized(plain: Plain) -> None:
    assert found(plain)[1] is None


@pytest.mark.parametrize(
    "plain",
    [
        Plain(),
        Plain(turning=Turning.NONE),
        Plain(turning=Turning.NEIGHBOURS, head_dim=16, turned=16),
        Plain(head_dim=32, turned=16),
        Plain(head_dim=24, turned=12, rows_first=True),
        Plain(key_factor=2.0),
        Plain(layers=2, window=6, masking=Masking.CHOSEN),
        Plain(softcap=5.0, scale=0.9, scale_on_both=True),
        Plain(heads=3, kv_heads=1),
        Plain(masking=Masking.OPEN),
    ],
    ids=[
        "halves",
        "none",
        "neighbours",
        "some",
        "outside",
        "unlike",
        "window",
        "softcap",
        "one-key-head",
        "traced-at-one",
    ],
)
def test_fused_attention_computes_the_same(plain: Plain) -> None:
    graph = upgraded(plain)
    assert len(graph.nodes_of("GroupQueryAttention")) == plain.layers
    assert not graph.nodes_of("Softmax", "Tile", "Expand")


def test_rotation_inside_attention_requires_multiples_of_16_channels() -> None:
    inside, outside = upgraded(Plain(head_dim=32, turned=16)), upgraded(Plain(head_dim=24, turned=12))
    assert [node.attribute("do_rotary") for node in inside.nodes_of("GroupQueryAttention")] == [1]
    assert not inside.nodes_of("RotaryEmbedding")
    assert [node.attribute("do_rotary") for node in outside.nodes_of("GroupQueryAttention")] == [0]
    assert len(outside.nodes_of("RotaryEmbedding")) == 2


@pytest.mark.parametrize(
    ("plain", "what"),
    [
        (Plain(masking=Masking.SLOPED), "something other than a mask is added to its scores"),
        (Plain(masking=Masking.BLOCKS), "its mask is neither causal nor a sliding window"),
        (Plain(scale=0.0, scale_on_both=True), "its scores are neither scaled nor capped in a known way"),
        (Plain(scale=-0.25), "its scores are neither scaled nor capped in a known way"),
    ],
    ids=["alibi", "blocks", "zero-scale", "negative-scale"],
)
def test_unknown_masks_and_scales_are_refused(plain: Plain, what: str) -> None:
    with pytest.raises(BundleError) as refused:
        upgraded(plain)
    assert str(refused.value) == f"the model's attention in layer 0 is not recognized: {what}; {CANNOT}"
    assert "\n" not in str(refused.value)


def test_unsupported_head_size_is_refused() -> None:
    with pytest.raises(BundleError, match="heads have 20 channels, and fused attention requires a multiple of 8"):
        upgraded(Plain(head_dim=20, turning=Turning.NONE))


def test_output_that_is_not_a_cache_is_refused() -> None:
    graph = graph_of(Plain())
    (softmax,) = graph.nodes_of("Softmax")
    weights = softmax.output(0)
    graph.outputs[weights] = graph.outputs["logits"]
    with pytest.raises(BundleError) as refused:
        find_attention(SubgraphRunner(graph), CONTEXT)
    assert str(refused.value) == (
        f"the model's attention is not recognized: the output {weights} is not a cache of an attention; {CANNOT}"
    )


def replace_one_node(data: st.DataObject) -> None:
    """Replace any one node by another: the upgrade is refused in one line, or agrees with its source."""
    model = plain_decoder(Plain(window=7))
    nodes = model.graph.node
    node = nodes[data.draw(st.integers(0, len(nodes) - 1), label="node")]
    other = data.draw(st.sampled_from(["Add", "Sub", "Mul", "Identity", "Neg", "Exp", "Softmax", "MatMul"]), label="op")
    node.op_type = other
    del node.attribute[:]
    if other in ("Identity", "Neg", "Exp", "Softmax"):
        del node.input[1:]
    elif len(node.input) != 2:
        del node.input[2:]
        node.input.extend([node.input[0]] * (2 - len(node.input)))
    message = ""
    try:
        check_upgrade(model)
    except EdgeError as error:
        message = str(error)
    assert "\n" not in message


@settings(max_examples=10)
@given(data=st.data())
def test_few_replaced_nodes(data: st.DataObject) -> None:
    replace_one_node(data)


@pytest.mark.nightly
@settings(max_examples=200)
@given(data=st.data())
def test_replaced_nodes(data: st.DataObject) -> None:
    replace_one_node(data)
