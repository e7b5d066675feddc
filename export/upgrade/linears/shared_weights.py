"""Matrices that two operators read in different shapes: one run of bytes under two names.

ONNX Runtime GenAI ties an embedding to the head by reshaping the head's codes at load, which makes a copy of the whole
matrix in memory. The codes do not change by it, so both can be mapped from the same place in the file.
"""

from __future__ import annotations

from ..edit.editable import EditableGraph


def share_reshaped(graph: EditableGraph) -> None:
    """Make constants of reshaped constants; they keep their bytes."""
    for node in graph.nodes_of("Reshape"):
        tensor, wanted = graph.tensors.get(node.input(0)), graph.integers(node.input(1))
        if tensor is None or wanted is None or node.output(0) in graph.outputs:
            continue
        shape = [tensor.shape[index] if extent == 0 else extent for index, extent in enumerate(wanted)]
        if -1 in shape:
            known = 1
            for extent in shape:
                known *= extent if extent != -1 else 1
            shape[shape.index(-1)] = tensor.size // known
        alias = graph.add_tensor(f"{node.input(0)}.{'x'.join(map(str, shape))}", tensor.reshaped(*shape))
        graph.replace_uses(node.output(0), alias)
    graph.sweep()
