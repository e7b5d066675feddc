"""Reference of multi-token-prediction modules in float64 NumPy, with the full attention matrix and no cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .head_reference import HeadOutputs, embedding_rows
from .reference import language_settings, reference_layer, reference_lm_head, reference_norm
from .reference_operations import WeightSource, linear
from .reference_positions import Float64Array


class TargetWeights(NamedTuple):
    """The weights of a module's target."""

    used: WeightSource
    """Those that the graph has, of which the module uses embedding and LM head."""
    original: WeightSource
    """Those of the checkpoint, which calibration may have scaled in `used`."""


def reference_mtp(
    weights: WeightSource,
    target: TargetWeights,
    config: Mapping[str, Any],
    tokens: npt.NDArray[np.int64],
    features: Float64Array,
    context: int,
) -> HeadOutputs:
    """Run Qwen's module over a sequence: first over tokens with the target's features, then from its own states.

    Args:
        weights: the module's tensors; those of its layer are named like a decoder's first layer.
        target: the target's tensors.
        config: the parsed config.json of the target.
        tokens: token ids, int64 [n]; each is the one after the token that its features belong to.
        features: the target's residual stream after its last layer, float64 [k, hidden], of the first k tokens.
        context: number of positions that the exported graph supports.

    Returns:
        Logits of every token, and its states after the module's last norm.
    """
    layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1}
    settings = {**language_settings(config), **layer}
    embedded = reference_norm(weights, settings, "mtp.pre_fc_norm_embedding", embedding_rows(target.used, tokens))
    given = list(reference_norm(target.original, settings, "model.norm", features))
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
    scaled, unscaled = (reference_norm(each, settings, "model.norm", ones) for each in target)
    return HeadOutputs(reference_lm_head(target.used, settings, states * (scaled / unscaled)), states)
