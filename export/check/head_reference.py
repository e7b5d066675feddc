"""References of draft heads in float64 NumPy: EAGLE-3 token by token, Medusa, multi-token prediction.

They have no cache; a module of multi-token prediction computes the full attention matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..checkpoint.source import ModelSource
from .reference import (
    language_settings,
    reference_attention,
    reference_feed_forward,
    reference_layer,
    reference_lm_head,
    reference_norm,
)
from .reference_operations import embedding_rows, linear, silu
from .reference_positions import Float64Array


class HeadOutputs(NamedTuple):
    """What a head computes at every token."""

    logits: Float64Array
    """float64 [n, draft vocabulary]."""
    states: Float64Array
    """The outputs of the layer before the last norm, float64 [n, hidden]."""


def reference_head(
    weights: ModelSource, config: Mapping[str, Any], embeddings: Float64Array, features: Float64Array, context: int
) -> HeadOutputs:
    """Run an EAGLE-3 head over a sequence: first over tokens with the target's features, then from its own states.

    Args:
        weights: the head's tensors, named like a decoder's of one layer.
        config: the parsed config.json of the head.
        embeddings: embeddings of the tokens, float64 [n, hidden].
        features: the target's features of the first tokens, float64 [k, 3 * target hidden], k at least 1.
        context: number of positions that the exported graph supports.
    """
    settings, layer = {**config, "model_type": "llama"}, "model.layers.0"

    def norm(module: str, value: Float64Array) -> Float64Array:
        return reference_norm(weights, settings, module, value)

    embedded = norm(f"{layer}.input_layernorm", embeddings)
    given = list(linear(weights, "fc", features[: len(embeddings)], biased=False))
    while True:
        hidden = np.array(given)
        both = np.concatenate([embedded[: len(given)], norm(f"{layer}.hidden_norm", hidden)], axis=-1)
        hidden = hidden + reference_attention(weights, settings, 0, both, context)
        normed = norm(f"{layer}.post_attention_layernorm", hidden)
        states = hidden + reference_feed_forward(weights, settings, f"{layer}.mlp", normed)
        if len(given) == len(embeddings):
            return HeadOutputs(linear(weights, "lm_head", norm("model.norm", states), biased=False), states)
        given.append(states[-1])


def reference_medusa(weights: ModelSource, heads: Sequence[Sequence[str]], state: Float64Array) -> Float64Array:
    """Run Medusa heads.

    Args:
        weights: the tensors of the heads.
        heads: modules of each head: its residual blocks, and its LM head.
        state: the target's last hidden state, float64 [hidden].

    Returns:
        Logits of every head, float64 [heads, vocabulary].
    """
    logits = []
    for *blocks, output in heads:
        hidden = state
        for block in blocks:
            hidden = hidden + silu(linear(weights, block, hidden, biased=True))
        logits.append(linear(weights, output, hidden, biased=False))
    return np.array(logits)


def reference_mtp(
    weights: ModelSource,
    used: ModelSource,
    original: ModelSource,
    config: Mapping[str, Any],
    tokens: npt.NDArray[np.int64],
    features: Float64Array,
    context: int,
) -> HeadOutputs:
    """Run Qwen's module over a sequence: first over tokens with the target's features, then from its own states.

    Args:
        weights: the module's tensors; its layer is named like a decoder's first layer.
        used: the target's tensors that its graph has, of which the module uses embedding and LM head.
        original: the tensors of the checkpoint, which calibration may have scaled in `used`.
        config: the parsed config.json of the target.
        tokens: token ids, int64 [n]; each is the one after the token that its features belong to.
        features: the target's residual stream after its last layer, float64 [k, hidden], of the first k tokens.
        context: number of positions that the exported graph supports.

    Returns:
        Logits of every token, and its states after the module's last norm.
    """
    layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1}
    settings = {**language_settings(config), **layer}
    embedded = reference_norm(weights, settings, "mtp.pre_fc_norm_embedding", embedding_rows(used, tokens))
    given = list(reference_norm(original, settings, "model.norm", features))
    while True:
        normed = reference_norm(weights, settings, "mtp.pre_fc_norm_hidden", np.array(given))
        both = np.concatenate([embedded[: len(given)], normed], axis=-1)
        hidden = reference_layer(weights, settings, 0, linear(weights, "mtp.fc", both, biased=False), context)
        states = reference_norm(weights, settings, "mtp.norm", hidden)
        if len(given) == len(tokens):
            break
        given.append(states[-1])
    # Where calibration multiplied the columns of the LM head, it divided the norm before it.
    ones = np.ones((1, states.shape[-1]))
    scaled, unscaled = (reference_norm(each, settings, "model.norm", ones) for each in (used, original))
    return HeadOutputs(reference_lm_head(used, settings, states * (scaled / unscaled)), states)
