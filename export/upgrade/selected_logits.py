"""Computes logits only for the selected positions.

The graph is cut after the attention of the last layer: from there on all positions are processed separately, by
operators that act on the last axis. Each value that crosses the cut (the attention output and the residual) passes
through a Gather by `logit_rows`. If one of the operators is not known to process positions separately, only the input
of the LM head is gathered.
"""

from __future__ import annotations

from typing import Final

from onnx import TensorProto, helper

from ..graph import inputs_outputs
from .decoder_io import constant_inputs, find_lm_head, stored_constant
from .editable import EditableGraph, Node
from .float_linears import matrix_of
from .graph_parts import unsupported

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
    if graph.element_type(logits) != TensorProto.FLOAT:
        logits = graph.value("Cast", [logits], name="logits.float", to=TensorProto.FLOAT)
    graph.set_output(helper.make_tensor_value_info(inputs_outputs.LOGITS, TensorProto.FLOAT, ["R", width]), logits)


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
