"""Makes a graph read the inputs of the graph contract: attention's, and the positions whose logits are wanted.

GroupQueryAttention reads the lengths, positions, bias and caches of docs/graph-contract.md; the nodes that computed
masks, lengths and positions before are removed. In a layer with a sliding window, a token sees the last W *positions*.
The operator's own window counts slots, and in a token tree the slot of a token may be ahead of its position. So the
window becomes part of the bias, which is computed once for all layers with that window, and the operator's own is
removed.

Logits are computed only for the selected positions: the graph is cut after the attention of the last layer, and from
there on all positions are processed separately, by operators that act on the last axis. Each value that crosses the cut
(the attention output and the residual) passes through a Gather by `logit_rows`. If one of the operators is not known to
process positions separately, only the input of the LM head is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from ...errors import BundleError, ExportError
from ..graph import inputs_outputs
from .attention_pattern import sliding_window
from .decoder_io import MASK, POSITIONS, TOKENS, CacheTensor, PassShape, constant_inputs, find_lm_head, stored_constant
from .editable import EditableGraph, Node
from .float_linears import matrix_of
from .graph_parts import Array, unsupported
from .subgraph_runner import SubgraphRunner

BIAS: Final = "attention_bias"
LAST_SLOT: Final = "seqlens_k"
TOTAL: Final = "total_sequence_length"

_MASKED: Final = np.array(-1e9, np.float32)
_MASKED_BELOW: Final = -1e4
"""A bias below this hides a position."""


class AttentionShape(NamedTuple):
    """Numbers that are the same for all attention layers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def wire_attention(
    graph: EditableGraph, caches: tuple[CacheTensor, ...], context: int, head_dim: int | None
) -> AttentionShape:
    """Make every GroupQueryAttention read the contract's inputs, and rename the caches as the contract does.

    Args:
        graph: the decoder; all its attention is fused.
        caches: its caches, key and value of each layer in layer order.
        context: number of positions that will be served; a window of at least this size has no effect.
        head_dim: channels of a head according to the settings, used if the graph does not say it.

    Raises:
        BundleError: the attention has a feature that the contract does not have.
    """
    layers = [node for node in graph.in_order() if node.op == "GroupQueryAttention"]
    attention = _attention_shape(graph, layers, caches, head_dim)
    for cache in caches:  # so that masks can be computed on made-up caches
        declare_cache_shape(graph, cache, attention.kv_heads, attention.head_dim)
    found = {node.input(10): 0 for node in layers}
    if any(found):
        runner = SubgraphRunner(graph)
        found |= {bias: window_of_bias(runner, bias, context) for bias in found if bias}
    windows = [_window(node, found[node.input(10)], context) for node in layers]
    for info in inputs_outputs.pass_inputs():
        if info.name in graph.inputs and info.name in (TOKENS, POSITIONS):
            _convert_ids(graph, info)
        graph.inputs[info.name] = info
    biases = {0: BIAS}
    for node, window in zip(layers, windows, strict=True):
        if window not in biases:
            biases[window] = _windowed_bias(graph, window)
        inputs = [*node.inputs, *[""] * (11 - len(node.inputs))]
        inputs[5], inputs[6], inputs[10] = LAST_SLOT, TOTAL, biases[window]
        inputs[9] = POSITIONS if node.attribute("do_rotary", 0) else ""
        graph.set_inputs(node, inputs)
        for name in ("local_window_size", "sliding_window_cache"):
            graph.set_attribute(node, name, None)
    for node in graph.nodes_of("RotaryEmbedding"):
        index = 1 if node.domain else 3
        if node.input(index):  # without positions, its cosines have been gathered for the tokens already
            graph.set_input(node, index, POSITIONS)
    _rename_caches(graph, caches, attention)
    graph.sweep()
    _replace_shapes(graph, attention)
    graph.sweep()
    return attention


def declare_cache_shape(graph: EditableGraph, cache: CacheTensor, kv_heads: int, head_dim: int) -> None:
    """Declare heads and channels of a cache input, which some graphs do not declare."""
    shape: list[str | int] = [1, kv_heads, "past_sequence_length", head_dim]
    element_type = graph.element_type(cache.past)
    graph.inputs[cache.past].CopyFrom(helper.make_tensor_value_info(cache.past, element_type, shape))


def window_of_bias(runner: SubgraphRunner, bias: str, context: int) -> int:
    """Sliding window that an attention bias implements.

    Args:
        runner: runs the decoder.
        bias: the value, [1, heads or 1, new, total].
        context: number of positions; a window of at least this size has no effect.

    Returns:
        Number of positions that a token sees, itself included; 0 for all.

    Raises:
        BundleError: the bias does something else, such as ALiBi.
    """
    unknown = unsupported("the model adds something to its attention scores that is neither a mask nor a window")

    def visible(lengths: PassShape) -> Array:
        value = np.asarray(runner.run([bias], lengths)[bias], np.float64)
        cells = value.reshape(-1, *value.shape[-2:])
        seen: Array = cells[0] > _MASKED_BELOW
        if seen.shape != (lengths.new, lengths.total) or np.any(cells != cells[:1]) or np.any(cells[0][seen] != 0):
            raise unknown
        return seen

    try:
        if (window := sliding_window(visible, context)) is None:
            raise unknown
    except ExportError as error:
        raise unknown from error
    return max(window, 0)


def _attention_shape(
    graph: EditableGraph, layers: list[Node], caches: tuple[CacheTensor, ...], head_dim: int | None
) -> AttentionShape:
    shapes = {
        (
            node.attribute("num_heads", 0),
            node.attribute("kv_num_heads", 0),
            _head_dim(graph, node, cache) or head_dim or 0,
        )
        for node, cache in zip(layers, caches[::2], strict=True)
    }
    if len(shapes) != 1:
        raise unsupported("the model's layers differ in the number or size of their heads")
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


def _window(node: Node, of_bias: int, context: int) -> int:
    """Number of positions that a token sees in a layer, itself included, as its bias may limit too; 0 for all."""
    if not node.attribute("causal", 1):
        raise BundleError("the model's attention is not causal", "give a decoder")
    if node.input(12) or node.input(13):
        raise unsupported("the model's key-value cache is quantized to integers")
    windows = (node.attribute("local_window_size", -1), of_bias)
    return min((window for window in windows if 0 < window < context), default=0)


def _convert_ids(graph: EditableGraph, info: ValueInfoProto) -> None:
    """Convert token ids or positions of the contract's type and shape for the nodes that read them."""
    value, readers = info.name, graph.consumers(info.name)
    element_type, shape = graph.element_type(value), graph.shape(value) or ()
    if element_type != info.type.tensor_type.elem_type:
        value = graph.value("Cast", [value], name=f"{info.name}.typed", to=element_type)
    if len(shape) == 3:  # positions of time, height and width
        lifted = graph.value("Unsqueeze", [value, [0]], name="positions.lifted")
        value = graph.value("Expand", [lifted, [int(shape[0] or 3), 1, 1]], name="positions.copied")
    graph.replace_uses(info.name, value, readers)


def _windowed_bias(graph: EditableGraph, window: int) -> str:
    """The bias with all positions masked that are at least `window` back, [1, 1, M, T]."""
    stem = f"window.{window}"
    queries = graph.value("Unsqueeze", [POSITIONS, [1, 3]], name=f"{stem}.queries")
    cached = graph.value("Range", [0, _cached_tokens(graph), 1], name="keys.cached")
    new = graph.value("Squeeze", [POSITIONS, [0]], name="keys.new")
    keys = graph.value("Concat", [cached, new], name="keys.positions", axis=0)  # the slot for a cached token
    distance = graph.value("Sub", [queries, keys], name=f"{stem}.distance")
    near = graph.value("Less", [distance, window], name=f"{stem}.near")
    return graph.value("Where", [near, BIAS, _MASKED], name=f"{stem}.bias")


def _cached_tokens(graph: EditableGraph) -> str:
    """T - M, an int64."""
    new = graph.value("Gather", [graph.value("Shape", [POSITIONS], name="new.shape"), 1], name="new.count", axis=0)
    return graph.value("Sub", [_total(graph), new], name="past.count")


def _total(graph: EditableGraph) -> str:
    """T, an int64."""
    return graph.value("Cast", [TOTAL], name="total.wide", to=TensorProto.INT64)


def _rename_caches(graph: EditableGraph, caches: tuple[CacheTensor, ...], attention: AttentionShape) -> None:
    shape: list[str | int] = [1, attention.kv_heads, "capacity", attention.head_dim]
    renamed: dict[str, str] = {}
    for index, cache in enumerate(caches):
        layer, half = divmod(index, 2)
        past, present = (names(layer)[half] for names in (inputs_outputs.past_cache, inputs_outputs.present_cache))
        # The new names may be the old names of other caches, so all are first renamed to names that are free.
        for old, new in ((cache.past, past), (cache.present, present)):
            free = graph.fresh(f"{new}.cache")
            graph.rename(old, free)
            renamed[free] = new
    for free, new in renamed.items():
        graph.rename(free, new)
        declared = graph.inputs if new in graph.inputs else graph.outputs
        declared[new] = helper.make_tensor_value_info(new, TensorProto.FLOAT, shape)


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
                raise unsupported(f"the model's {node.op} node {node.name} reads its {what} in an unknown way")
            if name == MASK:
                total = graph.value("Reshape", [_total(graph), [1]], name="mask.total")
                sizes: list[str | Sequence[int]] = [[1], total]
            else:
                past = graph.value("Reshape", [_cached_tokens(graph), [1]], name="cache.past")
                sizes = [[1, attention.kv_heads], past, [attention.head_dim]]
            shape = graph.value("Concat", sizes, name=f"{node.output(0)}.sizes", axis=0)
            end = node.attribute("end", np.iinfo(np.int64).max)
            part = graph.value("Slice", [shape, [node.attribute("start", 0)], [end]], name=f"{node.output(0)}.part")
            graph.replace_uses(node.output(0), part)
    graph.inputs.pop(MASK, None)


SELECTED: Final = "logit_rows"

_ELEMENTWISE: Final = frozenset(
    (
        *("Abs", "Add", "BiasGelu", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "FastGelu", "Gelu", "HardSigmoid"),
        *("HardSwish", "LeakyRelu", "Max", "Min", "Mul", "Neg", "Pow", "QuickGelu", "Reciprocal", "Relu", "Sigmoid"),
        *("Silu", "Softplus", "Sqrt", "Sub", "Swish", "Tanh", "ThresholdedRelu", "Where"),
    )
)
_ALONG_LAST_AXIS: Final = frozenset(
    (
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization"),
        *("SkipSimplifiedLayerNormalization", "ReduceMean", "ReduceSum", "Softmax", "Split"),
    )
)
_BY_MATRIX: Final = frozenset(("MatMul", "MatMulNBits", "MatMulBnb4", "MoE", "QMoE"))


def select_positions(graph: EditableGraph) -> None:
    """Give logits [R, V] of the positions in `logit_rows` alone.

    Raises:
        BundleError: the model has no head.
    """
    head = find_lm_head(graph)
    _remove_last_position_only(graph, head)
    last = [node for node in graph.in_order() if node.op == "GroupQueryAttention"][-1]
    after = list(dict.fromkeys(node for _, node in graph.readers(last.output(0), lambda _value, _node: True)))
    leaving = {name for node in after for name in node.outputs if name in graph.outputs}
    positionwise = leaving == {inputs_outputs.LOGITS} and all(_is_positionwise(graph, node) for node in after)
    region = after if positionwise else [head]
    inside = {"", *(name for node in region for name in node.outputs)}
    read = dict.fromkeys(name for node in region for name in node.inputs if name not in inside)
    crossing = [name for name in read if stored_constant(graph, name) is None]
    gathered = {name: graph.value("Gather", [name, SELECTED], name=f"asked.{name}", axis=1) for name in crossing}
    for node in region:
        graph.set_inputs(node, [gathered.get(name, name) for name in node.inputs])
    graph.set_input(head, 0, graph.value("Squeeze", [head.input(0), [0]], name="head.rows"))  # [R, hidden]
    width = head.attribute("N")
    if head.op not in ("MatMulNBits", "MatMulBnb4"):
        matrix = matrix_of(graph, head)
        if matrix is None:
            raise unsupported("the weights of the model's LM head are not a constant matrix")
        width = matrix.shape[0]
    logits = inputs_outputs.LOGITS
    graph.set_output(helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["R", width]), logits)


def _is_positionwise(graph: EditableGraph, node: Node) -> bool:
    if node.op in _ELEMENTWISE:
        constants = [graph.tensors[name] for name in node.inputs if name in graph.tensors]
        return all(size == 1 for tensor in constants for size in tensor.shape[:-1])
    if node.op == "Slice":
        return graph.integers(node.input(3)) in ([-1], [2])
    if node.op in _ALONG_LAST_AXIS:
        return _axis(graph, node) == -1
    return node.op in _BY_MATRIX and bool(constant_inputs(graph, node))


def _axis(graph: EditableGraph, node: Node) -> int | None:
    """The only axis that a node works along, -1 for the last; None if there are several."""
    if node.op in ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"):
        return -1
    if node.op.startswith("Reduce"):
        axes = graph.integers(node.input(1)) if node.input(1) else node.attribute("axes")
        return axes[0] if axes and len(axes) == 1 and node.attribute("keepdims", 1) else None
    axis: int = node.attribute("axis", 0 if node.op == "Split" else -1)
    return -1 if axis == 2 else axis


def _remove_last_position_only(graph: EditableGraph, head: Node) -> None:
    """Remove nodes that pass only the last positions to the head: a Gather of index -1, or a Slice."""
    chain: list[Node] = []
    node = graph.producer(head.input(0))
    while node is not None and node.op in ("Gather", "Unsqueeze", "Squeeze", "Slice", "Reshape", "Cast", "GatherND"):
        chain.append(node)
        node = graph.producer(node.input(0))
    while chain and chain[-1].op in ("Cast", "Reshape"):
        chain.pop()
    if any(each.op in ("Gather", "Slice", "GatherND") for each in chain):
        graph.set_input(head, 0, chain[-1].input(0))
        graph.sweep()
