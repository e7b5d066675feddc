"""Multi-token-prediction modules, which checkpoints bring along as their own draft, and their graph.

Such a module is one more decoder layer, trained with the model. It joins the embedding of a token with the hidden
state of the token before it, each normalized, and predicts the token after; embedding and LM head are the model's.
What it computes takes the place of the next hidden state, so that it predicts any number of tokens one by one
(DeepSeek-AI: DeepSeek-V3 Technical Report, 2024; Qwen3-Next and Qwen3.5 as vLLM runs them).

The hidden states that it takes are the model's after its last norm, and its own after its own last norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

from onnx import GraphProto, ModelProto

from ...errors import CheckpointError
from ...models.draft_heads import HeadKind
from ..architectures import find_family
from ..checkpoint.config import DecoderConfig, text_settings
from ..checkpoint.json_fields import count, read_json
from ..checkpoint.layer_weights import FusedLinear, Layer, Norm, QuantPlan
from ..checkpoint.layout import final_norm, layer_layout, tensors_of
from ..checkpoint.safetensors_files import Checkpoint
from ..checkpoint.source import Float32Array
from ..graph import inputs_outputs
from ..graph.attention import Attention
from ..graph.embedding_head import HEAD_INPUT
from ..graph.head_parts import append_head_layer, embedding_of, head_model, lm_head_of
from ..graph.initializers import Initializers
from ..graph.inputs_outputs import DraftFeatures
from ..graph.nodes import Nodes

_PREFIX: Final = "mtp."
"""Beginning of the names of all of its tensors."""
_OWN_EMBEDDING: Final = "mtp_use_dedicated_embeddings"
WITHOUT: Final = "export it without, with --draft none"


@dataclass(frozen=True)
class MtpModule:
    """The multi-token-prediction module of a checkpoint."""

    kind: ClassVar = HeadKind.MTP
    checkpoint: Checkpoint
    """The tensors of its layer and of its last norm are named like the tensors of a decoder of one layer."""
    config: DecoderConfig
    """The model with the module's layer only."""
    settings: Mapping[str, Any]
    """The parsed config.json of the model."""
    features: DraftFeatures
    """What the module reads of the model: the residual stream after the last layer."""

    @property
    def feature_size(self) -> int:
        """Number of features of a token."""
        return self.config.hidden_size

    @property
    def projection(self) -> FusedLinear:
        """The projection of embedding and hidden state."""
        hidden = self.config.hidden_size
        return FusedLinear("projection", (f"{_PREFIX}fc",), (hidden,), 2 * hidden)

    @property
    def layer(self) -> Layer:
        """The decoder layer."""
        return layer_layout(self.config, 0)

    @property
    def embedding_norm(self) -> Norm:
        """The norm of the embedding."""
        return Norm(f"{_PREFIX}pre_fc_norm_embedding.weight", self.config.hidden_size)

    @property
    def state_norm(self) -> Norm:
        """The norm of the hidden state."""
        return Norm(f"{_PREFIX}pre_fc_norm_hidden.weight", self.config.hidden_size)

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """All linears, in the order of the graph."""
        return (self.projection, *self.layer.linears)


def has_mtp_module(source: Path) -> bool:
    """Whether a checkpoint folder holds at least a part of a multi-token-prediction module that edge-run knows."""
    path = source / "config.json"
    try:
        known = path.is_file() and find_family(str(read_json(path).get("model_type"))).mtp
        return known and Checkpoint(source).has_any(_PREFIX)
    except CheckpointError:  # which the export of the model itself reports
        return False


def open_mtp_module(folder: Path, model: DecoderConfig) -> MtpModule:
    """Open the module of a checkpoint.

    Args:
        folder: the checkpoint.
        model: its configuration.

    Raises:
        CheckpointError: there is none, or it is incomplete or of a variant that is not supported.
    """
    if not model.traits.mtp or not Checkpoint(folder).has_any(_PREFIX):
        raise CheckpointError(
            f"{folder} has no multi-token-prediction module", "leave --draft mtp out, or give another draft"
        )
    whole = read_json(folder / "config.json")
    settings = text_settings(whole, model.traits)
    layers = count(settings, "mtp_num_hidden_layers", default=1, minimum=0)
    if layers != 1:
        raise CheckpointError(
            f"the multi-token-prediction module of {folder} has {layers} layers, and only those of one are supported",
            WITHOUT,
        )
    if settings.get(_OWN_EMBEDDING):
        raise CheckpointError(
            f"the multi-token-prediction module of {folder} has an embedding of its own ({_OWN_EMBEDDING}), which "
            "is not supported",
            WITHOUT,
        )
    prefixes = (("model.layers.0.", f"{_PREFIX}layers.0."), (f"model.{model.traits.final_norm}.", f"{_PREFIX}norm."))
    checkpoint = Checkpoint(folder, prefixes)
    # The module's only layer has attention, and experts if the model has any.
    config = replace(
        model,
        traits=replace(model.traits, state_layers=None),
        layers=1,
        attention=(model.attention[model.attention_layers[0]],),
        state_layers=None,
        experts=None if model.experts is None else replace(model.experts, layers=(True,)),
    )
    module = MtpModule(checkpoint, config, whole, DraftFeatures((model.layers,)))
    norms = (module.embedding_norm, module.state_norm, *module.layer.norms, final_norm(module.config))
    for tensor in tensors_of(module.linears, norms):
        checkpoint.require(*tensor)
    return module


def build_mtp_module(
    module: MtpModule,
    context: int,
    plan: QuantPlan,
    weights: Initializers,
    target: GraphProto,
    target_norm: Float32Array,
    head_factors: Float32Array | None,
) -> ModelProto:
    """Build the graph of a module and write its weights to the external data file.

    Args:
        module: the module.
        context: number of positions in the rotary table.
        plan: the quantization plan of the module.
        weights: creates and stores the initializers.
        target: the target's graph, whose embedding and LM head the module reads.
        target_norm: factors of the target's last norm, float32 [hidden].
        head_factors: what the inputs of the target's LM head were multiplied by, float32 [hidden]; None for nothing.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    nodes = Nodes(module.config, plan, weights)
    attention = Attention(nodes, context)
    embedding, lm_head = embedding_of(target), lm_head_of(target)
    # The target's states are taken before its last norm, whose weights calibration may have changed.
    factors = nodes.constant("target_norm.weight", target_norm)
    normed = nodes.norm_by(inputs_outputs.DRAFT_FEATURES, factors, "target_norm")
    states = nodes.add("Concat", [normed, inputs_outputs.DRAFT_STATES], "states", axis=0)
    states = nodes.add("Unsqueeze", [states, nodes.integers("states.axes", 0)], "states.batch")
    both = [
        nodes.norm(embedding.value, module.embedding_norm, "embedding_norm"),
        nodes.norm(states, module.state_norm, "state_norm"),
    ]
    hidden = nodes.linear(module.projection, nodes.add("Concat", both, "both", axis=-1))
    before = module.layer.before_attention
    assert before is not None  # noqa: S101 -- every family with such modules has the norm
    mixed = nodes.norm(hidden, before, "layers.0.input_norm")
    rows, _ = append_head_layer(nodes, attention, module.layer, mixed, hidden)
    nodes.add("Identity", [rows], inputs_outputs.NEXT_STATES)
    if head_factors is None:
        nodes.add("Identity", [rows], HEAD_INPUT)
    else:
        nodes.add("Mul", [rows, nodes.constant("head_factors", head_factors)], HEAD_INPUT)
    return head_model(nodes, module.config.hidden_size, module.config.vocab_size, embedding, lm_head)
