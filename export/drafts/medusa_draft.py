"""Medusa heads (Cai et al. 2024): their published checkpoints, and their graph, which runs all of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import ClassVar, Final

from onnx import ModelProto, TensorProto, helper

from ...models.manifest import HeadKind
from ..checkpoint.config import DecoderConfig
from ..checkpoint.json_fields import count, read_json
from ..checkpoint.layer_weights import FusedLinear, QuantPlan
from ..checkpoint.layout import tensors_of
from ..checkpoint.safetensors_files import SINGLE_FILE, Checkpoint
from ..graph import inputs_outputs
from ..graph.decoder import as_model
from ..graph.initializers import Initializers
from ..graph.inputs_outputs import DraftFeatures
from ..graph.nodes import Nodes
from .feature_heads import require_target

MEDUSA_HEADS: Final = "medusa_num_heads"
"""Setting with the number of heads."""
MEDUSA_LAYERS: Final = "medusa_num_layers"
"""Setting with the number of residual blocks of each head, 1 where it is absent."""
MEDUSA_FILE: Final = "medusa_lm_head.safetensors"
"""File of the weights, where it is not called like a model's."""
MEDUSA_PREFIX: Final = "medusa_head."
"""What the names of a head's tensors may begin with."""
_MAX_HEADS: Final = 16
_MAX_BLOCKS: Final = 16
_OTHER_MODEL: Final = "give heads that were trained for this model"
TOP_IDS: Final = "top_ids"
TOP_PROBABILITIES: Final = "top_probabilities"
TOP_COUNT: Final = 8
"""Number of likeliest tokens of each head that the graph gives; fewer where the vocabulary is smaller."""


@dataclass(frozen=True)
class MedusaHeads:
    """Medusa heads for a target."""

    kind: ClassVar = HeadKind.MEDUSA
    checkpoint: Checkpoint
    config: DecoderConfig
    """The target, whose hidden size and vocabulary the heads have."""
    heads: tuple[tuple[FusedLinear, ...], ...]
    """The residual blocks of each head, and its LM head."""

    @property
    def features(self) -> DraftFeatures:
        """What the heads read of the target: the last states, of tokens with logits."""
        return DraftFeatures(all_tokens=False)

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """All linears, in the order of the graph."""
        return tuple(chain.from_iterable(self.heads))


def medusa_block(head: int, block: int) -> str:
    """Module `[hidden, hidden]`, with a bias, of a residual block: `h + silu(linear(h))`."""
    return f"{head}.{block}.linear"


def medusa_output(head: int, blocks: int) -> str:
    """Module `[vocab, hidden]` after the residual blocks of a head."""
    return f"{head}.{blocks}"


def open_medusa_heads(folder: Path, target: DecoderConfig) -> MedusaHeads:
    """Open Medusa heads and check that they fit a target.

    Raises:
        CheckpointError: they are damaged or incomplete.
        InputError: they do not fit the target.
    """
    settings = read_json(folder / "config.json")
    heads = count(settings, MEDUSA_HEADS, maximum=_MAX_HEADS)
    blocks = count(settings, MEDUSA_LAYERS, default=1, maximum=_MAX_BLOCKS)
    file = MEDUSA_FILE if (folder / MEDUSA_FILE).is_file() else SINGLE_FILE
    checkpoint = Checkpoint(folder, (("", MEDUSA_PREFIX),), file)
    first = f"{medusa_block(0, 0)}.weight"
    if not checkpoint.has(first):
        checkpoint = Checkpoint(folder, (), file)
    hidden, vocab = target.hidden_size, target.vocab_size
    sizes = (checkpoint.shape(first), checkpoint.shape(f"{medusa_output(0, blocks)}.weight"))
    made_for, vocabulary = (shape[0] if shape else 0 for shape in sizes)
    require_target(f"the heads {folder} were", made_for, vocabulary, target, _OTHER_MODEL)
    opened = MedusaHeads(
        checkpoint,
        target,
        tuple(
            (
                *(
                    FusedLinear(f"medusa.{head}.{block}", (medusa_block(head, block),), (hidden,), hidden, biased=True)
                    for block in range(blocks)
                ),
                FusedLinear(f"medusa.{head}.head", (medusa_output(head, blocks),), (vocab,), hidden),
            )
            for head in range(heads)
        ),
    )
    for tensor in tensors_of(opened.linears):
        checkpoint.require(*tensor)
    return opened


def build_medusa_heads(opened: MedusaHeads, plan: QuantPlan, weights: Initializers) -> ModelProto:
    """Build the graph and write its weights to the external data file.

    Args:
        opened: the heads.
        plan: the quantization plan of the heads.
        weights: creates and stores the initializers.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    config = opened.config
    nodes = Nodes(config, plan, weights)
    logits = []
    for head, (*blocks, output) in enumerate(opened.heads):
        hidden = inputs_outputs.DRAFT_FEATURES
        for block, linear in enumerate(blocks):
            name = f"heads.{head}.{block}"
            activated = nodes.silu(nodes.linear(linear, hidden), f"{name}.silu")
            hidden = nodes.add("Add", [hidden, activated], f"{name}.sum")
        logits.append(nodes.linear(output, hidden))
    joined = nodes.add("Concat", logits, "logits", axis=0)
    probabilities = nodes.add("Softmax", [joined], "probabilities", axis=-1)
    top = min(TOP_COUNT, config.vocab_size)
    nodes.add_multi_output(
        "TopK", [probabilities, nodes.integers("top.count", top)], [TOP_PROBABILITIES, TOP_IDS], "top", axis=-1
    )
    declare, shape = helper.make_tensor_value_info, [len(opened.heads), top]
    inputs = [declare(inputs_outputs.DRAFT_FEATURES, TensorProto.FLOAT, [1, config.hidden_size])]
    outputs = [declare(TOP_PROBABILITIES, TensorProto.FLOAT, shape), declare(TOP_IDS, TensorProto.INT64, shape)]
    return as_model(helper.make_graph(nodes.all(), "medusa_heads", inputs, outputs, weights.protos))
