"""References of draft heads in float64 NumPy: EAGLE-3 token by token and without a cache, and Medusa."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..checkpoint.source import RowRange
from .reference_operations import WeightSource, rms_norm, rotate, softmax
from .reference_operations import linear as linear_of
from .reference_positions import Float64Array, head_dim, rotation


class HeadOutputs(NamedTuple):
    """What a head computes at every token."""

    logits: Float64Array
    """float64 [n, draft vocabulary]."""
    states: Float64Array
    """The outputs of the layer before the last norm, float64 [n, hidden]."""


def reference_head(
    weights: WeightSource,
    config: Mapping[str, Any],
    embeddings: Float64Array,
    features: Float64Array,
    context: int,
) -> HeadOutputs:
    """Run a head over a sequence: first over tokens with the target's features, then from its own states.

    Args:
        weights: the head's tensors, named like those of a decoder of one layer.
        config: the parsed config.json of the head.
        embeddings: embeddings of the tokens, float64 [n, hidden].
        features: the target's features of the first tokens, float64 [k, 3 * target hidden], k at least 1.
        context: number of positions that the exported graph supports.
    """
    settings = {**config, "model_type": "llama"}
    heads, dim = settings["num_attention_heads"], head_dim(settings)
    kv_heads = settings.get("num_key_value_heads") or heads
    name, count = "model.layers.0", len(embeddings)
    cosines, sines = rotation(settings, 0, np.arange(count), context)
    epsilon = float(settings.get("rms_norm_eps") or 1e-6)
    biased = bool(settings.get("attention_bias"))

    def matrix(module: str) -> Float64Array:
        return np.concatenate([np.asarray(piece, np.float64) for piece in weights.chunks(f"{module}.weight")])

    def linear(module: str, value: Float64Array, *, has_bias: bool = False) -> Float64Array:
        product = value @ matrices[module].T
        return product + weights.read(f"{module}.bias") if has_bias else product

    def norm(module: str, value: Float64Array) -> Float64Array:
        return np.asarray(rms_norm(value, epsilon) * weights.read(f"{module}.weight"))

    def rotated(value: Float64Array, position: int) -> Float64Array:
        at = slice(position, position + 1)
        turned: Float64Array = rotate(value.reshape(1, -1, dim), cosines[at], sines[at])[0]
        return turned

    modules = [f"{name}.self_attn.{each}_proj" for each in "qkvo"]
    modules += [f"{name}.mlp.{each}_proj" for each in ("gate", "up", "down")]
    matrices = {module: matrix(module) for module in (*modules, "fc", "lm_head")}
    keys: list[Float64Array] = []
    values: list[Float64Array] = []
    states: list[Float64Array] = []
    logits: list[Float64Array] = []
    for index, embedding in enumerate(embeddings):
        hidden = linear("fc", features[index]) if index < len(features) else states[-1]
        normed = np.concatenate([norm(f"{name}.input_layernorm", embedding), norm(f"{name}.hidden_norm", hidden)])
        query, key, value = (linear(each, normed, has_bias=biased) for each in modules[:3])
        keys.append(rotated(key, index))
        values.append(value.reshape(kv_heads, dim))
        queries = rotated(query, index)
        attended = np.empty((heads, dim))
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = np.array([queries[head] @ each[group] for each in keys]) / np.sqrt(dim)
            attended[head] = softmax(scores) @ np.array([each[group] for each in values])
        hidden = hidden + linear(modules[3], attended.reshape(-1), has_bias=biased)
        normed = norm(f"{name}.post_attention_layernorm", hidden)
        gate = linear(modules[4], normed)
        hidden = hidden + linear(modules[6], gate / (1 + np.exp(-gate)) * linear(modules[5], normed))
        states.append(hidden)
        logits.append(linear("lm_head", norm("model.norm", hidden)))
    return HeadOutputs(np.array(logits), np.array(states))


def reference_medusa(
    weights: WeightSource, blocks: Sequence[Sequence[str]], outputs: Sequence[str], state: Float64Array
) -> Float64Array:
    """Run Medusa heads.

    Args:
        weights: the tensors of the heads.
        blocks: modules of the residual blocks of each head.
        outputs: module of the LM head of each head.
        state: the target's last hidden state, float64 [hidden].

    Returns:
        Logits of every head, float64 [heads, vocabulary].
    """
    logits = []
    for own_blocks, output in zip(blocks, outputs, strict=True):
        hidden = state
        for block in own_blocks:
            product = linear_of(weights, block, hidden, biased=True)
            hidden = hidden + product / (1 + np.exp(-product))
        logits.append(linear_of(weights, output, hidden, biased=False))
    return np.array(logits)


def embedding_rows(weights: WeightSource, tokens: npt.NDArray[np.int64]) -> Float64Array:
    """Embeddings of tokens, float64 [n, hidden], without the factor that some families apply."""
    rows = [RowRange("model.embed_tokens.weight", token, token + 1) for token in tokens.tolist()]
    return np.concatenate([weights.read_rows(row) for row in rows]).astype(np.float64)
