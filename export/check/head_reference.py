"""References of draft heads in float64 NumPy: EAGLE-3 and multi-token prediction token by token, and Medusa.

They have no cache; a head's layer computes the full attention matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import final_norm
from ..checkpoint.source import ModelSource
from ..graph.head_parts import FeatureHead
from .reference import Reference
from .reference_operations import Float64Array, linear, silu


def reference_head(
    head: FeatureHead,
    weights: ModelSource,
    embeddings: Float64Array,
    features: Float64Array,
    context: int,
    target: tuple[ModelSource, ModelSource] | None = None,
) -> tuple[Float64Array, Float64Array]:
    """Run a head over a sequence: first over tokens with the target's features, then from its own states.

    Args:
        head: the head.
        weights: its tensors.
        embeddings: embeddings of the tokens, float64 [n, hidden]; each is the one after that its features belong to.
        features: the target's features of the first tokens, float64 [k, features], k at least 1.
        context: number of positions that the exported graph supports.
        target: for a multi-token-prediction module, the target's tensors that its graph has, of which the module uses
            the LM head, and those of the checkpoint, which calibration may have scaled in the former.

    Returns:
        Logits of every token, float64 [n, draft vocabulary], and states, float64 [n, hidden]: the outputs of the layer
        before the last norm, of a module after it.
    """
    reference, last = Reference(weights, head.config, context), final_norm(head.config)
    embedded, features = reference.norm(head.norms[0], embeddings), features[: len(embeddings)]
    if target is None:
        given = [*linear(weights, head.projection, features)]
    else:
        used, original = (Reference(each, head.config, context) for each in target)
        given = [*original.norm(last, features)]
    while True:
        hidden = np.array(given)
        both = np.concatenate([embedded[: len(given)], reference.norm(head.norms[1], hidden)], axis=-1)
        if target is None:
            states = reference.layer(0, hidden, normed=both)
        else:
            states = reference.norm(last, reference.layer(0, linear(weights, head.projection, both)))
        if len(given) == len(embeddings):
            break
        given.append(states[-1])
    if head.lm_head is not None:
        return linear(weights, head.lm_head, reference.norm(last, states)), states
    # Where calibration multiplied the columns of the LM head, it divided the norm before it.
    ones = np.ones((1, states.shape[-1]))
    return used.logits(states * (used.norm(last, ones) / original.norm(last, ones))), states


def reference_medusa(weights: ModelSource, heads: Sequence[Sequence[FusedLinear]], state: Float64Array) -> Float64Array:
    """Run Medusa heads, each of residual blocks and an LM head, over the target's last hidden state, float64 [hidden].

    Returns:
        Logits of every head, float64 [heads, vocabulary].
    """
    logits = []
    for *blocks, output in heads:
        hidden = state
        for block in blocks:
            hidden = hidden + silu(linear(weights, block, hidden))
        logits.append(linear(weights, output, hidden))
    return np.array(logits)
