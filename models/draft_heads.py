"""Published formats of draft heads: their settings in config.json and the names of their tensors.

A draft head is a small network that proposes tokens from the hidden states of its target. Two formats of
checkpoints of their own are in use, and some models bring a head along in theirs: a multi-token-prediction module. An
EAGLE-3 head (Li et al. 2025; the format of SpecForge and SGLang) is one decoder layer over the embedding of a token and
a projection of three of the target's hidden states; it has an LM head of its own over part of the vocabulary. Medusa
heads (Cai et al. 2024) are residual blocks and an LM head for each of the next few tokens, over the target's last
hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final


class HeadKind(StrEnum):
    """Kind of a draft head."""

    EAGLE = "eagle"
    """EAGLE-3: one layer that continues from its own output."""
    MEDUSA = "medusa"
    """One block for each of the next tokens."""
    MTP = "mtp"
    """The multi-token-prediction module of the target's own checkpoint: one layer that continues from its own output,
    with the target's embedding and LM head."""


EAGLE_ARCHITECTURES: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Entries of `architectures` in config.json that name an EAGLE-3 head; the first is what SpecForge writes."""
EAGLE_CONFIG: Final = "eagle_config"
"""Setting of config.json whose value is an object with the next setting."""
EAGLE_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
"""Indices of the target's layers whose outputs are the head's features; see `feature_layers`."""
DRAFT_VOCAB_SIZE: Final = "draft_vocab_size"
"""Setting with the number of tokens of the head's own LM head; the target's vocabulary where it is absent."""
TARGET_HIDDEN_SIZE: Final = "target_hidden_size"
"""Setting with the target's hidden size; the head's own where it is absent."""
EAGLE_FEATURE_LAYERS: Final = 3
"""Number of hidden states of the target that an EAGLE-3 head takes."""

FEATURE_PROJECTION: Final = "fc"
"""Module `[hidden, 3 * target hidden]` over the concatenated hidden states of the target, lowest layer first."""
EAGLE_LAYER_ALIASES: Final = ("midlayer", "layers.0", "model.layers.0", "model.midlayer")
"""Modules under which the decoder layer is found; the first is what published heads have."""
FEATURE_NORM: Final = "hidden_norm"
"""Norm in the layer of the hidden state, beside the embedding's (`input_layernorm`)."""
TARGET_ID_OFFSETS: Final = "d2t"
"""Integers `[draft vocab]`: token i of the head is token `i + d2t[i]` of the target."""
DRAFTED_TOKENS: Final = "t2d"
"""Booleans `[vocab]`: whether the head has a token of the target."""

MEDUSA_HEADS: Final = "medusa_num_heads"
"""Setting with the number of heads."""
MEDUSA_LAYERS: Final = "medusa_num_layers"
"""Setting with the number of residual blocks of each head, 1 where it is absent."""
MEDUSA_FILE: Final = "medusa_lm_head.safetensors"
"""File of the weights, where it is not called like a model's."""
MEDUSA_PREFIX: Final = "medusa_head."
"""What the names of a head's tensors may begin with."""


def medusa_block(head: int, block: int) -> str:
    """Module `[hidden, hidden]`, with a bias, of a residual block: `h + silu(linear(h))`."""
    return f"{head}.{block}.linear"


def medusa_output(head: int, blocks: int) -> str:
    """Module `[vocab, hidden]` after the residual blocks of a head."""
    return f"{head}.{blocks}"


def feature_layers(layers: int, listed: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The layers of a target whose inputs, the residual stream, are the features of an EAGLE-3 head.

    Args:
        layers: number of layers of the target.
        listed: the layers whose outputs a config.json lists; None for the default, which is counted by inputs.
    """
    return (2, layers // 2, layers - 3) if listed is None else tuple(each + 1 for each in listed)


def head_kind(config: Mapping[str, Any]) -> HeadKind | None:
    """The kind of draft head that a parsed config.json describes; None for a whole language model."""
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    if any(isinstance(name, str) and "eagle" in name.lower() for name in names) or EAGLE_CONFIG in config:
        return HeadKind.EAGLE
    return HeadKind.MEDUSA if MEDUSA_HEADS in config else None
