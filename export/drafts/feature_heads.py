"""Checkpoints of EAGLE-3 heads (Li et al. 2025) and of multi-token-prediction modules, which models bring along.

Such a module is one more decoder layer, trained with the model. It joins the embedding of a token with the hidden
state of the token before it, each normalized, and predicts the token after; embedding and LM head are the model's.
What it computes takes the place of the next hidden state, so that it predicts any number of tokens one by one
(DeepSeek-AI: DeepSeek-V3 Technical Report, 2024; Qwen3-Next and Qwen3.5 as vLLM runs them).

The hidden states that it takes are the model's after its last norm, and its own after its own last norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, InputError
from ...models.json_file import is_whole, shown
from ...models.manifest import HeadKind
from ..architectures import find_family
from ..checkpoint.config import DecoderConfig, parse_config, text_settings
from ..checkpoint.json_fields import count, read_json
from ..checkpoint.layer_weights import FusedLinear, Norm
from ..checkpoint.layout import EMBEDDING, embedding_layout, final_norm, head_layout, layer_layout, tensors_of
from ..checkpoint.safetensors_files import Checkpoint
from ..graph.head_parts import FeatureHead
from ..graph.inputs_outputs import DraftFeatures, eagle_features

EAGLE_ARCHITECTURES: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Entries of `architectures` in config.json that name an EAGLE-3 head; the first is what SpecForge writes."""
EAGLE_CONFIG: Final = "eagle_config"
"""Setting of config.json whose value is an object with the next setting."""
EAGLE_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
"""Indices of the target's layers whose outputs are the head's features; see `feature_layers`."""
DRAFT_VOCAB_SIZE: Final = "draft_vocab_size"
"""Setting with the number of tokens of the head's own LM head; the target's vocabulary where it is absent."""
_TARGET_HIDDEN_SIZE: Final = "target_hidden_size"
"""Setting with the target's hidden size; the head's own where it is absent."""
EAGLE_FEATURE_LAYERS: Final = 3
"""Number of hidden states of the target that an EAGLE-3 head takes."""

_FEATURE_PROJECTION: Final = "fc"
"""Module `[hidden, 3 * target hidden]` over the concatenated hidden states of the target, lowest layer first."""
_EAGLE_LAYER_ALIASES: Final = ("midlayer", "layers.0", "model.layers.0", "model.midlayer")
"""Modules under which the decoder layer is found; the first is what published heads have."""
_FEATURE_NORM: Final = "hidden_norm"
"""Norm in the layer of the hidden state, beside the embedding's (`input_layernorm`)."""
TARGET_ID_OFFSETS: Final = "d2t"
"""Integers `[draft vocab]`: token i of the head is token `i + d2t[i]` of the target."""
DRAFTED_TOKENS: Final = "t2d"
"""Booleans `[vocab]`: whether the head has a token of the target."""
_LAYER: Final = "model.layers.0."
"""Prefix of the only layer's tensors in the layout of a decoder."""
_OTHER_MODEL: Final = "give a head that was trained for this model"
_OTHER_VARIANTS: Final = ("fc_norm", "norm_output", "norm_before_residual")
"""Settings of variants of the architecture, each of which computes something else."""
_MODULE: Final = "mtp."
"""Beginning of the names of all tensors of a multi-token-prediction module."""
_OWN_EMBEDDING: Final = "mtp_use_dedicated_embeddings"
WITHOUT: Final = "export it without, with --draft none"


def open_eagle_head(folder: Path, target: DecoderConfig) -> FeatureHead:
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
    hidden = count(settings, _TARGET_HIDDEN_SIZE, default=config.hidden_size)
    require_target(f"the head {folder} was", hidden, config.vocab_size, target, _OTHER_MODEL)
    features = eagle_features(target, _listed_layers(settings))
    draft_vocab = count(settings, DRAFT_VOCAB_SIZE, default=config.vocab_size, maximum=config.vocab_size)
    checkpoint, layer = _open_layer(folder), layer_layout(config, 0)
    feature_size, own = EAGLE_FEATURE_LAYERS * target.hidden_size, config.hidden_size
    assert layer.before_attention is not None  # noqa: S101 -- every layer of this family has the norm
    head = FeatureHead(
        HeadKind.EAGLE,
        checkpoint,
        config,
        features,
        feature_size,
        FusedLinear(_FEATURE_PROJECTION, (_FEATURE_PROJECTION,), (own,), feature_size),
        replace(layer, qkv=replace(layer.qkv, columns=2 * own), before_attention=None),
        (layer.before_attention, Norm(f"{_LAYER}{_FEATURE_NORM}.weight", own)),
        embedding_layout(config) if checkpoint.has(EMBEDDING) else None,
        replace(head_layout(config), rows=(draft_vocab,)),
        _read_target_ids(folder, checkpoint, draft_vocab, config.vocab_size),
    )
    _require_tensors(head)
    if head.embedding is None and own != target.hidden_size:
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
    for alias in _EAGLE_LAYER_ALIASES:
        checkpoint = Checkpoint(folder, ((_LAYER, f"{alias}."), ("model.", "")))
        if checkpoint.has(f"{_LAYER}{_FEATURE_NORM}.weight"):
            return checkpoint
    raise CheckpointError(
        f"{folder} lacks the tensor {_EAGLE_LAYER_ALIASES[0]}.{_FEATURE_NORM}.weight",
        "the checkpoint is incomplete, or not an EAGLE-3 head",
    )


def _read_target_ids(
    folder: Path, checkpoint: Checkpoint, draft_vocab: int, vocab: int
) -> npt.NDArray[np.int64] | None:
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


def has_mtp_module(source: Path) -> bool:
    """Whether a checkpoint folder holds at least a part of a multi-token-prediction module that edge-run knows."""
    path = source / "config.json"
    try:
        known = path.is_file() and find_family(str(read_json(path).get("model_type"))).mtp
        return known and Checkpoint(source).has_any(_MODULE)
    except CheckpointError:  # which the export of the model itself reports
        return False


def open_mtp_module(folder: Path, model: DecoderConfig) -> FeatureHead:
    """Open the module of a checkpoint.

    Args:
        folder: the checkpoint.
        model: its configuration.

    Raises:
        CheckpointError: there is none, or it is incomplete or of a variant that is not supported.
    """
    if not model.traits.mtp or not Checkpoint(folder).has_any(_MODULE):
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
    prefixes = (("model.layers.0.", f"{_MODULE}layers.0."), (f"model.{model.traits.final_norm}.", f"{_MODULE}norm."))
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
    hidden = config.hidden_size
    module = FeatureHead(
        HeadKind.MTP,
        checkpoint,
        config,
        DraftFeatures((model.layers,)),
        hidden,
        FusedLinear("projection", (f"{_MODULE}fc",), (hidden,), 2 * hidden),
        layer_layout(config, 0),
        (
            Norm(f"{_MODULE}pre_fc_norm_embedding.weight", hidden),
            Norm(f"{_MODULE}pre_fc_norm_hidden.weight", hidden),
        ),
    )
    _require_tensors(module)
    return module


def _require_tensors(head: FeatureHead) -> None:
    for tensor in tensors_of(head.linears, (*head.layer.norms, *head.norms, final_norm(head.config))):
        head.checkpoint.require(*tensor)
