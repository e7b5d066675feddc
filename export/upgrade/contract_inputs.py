"""GroupQueryAttention on the contract's inputs: lengths, positions, bias, and caches bound in place.

What the operator reads is docs/graph-contract.md's, so whatever made masks, lengths and positions before is swept away.
A layer that sees only the last W rows keeps doing so by *position*: the operator's own window counts slots, and in a
token tree a row's slot is further on than its position. So the window is part of the bias, made once for all layers of
that window, and the operator's own is taken away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from ...errors import BundleError
from ..graph import inputs_outputs
from .decoder_io import MASK, POSITIONS, TOKENS, CachePort, Ports
from .edit.editable import EditableGraph, Node
from .patterns.masks import window_of_bias

BIAS: Final = "attention_bias"
LAST_SLOT: Final = "seqlens_k"
TOTAL: Final = "total_sequence_length"

_HIDDEN: Final = np.array(-1e9, np.float32)


@dataclass(frozen=True)
class AttentionForm:
    """What the attention layers have in common."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def wire_attention(graph: EditableGraph, ports: Ports, context: int, head_dim: int | None) -> AttentionForm:
    """Let every GroupQueryAttention read the contract's inputs and name the caches as the contract does.

    Args:
        graph: the decoder; all its attention is fused.
        ports: of `settle_ports`.
        context: positions that will be served: a window that is no shorter is none.
        head_dim: channels of a head where the settings say so; the graph itself is asked first.

    Raises:
        BundleError: the attention is of a kind that the contract has no place for.
    """
    layers = [node for node in graph.in_order() if node.op == "GroupQueryAttention"]
    form = _form_of(graph, layers, ports, head_dim)
    kind = graph.element_type(ports.caches[0].past)
    for port in ports.caches:  # for the experiments that tell masks
        state_cache_shape(graph, port, form.kv_heads, form.head_dim)
    windows = [_window(graph, node, context) for node in layers]
    _declare_inputs(graph)
    biases = {0: _bias_of(graph, kind)}
    for node, window in zip(layers, windows, strict=True):
        if window not in biases:
            biases[window] = _windowed(graph, window, kind)
        _wire(graph, node, biases[window])
    for node in graph.nodes_of("RotaryEmbedding"):
        place = 1 if node.domain else 3
        if node.input(place):  # else its cosines are those of the rows already
            graph.set_input(node, place, POSITIONS)
    _name_caches(graph, ports.caches, form, kind)
    graph.sweep()
    _state_lengths(graph, form)
    graph.sweep()
    return form


def state_cache_shape(graph: EditableGraph, port: CachePort, kv_heads: int, head_dim: int) -> None:
    """Declare what a cache input has, where the graph leaves heads or channels open."""
    shape: list[str | int] = [1, kv_heads, "past_sequence_length", head_dim]
    kind = graph.element_type(port.past)
    graph.inputs[port.past].CopyFrom(helper.make_tensor_value_info(port.past, kind, shape))


def _form_of(graph: EditableGraph, layers: list[Node], ports: Ports, head_dim: int | None) -> AttentionForm:
    forms = {
        (
            node.attribute("num_heads", 0),
            node.attribute("kv_num_heads", 0),
            _head_dim(graph, node, port) or head_dim or 0,
        )
        for node, port in zip(layers, ports.caches[::2], strict=True)
    }
    if len(forms) != 1:
        raise BundleError("the model's layers have heads of different sizes or numbers", "run it as it is")
    ((heads, kv_heads, size),) = forms
    if not size:
        raise BundleError("nothing says how many channels a head has", "put the model's config.json beside it")
    return AttentionForm(len(layers), heads, kv_heads, size)


def _head_dim(graph: EditableGraph, node: Node, port: CachePort) -> int | None:
    """Channels of a head: as the cache declares it, or by the width of what attention feeds."""
    shape = graph.shape(port.past)
    if shape is not None and len(shape) == 4 and isinstance(shape[3], int) and shape[3] > 0:
        return shape[3]
    for reader in graph.consumers(node.output(0)):
        width = reader.attribute("K")
        weight = graph.tensors.get(reader.input(1))
        if reader.op == "MatMul" and weight is not None and len(weight.shape) == 2:
            width = weight.shape[0]
        if isinstance(width, int):
            return width // int(node.attribute("num_heads"))
    return None


def _window(graph: EditableGraph, node: Node, context: int) -> int:
    """Rows that a row of the layer sees, itself included; 0 for all that come before."""
    if not node.attribute("causal", 1):
        raise BundleError("the model's attention looks ahead", "give a decoder")
    if node.input(12) or node.input(13):
        raise BundleError("the model keeps its cache in whole numbers (quantized)", "run it as it is")
    windows = [node.attribute("local_window_size", -1)]
    if node.input(10):
        windows.append(window_of_bias(graph, node.input(10), context))
    limits = [window for window in windows if 0 < window < context]
    return min(limits, default=0)


def _declare_inputs(graph: EditableGraph) -> None:
    for info in inputs_outputs.pass_inputs():
        if info.name in graph.inputs and info.name in (TOKENS, POSITIONS):
            _settle_whole(graph, info)
        elif info.name in graph.inputs:
            graph.inputs[info.name].CopyFrom(info)
        else:
            graph.add_input(info)


def _settle_whole(graph: EditableGraph, info: ValueInfoProto) -> None:
    """Give token or position ids the contract's type and shape, and what read them before what it was used to."""
    value, readers = info.name, graph.consumers(info.name)
    kind, shape = graph.element_type(value), graph.shape(value) or ()
    if kind != info.type.tensor_type.elem_type:
        value = graph.add("Cast", [value], name=f"{info.name}.typed", to=kind).output(0)
    if len(shape) == 3:  # positions of time, height and width
        axes = graph.add_tensor("positions.axes", np.array([0], np.int64))
        lifted = graph.add("Unsqueeze", [value, axes], name="positions.lifted").output(0)
        copies = graph.add_tensor("positions.copies", np.array([shape[0] or 3, 1, 1], np.int64))
        value = graph.add("Expand", [lifted, copies], name="positions.copied").output(0)
    for node in readers:
        graph.set_inputs(node, [value if name == info.name else name for name in node.inputs])
    graph.inputs[info.name].CopyFrom(info)


def _bias_of(graph: EditableGraph, kind: int) -> str:
    """The contract's bias in the type that the graph computes in."""
    if kind == TensorProto.FLOAT:
        return BIAS
    return graph.add("Cast", [BIAS], name="attention_bias.typed", to=kind).output(0)


def _windowed(graph: EditableGraph, window: int, kind: int) -> str:
    """The bias with everything `window` positions back and more hidden, [1, 1, M, T]."""
    stem = f"window.{window}"
    keys = _key_positions(graph)
    axes = graph.add_tensor(f"{stem}.axes", np.array([1, 3], np.int64))
    queries = graph.add("Unsqueeze", [POSITIONS, axes], name=f"{stem}.queries").output(0)
    distance = graph.add("Sub", [queries, keys], name=f"{stem}.distance").output(0)
    limit = graph.add_tensor(f"{stem}.limit", np.array(window, np.int64))
    near = graph.add("Less", [distance, limit], name=f"{stem}.near").output(0)
    hidden = graph.add_tensor(f"{stem}.hidden", _HIDDEN)
    value = graph.add("Where", [near, BIAS, hidden], name=f"{stem}.bias").output(0)
    return value if kind == TensorProto.FLOAT else graph.add("Cast", [value], name=f"{stem}.typed", to=kind).output(0)


def _key_positions(graph: EditableGraph) -> str:
    """Positions of all T rows: cached ones stand at their slots, new ones where position_ids says. int64 [T]."""
    if graph.producer("keys.positions") is not None:
        return "keys.positions"
    first = graph.add_tensor("rows.first", np.array([0], np.int64))
    shape = graph.add("Shape", [POSITIONS], name="rows.shape").output(0)
    last = graph.add_tensor("rows.axis", np.array(1, np.int64))
    rows = graph.add("Gather", [shape, last], name="rows.count", axis=0).output(0)
    total = graph.add("Cast", [TOTAL], name="total.wide", to=TensorProto.INT64).output(0)
    past = graph.add("Sub", [total, rows], name="past.count").output(0)
    zero, one = (
        graph.add_tensor(f"rows.{name}", np.array(value, np.int64)) for name, value in (("zero", 0), ("one", 1))
    )
    cached = graph.add("Range", [zero, past, one], name="keys.cached").output(0)
    new = graph.add("Squeeze", [POSITIONS, first], name="keys.new").output(0)
    return graph.add("Concat", [cached, new], name="keys.positions", axis=0).output(0)


def _wire(graph: EditableGraph, node: Node, bias: str) -> None:
    inputs = [*node.inputs, *[""] * (11 - len(node.inputs))]
    inputs[5], inputs[6], inputs[10] = LAST_SLOT, TOTAL, bias
    inputs[9] = POSITIONS if node.attribute("do_rotary", 0) else ""
    graph.set_inputs(node, inputs)
    for name in ("local_window_size", "sliding_window_cache"):
        graph.set_attribute(node, name, None)


def _name_caches(graph: EditableGraph, caches: tuple[CachePort, ...], form: AttentionForm, kind: int) -> None:
    shape: list[str | int] = [1, form.kv_heads, "capacity", form.head_dim]
    held = [(graph.fresh(f"cache.{index}.past"), graph.fresh(f"cache.{index}.present")) for index in range(len(caches))]
    for port, (past, present) in zip(caches, held, strict=True):  # first out of each other's way
        graph.rename(port.past, past)
        graph.rename(port.present, present)
    for index, (past, present) in enumerate(held):
        layer, half = divmod(index, 2)
        names = (
            (inputs_outputs.past_value, inputs_outputs.present_value)
            if half
            else (inputs_outputs.past_key, inputs_outputs.present_key)
        )
        for old, new, declared in ((past, names[0](layer), graph.inputs), (present, names[1](layer), graph.outputs)):
            graph.rename(old, new)
            declared[new] = helper.make_tensor_value_info(new, kind, shape)


def _state_lengths(graph: EditableGraph, form: AttentionForm) -> None:
    """Answer what still asks the old mask or a cache for its shape: a cache now has room behind its rows.

    Raises:
        BundleError: something reads more of them than the shape.
    """
    caches = [name for name in graph.inputs if name.startswith("past_key_values.")]
    for name in [MASK, *caches]:
        for node in graph.consumers(name):
            if node.op == "GroupQueryAttention":
                continue
            if node.op != "Shape":
                what = "mask" if name == MASK else "cache"
                raise BundleError(
                    f"the model's {node.op} node {node.name} reads its {what} in a way that is not known",
                    "run it as it is",
                )
            whole = _mask_shape(graph) if name == MASK else _cache_shape(graph, form)
            start, end = node.attribute("start", 0), node.attribute("end")
            if start or end is not None:
                bounds = [
                    graph.add_tensor(f"{node.output(0)}.{key}", np.array([value], np.int64))
                    for key, value in (("start", start), ("end", np.iinfo(np.int64).max if end is None else end))
                ]
                whole = graph.add("Slice", [whole, *bounds], name=f"{node.output(0)}.part").output(0)
            graph.replace_uses(node.output(0), whole)
    graph.inputs.pop(MASK, None)


def _mask_shape(graph: EditableGraph) -> str:
    """[1, T]"""
    return _extents(graph, "mask.shape", [1, _total(graph)])


def _cache_shape(graph: EditableGraph, form: AttentionForm) -> str:
    """[1, heads, T - M, channels]"""
    _key_positions(graph)
    first = graph.add_tensor("past.axis", np.array([0], np.int64))
    past = graph.add("Unsqueeze", ["past.count", first], name="past.extent").output(0)
    return _extents(graph, "past.shape", [1, form.kv_heads, past, form.head_dim])


def _total(graph: EditableGraph) -> str:
    flat = graph.add_tensor("total.flat", np.array([1], np.int64))
    wide = graph.add("Cast", [TOTAL], name="total.extent", to=TensorProto.INT64).output(0)
    return graph.add("Reshape", [wide, flat], name="total.extents").output(0)


def _extents(graph: EditableGraph, name: str, parts: list[int | str]) -> str:
    values = [
        graph.add_tensor(f"{name}.{index}", np.array([part], np.int64)) if isinstance(part, int) else part
        for index, part in enumerate(parts)
    ]
    return graph.add("Concat", values, name=name, axis=0).output(0)
