"""A decoder in plain operators, as PyTorch's exporter writes it, gets ONNX Runtime's fused ones."""

from __future__ import annotations

from ..edit.casts import drop_idle_casts
from ..edit.constant_shapes import settle
from ..edit.editable import EditableGraph
from ..linears.packed_heads import pack_heads
from .activations import fuse_activations
from .attention_fusion import fuse_attention
from .norms import fuse_norms, fuse_residuals
from .standard_attention import spell_out_attention


def fuse_operators(graph: EditableGraph, context: int) -> None:
    """Fuse attention with its rotation, norms, activations; make shapes constants.

    Args:
        graph: a decoder that computes in float32 and whose attention is not fused.
        context: positions that the upgraded model will serve.

    Raises:
        BundleError: something in the place of attention is not recognised.
        ExportError: a part of the graph cannot be run.
    """
    drop_idle_casts(graph)
    spell_out_attention(graph)
    settle(graph, context)
    fuse_activations(graph)
    fuse_norms(graph)
    fuse_residuals(graph)
    fuse_attention(graph, context)
    pack_heads(graph)
