"""Medusa heads as an ONNX graph: the likeliest tokens of every head in one run (Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from onnx import GraphProto, ModelProto, TensorProto, helper

from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, QuantPlan
from . import inputs_outputs
from .decoder import as_model
from .initializers import Initializers
from .nodes import MICROSOFT, Nodes

TOP_IDS: Final = "top_ids"
TOP_PROBABILITIES: Final = "top_probabilities"
TOP_COUNT: Final = 8
"""Number of likeliest tokens of each head that the graph gives; fewer where the vocabulary is smaller."""


def build_medusa_heads(
    config: DecoderConfig,
    blocks: Sequence[Sequence[FusedLinear]],
    outputs: Sequence[FusedLinear],
    plan: QuantPlan,
    weights: Initializers,
) -> ModelProto:
    """Build the graph and write its weights to the external data file.

    Args:
        config: the target.
        blocks: the residual blocks of each head.
        outputs: the LM head of each head.
        plan: the quantization plan of the heads.
        weights: creates and stores the initializers.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    nodes = Nodes(config, plan, weights)
    logits = []
    for head, (own_blocks, output) in enumerate(zip(blocks, outputs, strict=True)):
        hidden = inputs_outputs.DRAFT_FEATURES
        for block, linear in enumerate(own_blocks):
            name = f"heads.{head}.{block}"
            activated = nodes.add("QuickGelu", [nodes.linear(linear, hidden)], f"{name}.silu", MICROSOFT, alpha=1.0)
            hidden = nodes.add("Add", [hidden, activated], f"{name}.sum")
        logits.append(nodes.linear(output, hidden))
    joined = nodes.add("Concat", logits, "logits", axis=0)
    probabilities = nodes.add("Softmax", [joined], "probabilities", axis=-1)
    top = min(TOP_COUNT, config.vocab_size)
    nodes.add_multi_output(
        "TopK", [probabilities, nodes.integers("top.count", top)], [TOP_PROBABILITIES, TOP_IDS], "top", axis=-1
    )
    declare, heads = helper.make_tensor_value_info, len(outputs)
    graph = GraphProto(
        name="medusa_heads",
        node=[*weights.conversions, *nodes.protos],
        initializer=weights.protos,
        input=[declare(inputs_outputs.DRAFT_FEATURES, TensorProto.FLOAT, [1, config.hidden_size])],
        output=[
            declare(TOP_PROBABILITIES, TensorProto.FLOAT, [heads, top]),
            declare(TOP_IDS, TensorProto.INT64, [heads, top]),
        ],
    )
    return as_model(graph)
