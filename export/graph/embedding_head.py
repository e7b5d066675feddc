"""The token embedding and the LM head in the graph."""

from __future__ import annotations

from typing import Final

from onnx import GraphProto

from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import embedding_layout, head_layout
from . import inputs_outputs
from .initializers import StoredMatrix
from .nodes import Nodes, gather_settings

HEAD_INPUT: Final = "head.rows"
"""Name of the normed hidden states [R, hidden] that the LM head reads."""
_EMBEDDED: Final = ("embedded", "embedded.joined")
"""Names of the value with the embeddings: the second where blocks divide the hidden size and nothing is cut off."""


def embedded_value(graph: GraphProto) -> str | None:
    """Name of the embeddings [1, M, hidden] in an exported graph, before any scaling; None in other graphs."""
    given = {name for node in graph.node for name in node.output}
    return next((name for name in _EMBEDDED if name in given), None)


def append_embedding(nodes: Nodes) -> tuple[str, StoredMatrix]:
    """Append the embedding of the tokens, scaled.

    Returns:
        The name of [1, M, hidden], and the matrix for a tied head: codes with scales, or float32 weights alone.
    """
    config = nodes.config
    head = head_layout(config).name if config.tied_head else ""
    embedded, matrix = gathered_rows(nodes, embedding_layout(config), "embedded", head)
    # The scale is a separate node because the head may share the matrix.
    return nodes.scaled(embedded, config.embedding_scale, "embedding.scale", "embedded.scaled"), matrix


def append_head(nodes: Nodes, normed: str, embedding: StoredMatrix) -> str:
    """Append the logits [R, vocabulary] of normed hidden states [1, R, hidden]; returns the name of [R, hidden].

    `embedding` is the matrix of a tied head, from `append_embedding`.
    """
    config, linear = nodes.config, head_layout(nodes.config)
    rows = nodes.add("Squeeze", [normed, nodes.integers("head.axes", 0)], HEAD_INPUT)
    cap = config.logits_softcap
    # Scaling the hidden states instead of the logits is cheaper. It differs only by float rounding, and not at all
    # for Granite's powers of two.
    hidden = nodes.scaled(rows, config.logits_scale / (cap or 1.0), "head.scale", "head.scaled")
    output = inputs_outputs.LOGITS if cap is None else "head.product"
    append_product(nodes, linear, hidden, output, embedding if config.tied_head else None)
    if cap is not None:
        capped = nodes.add("Tanh", [output], "head.tanh")
        nodes.add("Mul", [capped, nodes.scalar("head.cap", cap)], inputs_outputs.LOGITS)
    return rows


def append_product(
    nodes: Nodes, linear: FusedLinear, hidden: str, output: str, stored: StoredMatrix | None = None
) -> None:
    """Append the logits `output` of hidden states [R, hidden]; `stored` is the LM head's matrix if the graph has it."""
    weight_format = nodes.plan[linear.name]
    if weight_format.bits == 32:
        nodes.add("Gemm", [hidden, stored.codes if stored else nodes.weights.float32(linear)], output, transB=1)
    else:
        stored = stored or nodes.weights.quantized(linear, weight_format)
        nodes.matmul_nbits(linear.shape, weight_format, [hidden, *stored.inputs()], output)


def gathered_rows(nodes: Nodes, linear: FusedLinear, output: str, head: str = "") -> tuple[str, StoredMatrix]:
    """Append the rows of the tokens of an embedding.

    Args:
        nodes: the graph.
        linear: the embedding.
        output: name of the result, and beginning of the names of what leads to it.
        head: name of an LM head that shares the matrix; empty for none.

    Returns:
        The name of [1, M, columns], and the initializers of the head: float32 weights alone, or as
        `Initializers.gathered` returns them.
    """
    weight_format, columns = nodes.plan[linear.name], linear.columns
    if weight_format.bits == 32:
        weights = nodes.weights.float32(linear)
        return nodes.add("Gather", [weights, "input_ids"], output, axis=0), StoredMatrix(weights, "")
    stored, table = nodes.weights.gathered(linear, weight_format, head)
    points = [stored.zero_points] if stored.zero_points else []
    inputs = [stored.codes, "input_ids", stored.scales, *points]
    gathered = nodes.add("GatherBlockQuantized", inputs, f"{output}.blocks", **gather_settings(weight_format))
    joined = nodes.add("Reshape", [gathered, nodes.integers(f"{output}.shape", 0, 0, -1)], f"{output}.joined")
    if columns % weight_format.block == 0:
        return joined, table
    bounds = [
        nodes.integers(f"{output}.starts", 0),
        nodes.integers(f"{output}.ends", columns),
        nodes.integers(f"{output}.axes", 2),
    ]
    return nodes.add("Slice", [joined, *bounds], output), table
