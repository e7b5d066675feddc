"""Attention as one operator of the ONNX standard (opset 23) is written out, so that it is found like any other.

PyTorch's exporter writes `scaled_dot_product_attention` so where it may. What it writes has four axes, a mask and
whole caches; other forms of the operator stay what they are.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..edit.editable import EditableGraph, Node
from .subgraph_probe import Moment, Probe

_HIDDEN: Final = np.array(np.finfo(np.float32).min)
_OTHERWISE: Final = {"is_causal": 0, "softcap": 0.0, "qk_matmul_output_mode": 0}
"""Attributes that must be as they are unless given."""


def spell_out_attention(graph: EditableGraph) -> None:
    """Replace the standard's Attention by products and a softmax.

    Raises:
        BundleError: the graph cannot be run on one sequence with a cache.
        ExportError: what makes a mask cannot be run by itself.
    """
    nodes = [node for node in graph.nodes_of("Attention") if not node.domain]
    if not nodes:
        return
    probe = Probe(graph)
    for node in nodes:
        _replace(graph, probe, node)
    graph.sweep()


def _replace(graph: EditableGraph, probe: Probe, node: Node) -> None:
    query, key, value, mask = (node.input(index) for index in range(4))
    queries, keys = probe.extents(query), probe.extents(key)
    plain = all(node.attribute(name, usual) == usual for name, usual in _OTHERWISE.items())
    if not plain or len([name for name in node.outputs if name]) > 1 or any(node.inputs[4:]) or not mask:
        return
    if queries is None or keys is None or len(queries) != 4 or len(keys) != 4:
        return
    heads, kv_heads, width = queries[1], keys[1], keys[3]
    if not isinstance(heads, int) or not isinstance(kv_heads, int) or not isinstance(width, int):
        return
    stem = node.name or node.output(0)
    if heads != kv_heads:
        key, value = (_repeated(graph, name, kv_heads, heads // kv_heads, width) for name in (key, value))
    scale = graph.add_tensor(f"{stem}.scale", np.array(node.attribute("scale", width**-0.5), np.float32))
    turned = graph.add("Transpose", [key], name=f"{stem}.turned", perm=[0, 1, 3, 2]).output(0)
    product = graph.add("MatMul", [query, turned], name=f"{stem}.product").output(0)
    scores = graph.add("Mul", [product, scale], name=f"{stem}.scores").output(0)
    if probe.run([mask], Moment(2, 3))[mask].dtype == np.bool_:
        hidden = graph.add_tensor(f"{stem}.hidden", _HIDDEN)
        masked = graph.add("Where", [mask, scores, hidden], name=f"{stem}.masked").output(0)
    else:
        masked = graph.add("Add", [scores, mask], name=f"{stem}.masked").output(0)
    weights = graph.add("Softmax", [masked], name=f"{stem}.weights", axis=-1).output(0)
    graph.hand_over(node.output(0), graph.add("MatMul", [weights, value], name=f"{stem}.attended").output(0))


def _repeated(graph: EditableGraph, name: str, kv_heads: int, group: int, width: int) -> str:
    """Keys or values [1, kv_heads, total, width] once for each head of a group, [1, kv_heads * group, total, width]."""
    axis, copies, shape = (
        graph.add_tensor("heads.repeated", np.array(each, np.int64))
        for each in ([2], [1, 1, group, 1, 1], [1, kv_heads * group, -1, width])
    )
    apart = graph.add("Unsqueeze", [name, axis], name=f"{name}.apart").output(0)
    wide = graph.add("Expand", [apart, copies], name=f"{name}.wide").output(0)
    return graph.add("Reshape", [wide, shape], name=f"{name}.repeated").output(0)
