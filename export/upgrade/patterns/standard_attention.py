"""Expands the ONNX standard's Attention operator (opset 23) into plain operators.

PyTorch's exporter may write `scaled_dot_product_attention` as this operator. Expanded, it is recognized like any other
attention. Only the form that PyTorch writes is expanded: four axes, a mask and whole caches.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ..decoder_io import PassShape
from ..edit.editable import EditableGraph, Node
from ..subgraph_runner import SubgraphRunner

_MASKED: Final = np.array(np.finfo(np.float32).min)
_REQUIRED: Final = {"is_causal": 0, "softcap": 0.0, "qk_matmul_output_mode": 0}
"""Values that these attributes must have, which are also their defaults."""


def expand_attention(graph: EditableGraph) -> None:
    """Replace the standard's Attention by products and a softmax.

    Raises:
        BundleError: the graph cannot be run on one sequence with a cache.
        ExportError: the subgraph that computes a mask cannot be run.
    """
    nodes = [node for node in graph.nodes_of("Attention") if not node.domain]
    if not nodes:
        return
    runner = SubgraphRunner(graph)
    for node in nodes:
        _replace(graph, runner, node)
    graph.sweep()


def _replace(graph: EditableGraph, runner: SubgraphRunner, node: Node) -> None:
    query, key, value, mask = (node.input(index) for index in range(4))
    queries, keys = runner.shape(query), runner.shape(key)
    supported = all(node.attribute(name, default) == default for name, default in _REQUIRED.items())
    if not supported or len([name for name in node.outputs if name]) > 1 or any(node.inputs[4:]) or not mask:
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
    transposed = graph.add("Transpose", [key], name=f"{stem}.turned", perm=[0, 1, 3, 2]).output(0)
    product = graph.add("MatMul", [query, transposed], name=f"{stem}.product").output(0)
    scores = graph.add("Mul", [product, scale], name=f"{stem}.scores").output(0)
    if runner.run([mask], PassShape(2, 3))[mask].dtype == np.bool_:
        masked_score = graph.add_tensor(f"{stem}.hidden", _MASKED)
        masked = graph.add("Where", [mask, scores, masked_score], name=f"{stem}.masked").output(0)
    else:
        masked = graph.add("Add", [scores, mask], name=f"{stem}.masked").output(0)
    weights = graph.add("Softmax", [masked], name=f"{stem}.weights", axis=-1).output(0)
    graph.replace_value(node.output(0), graph.add("MatMul", [weights, value], name=f"{stem}.attended").output(0))


def _repeated(graph: EditableGraph, name: str, kv_heads: int, group: int, width: int) -> str:
    """Repeat keys or values for each head of a group: [1, kv_heads * group, total, width]."""
    axis, copies, shape = (
        graph.add_tensor("heads.repeated", np.array(each, np.int64))
        for each in ([2], [1, 1, group, 1, 1], [1, kv_heads * group, -1, width])
    )
    unsqueezed = graph.add("Unsqueeze", [name, axis], name=f"{name}.apart").output(0)
    expanded = graph.add("Expand", [unsqueezed, copies], name=f"{name}.wide").output(0)
    return graph.add("Reshape", [expanded, shape], name=f"{name}.repeated").output(0)
