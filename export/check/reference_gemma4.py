"""Reference decoder of Gemma 4 in float64 NumPy, with the full attention matrix and no cache.

It differs from other families in more places than it shares with them: layers have heads of two sizes, the last ones
read the keys and values of earlier ones, values are normed, and every layer has an embedding of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checkpoint.source import ModelSource
from .reference_operations import (
    embedding_rows,
    gelu_tanh,
    linear,
    rms_norm,
    rotate,
    soft_capped,
    softmax,
)
from .reference_positions import Float64Array, Settings

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2304,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
}


def gemma4_logits(weights: ModelSource, config: Settings, tokens: npt.NDArray[np.int64]) -> Float64Array:
    """Logits of every position, float64 [n, vocabulary]; arguments as of `reference_logits`."""
    text = config.get("text_config", config)
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return _Gemma4(weights, {**_DEFAULTS, **tied, **text}).logits(tokens)


class _Gemma4:
    """One forward over a text; keys and values of layers are kept for those that share them."""

    def __init__(self, weights: ModelSource, config: Settings) -> None:
        self._weights = weights
        self._config = config
        layers = config["num_hidden_layers"]
        listed = config.get("layer_types") or [
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)
        ]
        self._kinds = [*listed[:-1], "full_attention"]
        self._kept: dict[str, tuple[Float64Array, Float64Array]] = {}
        """Keys and values of the latest layer of each kind that has its own."""

    def logits(self, tokens: npt.NDArray[np.int64]) -> Float64Array:
        config = self._config
        embedded = embedding_rows(self._weights, tokens) * math.sqrt(config["hidden_size"])
        inputs = self._layer_inputs(tokens, embedded)
        hidden = embedded
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            attended = self._attention(layer, self._norm(f"{name}.input_layernorm", hidden))
            hidden = hidden + self._norm(f"{name}.post_attention_layernorm", attended)
            expanded = self._feed_forward(f"{name}.mlp", self._norm(f"{name}.pre_feedforward_layernorm", hidden))
            hidden = hidden + self._norm(f"{name}.post_feedforward_layernorm", expanded)
            if inputs is not None:
                gate = gelu_tanh(self._linear(f"{name}.per_layer_input_gate", hidden))
                read = self._linear(f"{name}.per_layer_projection", gate * inputs[:, layer])
                hidden = hidden + self._norm(f"{name}.post_per_layer_input_norm", read)
            hidden = hidden * self._weights.read(f"{name}.layer_scalar").astype(np.float64)
        head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        return soft_capped(self._linear(head, self._norm("model.norm", hidden)), config.get("final_logit_softcapping"))

    def _layer_inputs(self, tokens: npt.NDArray[np.int64], embedded: Float64Array) -> Float64Array | None:
        """The inputs of all layers, [n, layers, width]; None for a model without them."""
        width = self._config["hidden_size_per_layer_input"]
        if not width:
            return None
        shape = (len(tokens), self._config["num_hidden_layers"], width)
        projected = self._linear("model.per_layer_model_projection", embedded) / math.sqrt(embedded.shape[-1])
        normed = self._norm("model.per_layer_projection_norm", projected.reshape(shape))
        own = embedding_rows(self._weights, tokens, "model.embed_tokens_per_layer").reshape(shape) * math.sqrt(width)
        return np.asarray((normed + own) / math.sqrt(2))

    def _attention(self, layer: int, normed: Float64Array) -> Float64Array:
        config, kind, length = self._config, self._kinds[layer], len(normed)
        name, full = f"model.layers.{layer}.self_attn", kind == "full_attention"
        dim = config["global_head_dim"] if full else config["head_dim"]
        as_values = bool(config.get("attention_k_eq_v")) and full
        if "per_layer_config" in config:
            dim = config["per_layer_config"].get(str(layer), {}).get("head_dim", config["head_dim"])
        angles = self._angles(kind, dim, length)
        query = self._norm(f"{name}.q_norm", self._linear(f"{name}.q_proj", normed).reshape(length, -1, dim))
        query = rotate(query, *angles)
        if layer < config["num_hidden_layers"] - config["num_kv_shared_layers"]:
            keys = self._linear(f"{name}.k_proj", normed).reshape(length, -1, dim)
            values = keys if as_values else self._linear(f"{name}.v_proj", normed).reshape(length, -1, dim)
            keys = rotate(self._norm(f"{name}.k_norm", keys), *angles)
            self._kept[kind] = keys, rms_norm(values, config["rms_norm_eps"])
        keys, values = self._kept[kind]
        distance = np.arange(length)[:, None] - np.arange(length)
        masked = (distance < 0) | ((distance >= config["sliding_window"]) & (not full))
        attended, group = np.empty_like(query), query.shape[1] // keys.shape[1]
        for head in range(query.shape[1]):
            scores = query[:, head] @ keys[:, head // group].T
            scores[masked] = -np.inf
            attended[:, head] = softmax(scores) @ values[:, head // group]
        return self._linear(f"{name}.o_proj", attended.reshape(length, -1))

    def _angles(self, kind: str, dim: int, length: int) -> tuple[Float64Array, Float64Array]:
        """Cosine and sine, each [n, dim / 2]."""
        default: dict[str, Any] = {"rope_theta": 1e4}
        if kind == "full_attention":
            default = {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}
        settings = (self._config.get("rope_parameters") or {}).get(kind) or default
        turning = dim // 2
        if settings.get("rope_type") == "proportional":
            turning = int(settings.get("partial_rotary_factor", 1.0) * dim // 2)
        frequencies = [
            settings["rope_theta"] ** (-2 * pair / dim) / settings.get("factor", 1.0) if pair < turning else 0.0
            for pair in range(dim // 2)
        ]
        angles = np.arange(length)[:, None] * np.array(frequencies)
        return np.cos(angles), np.sin(angles)

    def _feed_forward(self, name: str, normed: Float64Array) -> Float64Array:
        gate, up = (self._linear(f"{name}.{each}_proj", normed) for each in ("gate", "up"))
        return self._linear(f"{name}.down_proj", gelu_tanh(gate) * up)

    def _linear(self, name: str, value: Float64Array) -> Float64Array:
        biased = bool(self._config.get("attention_bias")) and ".self_attn." in name
        return linear(self._weights, name, value, biased)

    def _norm(self, name: str, value: Float64Array) -> Float64Array:
        weight = self._weights.read(f"{name}.weight").astype(np.float64)
        return rms_norm(value, self._config["rms_norm_eps"]) * weight
