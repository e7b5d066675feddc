"""EAGLE-3 heads (Li et al. 2025): their published checkpoints, and their graph over the target's features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto

from ...errors import CheckpointError, InputError
from ...models.draft_heads import (
    DRAFT_VOCAB_SIZE,
    EAGLE_ARCHITECTURES,
    EAGLE_CONFIG,
    EAGLE_FEATURE_LAYERS,
    EAGLE_LAYER_ALIASES,
    EAGLE_LAYERS,
    FEATURE_NORM,
    FEATURE_PROJECTION,
    TARGET_HIDDEN_SIZE,
    TARGET_ID_OFFSETS,
    HeadKind,
    head_kind,
)
from ...models.json_file import is_whole, shown
from ..checkpoint.config import DecoderConfig, parse_config
from ..checkpoint.json_fields import count, read_json
from ..checkpoint.layer_weights import FusedLinear, Layer, Norm, QuantPlan
from ..checkpoint.layout import EMBEDDING, embedding_layout, final_norm, head_layout, layer_layout, tensors_of
from ..checkpoint.safetensors_files import Checkpoint
from ..graph import inputs_outputs
from ..graph.attention import Attention
from ..graph.embedding_head import append_embedding, append_product
from ..graph.head_parts import append_head_layer, embedding_of, head_model
from ..graph.initializers import Initializers
from ..graph.inputs_outputs import DraftFeatures, eagle_features
from ..graph.nodes import Nodes

TargetIds = npt.NDArray[np.int64]

_LAYER: Final = "model.layers.0."
"""Prefix of the only layer's tensors in the layout of a decoder."""
_OTHER_MODEL: Final = "give a head that was trained for this model"
_OTHER_VARIANTS: Final = ("fc_norm", "norm_output", "norm_before_residual")
"""Settings of variants of the architecture, each of which computes something else."""


@dataclass(frozen=True)
class EagleHead:
    """An EAGLE-3 head for a target; its tensors are named like a decoder's of one layer."""

    kind: ClassVar = HeadKind.EAGLE
    checkpoint: Checkpoint
    settings: Mapping[str, Any]
    """The parsed config.json."""
    config: DecoderConfig
    """The layer, with the vocabulary of the embedding."""
    features: DraftFeatures
    """What the head reads of the target."""
    feature_size: int
    draft_vocab: int
    """Number of tokens of the LM head."""
    target_ids: TargetIds | None
    """The target's ids of these tokens, int64 [draft_vocab]; None if they are the same."""

    @property
    def has_embedding(self) -> bool:
        """Whether the head has an embedding of its own, or reads the target's."""
        return self.checkpoint.has(EMBEDDING)

    @property
    def projection(self) -> FusedLinear:
        """The projection of the target's features."""
        return FusedLinear(FEATURE_PROJECTION, (FEATURE_PROJECTION,), (self.config.hidden_size,), self.feature_size)

    @property
    def layer(self) -> Layer:
        """The layer; queries, keys and values are of embedding and hidden state together."""
        layer = layer_layout(self.config, 0)
        return replace(layer, qkv=replace(layer.qkv, columns=2 * self.config.hidden_size))

    @property
    def feature_norm(self) -> Norm:
        """The norm of the hidden state."""
        return Norm(f"{_LAYER}{FEATURE_NORM}.weight", self.config.hidden_size)

    @property
    def lm_head(self) -> FusedLinear:
        """The LM head."""
        return replace(head_layout(self.config), rows=(self.draft_vocab,))

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """All linears, in the order of the graph."""
        embedding = (embedding_layout(self.config),) if self.has_embedding else ()
        return (*embedding, self.projection, *self.layer.linears, self.lm_head)


def read_head_kind(source: Path) -> HeadKind | None:
    """The kind of draft head in a folder; None for something else, such as a whole language model."""
    path = source / "config.json"
    return head_kind(read_json(path)) if path.is_file() else None


def open_eagle_head(folder: Path, target: DecoderConfig) -> EagleHead:
    """Open an EAGLE-3 head and check that it fits a target.

    Raises:
        CheckpointError: the head is damaged, incomplete or of a variant that is not supported.
        InputError: it does not fit the target.
    """
    settings = read_json(folder / "config.json")
    _require_supported(folder, settings)
    config = parse_config({"num_hidden_layers": 1, **settings, "model_type": "llama"})
    if config.layers != 1:
        raise CheckpointError(f"{folder} has {config.layers} layers", "only EAGLE-3 heads of one layer are supported")
    config = replace(config, tied_head=False)
    hidden = count(settings, TARGET_HIDDEN_SIZE, default=config.hidden_size)
    require_target(f"the head {folder} was", hidden, config.vocab_size, target, _OTHER_MODEL)
    features = eagle_features(target, _listed_layers(settings))
    draft_vocab = count(settings, DRAFT_VOCAB_SIZE, default=config.vocab_size, maximum=config.vocab_size)
    checkpoint = _open_layer(folder)
    feature_size = EAGLE_FEATURE_LAYERS * target.hidden_size
    target_ids = _read_target_ids(folder, checkpoint, draft_vocab, config.vocab_size)
    head = EagleHead(checkpoint, settings, config, features, feature_size, draft_vocab, target_ids)
    for tensor in tensors_of(head.linears, (*head.layer.norms, head.feature_norm, final_norm(config))):
        checkpoint.require(*tensor)
    if not head.has_embedding and config.hidden_size != target.hidden_size:
        raise InputError(
            f"the head {folder} has a hidden size of {config.hidden_size}, the model of {target.hidden_size}, and the "
            "head no embedding of its own",
            _OTHER_MODEL,
        )
    return head


def _require_supported(folder: Path, settings: Mapping[str, Any]) -> None:
    architectures = settings.get("architectures") or [EAGLE_ARCHITECTURES[0]]
    if not isinstance(architectures, list) or not any(name in EAGLE_ARCHITECTURES for name in architectures):
        raise CheckpointError(
            f"{folder} is a draft head of the architecture {shown(architectures)}",
            f"supported are {', '.join(EAGLE_ARCHITECTURES)}, and Medusa heads",
        )
    inner = settings.get(EAGLE_CONFIG)
    inner = inner if isinstance(inner, Mapping) else {}
    wanted = [name for name in _OTHER_VARIANTS if settings.get(name) or inner.get(name)]
    wanted += ["use_aux_hidden_state false"] if inner.get("use_aux_hidden_state") is False else []
    if wanted:
        raise CheckpointError(
            f"{folder} is a variant of EAGLE-3 that is not supported ({wanted[0]})", "give a head without it"
        )


def require_target(made: str, hidden: int, vocabulary: int, target: DecoderConfig, hint: str) -> None:
    """Check the sizes that a head was made for.

    Args:
        made: subject and verb of the message, such as "the head PATH was".
        hidden: hidden size of the model that it was made for.
        vocabulary: number of tokens of that model.
        target: the target.
        hint: what to do about another model.

    Raises:
        InputError: they are not the target's.
    """
    sizes = (f"a hidden size of {hidden}", hidden, target.hidden_size)
    tokens = (f"a vocabulary of {vocabulary} tokens", vocabulary, target.vocab_size)
    for named, size, wanted in (sizes, tokens):
        if size != wanted:
            raise InputError(f"{made} made for {named}, and the model has {wanted}", hint)


def _listed_layers(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The layers whose outputs a config.json lists; None if it lists none.

    Raises:
        CheckpointError: the list is not one of three layers.
    """
    inner = settings.get(EAGLE_CONFIG)
    listed = inner.get(EAGLE_LAYERS) if isinstance(inner, Mapping) else None
    if listed is None:
        return None
    # The layer before the first one is the embedding.
    layers = [each for each in listed if is_whole(each, -1)] if isinstance(listed, list) else []
    if len(layers) != EAGLE_FEATURE_LAYERS or layers != listed:
        raise CheckpointError(f"config.json: {EAGLE_LAYERS} must be a list of three layers, found {shown(listed)}")
    return tuple(layers)


def _open_layer(folder: Path) -> Checkpoint:
    """Open the tensors of a head by the names that a decoder of one layer has.

    Raises:
        CheckpointError: there are no safetensors weights, or no such layer.
    """
    for alias in EAGLE_LAYER_ALIASES:
        checkpoint = Checkpoint(folder, ((_LAYER, f"{alias}."), ("model.", "")))
        if checkpoint.has(f"{_LAYER}{FEATURE_NORM}.weight"):
            return checkpoint
    raise CheckpointError(
        f"{folder} lacks the tensor {EAGLE_LAYER_ALIASES[0]}.{FEATURE_NORM}.weight",
        "the checkpoint is incomplete, or not an EAGLE-3 head",
    )


def _read_target_ids(folder: Path, checkpoint: Checkpoint, draft_vocab: int, vocab: int) -> TargetIds | None:
    """The target's ids of the head's tokens; None if they are the same.

    Raises:
        CheckpointError: the map is missing, or leads to the same token twice or out of the vocabulary.
    """
    if not checkpoint.has(TARGET_ID_OFFSETS):
        if draft_vocab == vocab:
            return None
        raise CheckpointError(
            f"{folder} has {draft_vocab} of {vocab} tokens, and lacks the tensor {TARGET_ID_OFFSETS}",
            "the checkpoint is incomplete: download it again",
        )
    offsets = checkpoint.integers(TARGET_ID_OFFSETS)
    own = np.arange(draft_vocab)
    ids = own + offsets if offsets.shape == own.shape else np.empty(0, np.int64)
    if ids.size != draft_vocab or ids.min() < 0 or ids.max() >= vocab or np.unique(ids).size < ids.size:
        raise CheckpointError(
            f"{folder}: {TARGET_ID_OFFSETS} does not map {draft_vocab} tokens to as many of {vocab}",
            "the checkpoint is damaged: download it again",
        )
    return None if draft_vocab == vocab and not offsets.any() else ids


def build_eagle_head(
    head: EagleHead, context: int, plan: QuantPlan, weights: Initializers, target: GraphProto | None
) -> ModelProto:
    """Build the graph of a head and write its weights to the external data file.

    Args:
        head: the head.
        context: number of positions in the rotary table.
        plan: the quantization plan of the head.
        weights: creates and stores the initializers.
        target: the target's graph, whose embedding the head reads; None if the head has its own.

    Raises:
        CheckpointError: a tensor cannot be read.
        OSError: the disk refused a write.
    """
    config = head.config
    nodes = Nodes(config, plan, weights)
    attention = Attention(nodes, context)
    shared = None if target is None else embedding_of(target)
    embedded = append_embedding(nodes)[0] if shared is None else shared.value
    projected = nodes.linear(head.projection, inputs_outputs.DRAFT_FEATURES)
    states = nodes.add("Concat", [projected, inputs_outputs.DRAFT_STATES], "states", axis=0)
    hidden = nodes.add("Unsqueeze", [states, nodes.integers("states.axes", 0)], "hidden")
    before = head.layer.before_attention
    assert before is not None  # noqa: S101 -- every layer of this family has the norm
    normed = [nodes.norm(embedded, before, "input_norm"), nodes.norm(hidden, head.feature_norm, "feature_norm")]
    both = nodes.add("Concat", normed, "both", axis=-1)
    rows, residual = append_head_layer(nodes, attention, head.layer, both, hidden)
    nodes.add("Identity", [residual], inputs_outputs.NEXT_STATES)
    append_product(nodes, head.lm_head, rows, inputs_outputs.LOGITS)
    return head_model(nodes, head.projection.columns, head.lm_head.shape[0], shared)
