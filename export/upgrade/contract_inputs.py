"""Makes GroupQueryAttention read the inputs of the graph contract.

The operator reads the lengths, positions, bias and caches of docs/graph-contract.md; the nodes that computed masks,
lengths and positions before are removed. In a layer with a sliding window, a token sees the last W *positions*. The
operator's own window counts slots, and in a token tree the slot of a token may be ahead of its position. So the window
becomes part of the bias, which is computed once for all layers with that window, and the operator's own is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from ...errors import BundleError, ExportError
from ..graph import inputs_outputs
from .decoder_io import MASK, POSITIONS, TOKENS, CacheTensor, DecoderIO, PassShape
from .edit.editable import EditableGraph, Node
from .subgraph_runner import SubgraphRunner

BIAS: Final = "attention_bias"
LAST_SLOT: Final = "seqlens_k"
TOTAL: Final = "total_sequence_length"

_MASKED: Final = np.array(-1e9, np.float32)
_MASKED_BELOW: Final = -1e4
"""A bias below this hides a position."""
_TRIAL_TOKENS: Final = 3
"""Number of new tokens of the pass that computes a bias."""


@dataclass(frozen=True)
class AttentionShape:
    """Numbers that are the same for all attention layers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def wire_attention(graph: EditableGraph, io: DecoderIO, context: int, head_dim: int | None) -> AttentionShape:
    """Make every GroupQueryAttention read the contract's inputs, and rename the caches as the contract does.

    Args:
        graph: the decoder; all its attention is fused.
        io: its inputs and outputs.
        context: number of positions that will be served; a window of at least this size has no effect.
        head_dim: channels of a head according to the settings, used if the graph does not say it.

    Raises:
        BundleError: the attention has a feature that the contract does not have.
    """
    layers = [node for node in graph.in_order() if node.op == "GroupQueryAttention"]
    attention = _attention_shape(graph, layers, io, head_dim)
    element_type = graph.element_type(io.caches[0].past)
    for cache in io.caches:  # so that masks can be computed on made-up caches
        declare_cache_shape(graph, cache, attention.kv_heads, attention.head_dim)
    windows = [_window(graph, node, context) for node in layers]
    _declare_inputs(graph)
    biases = {0: _typed_bias(graph, element_type)}
    for node, window in zip(layers, windows, strict=True):
        if window not in biases:
            biases[window] = _windowed_bias(graph, window, element_type)
        _wire(graph, node, biases[window])
    for node in graph.nodes_of("RotaryEmbedding"):
        index = 1 if node.domain else 3
        if node.input(index):  # without positions, its cosines have been gathered for the tokens already
            graph.set_input(node, index, POSITIONS)
    _rename_caches(graph, io.caches, attention, element_type)
    graph.sweep()
    _replace_shapes(graph, attention)
    graph.sweep()
    return attention


def declare_cache_shape(graph: EditableGraph, cache: CacheTensor, kv_heads: int, head_dim: int) -> None:
    """Declare heads and channels of a cache input, which some graphs do not declare."""
    shape: list[str | int] = [1, kv_heads, "past_sequence_length", head_dim]
    element_type = graph.element_type(cache.past)
    graph.inputs[cache.past].CopyFrom(helper.make_tensor_value_info(cache.past, element_type, shape))


def window_of_bias(graph: EditableGraph, bias: str, context: int) -> int:
    """Sliding window that an attention bias implements.

    Args:
        graph: the decoder.
        bias: the value, [1, heads or 1, new, total].
        context: number of cached tokens of the trial; a larger window is not recognized.

    Returns:
        Number of positions that a token sees, itself included; 0 for all.

    Raises:
        BundleError: the bias does something else, such as ALiBi.
    """
    lengths = PassShape(_TRIAL_TOKENS, context)
    try:
        value = np.asarray(SubgraphRunner(graph).run([bias], lengths)[bias], np.float64)
    except ExportError as error:
        raise _unknown_bias() from error
    cells = value.reshape(-1, value.shape[-2], value.shape[-1])
    if cells.shape[1:] != (_TRIAL_TOKENS, lengths.total) or np.any(cells != cells[:1]):
        raise _unknown_bias()
    seen = cells[0] > _MASKED_BELOW
    if np.any(cells[0][seen] != 0):
        raise _unknown_bias()
    slots, queries = np.arange(lengths.total), np.arange(context, lengths.total)[:, None]
    seen_before = seen & (slots <= queries)  # the bias may leave later positions visible: the operator masks them
    window = int(seen_before[0].sum())
    if np.array_equal(seen_before, slots <= queries):
        return 0
    if not np.array_equal(seen_before, (slots <= queries) & (slots > queries - window)):
        raise _unknown_bias()
    return window


def _unknown_bias() -> BundleError:
    return BundleError(
        "the model adds something to its attention scores that is neither a mask nor a window", "run it as it is"
    )


def _attention_shape(graph: EditableGraph, layers: list[Node], io: DecoderIO, head_dim: int | None) -> AttentionShape:
    shapes = {
        (
            node.attribute("num_heads", 0),
            node.attribute("kv_num_heads", 0),
            _head_dim(graph, node, cache) or head_dim or 0,
        )
        for node, cache in zip(layers, io.caches[::2], strict=True)
    }
    if len(shapes) != 1:
        raise BundleError("the model's layers differ in the number or size of their heads", "run it as it is")
    ((heads, kv_heads, size),) = shapes
    if not size:
        raise BundleError("the model does not say how many channels a head has", "put its config.json beside it")
    return AttentionShape(len(layers), heads, kv_heads, size)


def _head_dim(graph: EditableGraph, node: Node, cache: CacheTensor) -> int | None:
    """Channels of a head, from the declared cache or else from the width of what reads the attention."""
    shape = graph.shape(cache.past)
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
    """Number of positions that a token sees in a layer, itself included; 0 for all."""
    if not node.attribute("causal", 1):
        raise BundleError("the model's attention is not causal", "give a decoder")
    if node.input(12) or node.input(13):
        raise BundleError("the model's key-value cache is quantized to integers", "run it as it is")
    windows = [node.attribute("local_window_size", -1)]
    if node.input(10):
        windows.append(window_of_bias(graph, node.input(10), context))
    return min((window for window in windows if 0 < window < context), default=0)


def _declare_inputs(graph: EditableGraph) -> None:
    for info in inputs_outputs.pass_inputs():
        if info.name in graph.inputs and info.name in (TOKENS, POSITIONS):
            _declare_ids(graph, info)
        elif info.name in graph.inputs:
            graph.inputs[info.name].CopyFrom(info)
        else:
            graph.add_input(info)


def _declare_ids(graph: EditableGraph, info: ValueInfoProto) -> None:
    """Give token ids or positions the contract's type and shape, and convert them for the nodes that read them."""
    value, readers = info.name, graph.consumers(info.name)
    element_type, shape = graph.element_type(value), graph.shape(value) or ()
    if element_type != info.type.tensor_type.elem_type:
        value = graph.add("Cast", [value], name=f"{info.name}.typed", to=element_type).output(0)
    if len(shape) == 3:  # positions of time, height and width
        axes = graph.add_tensor("positions.axes", np.array([0], np.int64))
        lifted = graph.add("Unsqueeze", [value, axes], name="positions.lifted").output(0)
        copies = graph.add_tensor("positions.copies", np.array([shape[0] or 3, 1, 1], np.int64))
        value = graph.add("Expand", [lifted, copies], name="positions.copied").output(0)
    for node in readers:
        graph.set_inputs(node, [value if name == info.name else name for name in node.inputs])
    graph.inputs[info.name].CopyFrom(info)


def _typed_bias(graph: EditableGraph, element_type: int) -> str:
    """The contract's bias in the type that the graph computes in."""
    if element_type == TensorProto.FLOAT:
        return BIAS
    return graph.add("Cast", [BIAS], name="attention_bias.typed", to=element_type).output(0)


def _windowed_bias(graph: EditableGraph, window: int, element_type: int) -> str:
    """The bias with all positions masked that are at least `window` back, [1, 1, M, T]."""
    stem = f"window.{window}"
    keys = _key_positions(graph)
    axes = graph.add_tensor(f"{stem}.axes", np.array([1, 3], np.int64))
    queries = graph.add("Unsqueeze", [POSITIONS, axes], name=f"{stem}.queries").output(0)
    distance = graph.add("Sub", [queries, keys], name=f"{stem}.distance").output(0)
    limit = graph.add_tensor(f"{stem}.limit", np.array(window, np.int64))
    near = graph.add("Less", [distance, limit], name=f"{stem}.near").output(0)
    masked = graph.add_tensor(f"{stem}.hidden", _MASKED)
    value = graph.add("Where", [near, BIAS, masked], name=f"{stem}.bias").output(0)
    if element_type == TensorProto.FLOAT:
        return value
    return graph.add("Cast", [value], name=f"{stem}.typed", to=element_type).output(0)


def _key_positions(graph: EditableGraph) -> str:
    """Positions of all T keys, int64 [T]: the slot number for cached tokens, `position_ids` for new ones."""
    if graph.producer("keys.positions") is not None:
        return "keys.positions"
    first = graph.add_tensor("rows.first", np.array([0], np.int64))
    shape = graph.add("Shape", [POSITIONS], name="rows.shape").output(0)
    last = graph.add_tensor("rows.axis", np.array(1, np.int64))
    new_count = graph.add("Gather", [shape, last], name="rows.count", axis=0).output(0)
    total = graph.add("Cast", [TOTAL], name="total.wide", to=TensorProto.INT64).output(0)
    past = graph.add("Sub", [total, new_count], name="past.count").output(0)
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


def _rename_caches(
    graph: EditableGraph, caches: tuple[CacheTensor, ...], attention: AttentionShape, element_type: int
) -> None:
    shape: list[str | int] = [1, attention.kv_heads, "capacity", attention.head_dim]
    # The old names may be the new names of other caches, so all are first renamed to names that are free.
    interim = [
        (graph.fresh(f"cache.{index}.past"), graph.fresh(f"cache.{index}.present")) for index in range(len(caches))
    ]
    for cache, (past, present) in zip(caches, interim, strict=True):
        graph.rename(cache.past, past)
        graph.rename(cache.present, present)
    for index, (past, present) in enumerate(interim):
        layer, half = divmod(index, 2)
        names = (
            (inputs_outputs.past_value, inputs_outputs.present_value)
            if half
            else (inputs_outputs.past_key, inputs_outputs.present_key)
        )
        for old, new, declared in ((past, names[0](layer), graph.inputs), (present, names[1](layer), graph.outputs)):
            graph.rename(old, new)
            declared[new] = helper.make_tensor_value_info(new, element_type, shape)


def _replace_shapes(graph: EditableGraph, attention: AttentionShape) -> None:
    """Compute shapes of the old mask and the caches from the contract's inputs: a cache now has unused capacity.

    Raises:
        BundleError: a node reads more of them than the shape.
    """
    caches = [name for name in graph.inputs if name.startswith("past_key_values.")]
    for name in [MASK, *caches]:
        for node in graph.consumers(name):
            if node.op == "GroupQueryAttention":
                continue
            if node.op != "Shape":
                what = "mask" if name == MASK else "cache"
                raise BundleError(
                    f"the model's {node.op} node {node.name} reads its {what} in an unknown way", "run it as it is"
                )
            shape = _mask_shape(graph) if name == MASK else _cache_shape(graph, attention)
            start, end = node.attribute("start", 0), node.attribute("end")
            if start or end is not None:
                bounds = [
                    graph.add_tensor(f"{node.output(0)}.{key}", np.array([value], np.int64))
                    for key, value in (("start", start), ("end", np.iinfo(np.int64).max if end is None else end))
                ]
                shape = graph.add("Slice", [shape, *bounds], name=f"{node.output(0)}.part").output(0)
            graph.replace_uses(node.output(0), shape)
    graph.inputs.pop(MASK, None)


def _mask_shape(graph: EditableGraph) -> str:
    """[1, T], int64 [2]"""
    flat = graph.add_tensor("total.flat", np.array([1], np.int64))
    wide = graph.add("Cast", [TOTAL], name="total.extent", to=TensorProto.INT64).output(0)
    total = graph.add("Reshape", [wide, flat], name="total.extents").output(0)
    return _joined_shape(graph, "mask.shape", [1, total])


def _cache_shape(graph: EditableGraph, attention: AttentionShape) -> str:
    """[1, heads, T - M, channels], int64 [4]"""
    _key_positions(graph)
    first = graph.add_tensor("past.axis", np.array([0], np.int64))
    past = graph.add("Unsqueeze", ["past.count", first], name="past.extent").output(0)
    return _joined_shape(graph, "past.shape", [1, attention.kv_heads, past, attention.head_dim])


def _joined_shape(graph: EditableGraph, name: str, dimensions: list[int | str]) -> str:
    """A shape of numbers and of values int64 [1]."""
    values = [
        graph.add_tensor(f"{name}.{index}", np.array([size], np.int64)) if isinstance(size, int) else size
        for index, size in enumerate(dimensions)
    ]
    return graph.add("Concat", values, name=name, axis=0).output(0)
