"""A decoder written for reading: float64 NumPy, the full attention matrix, no cache.

This is what an exported graph is compared with, so it shares no code with the graph's construction: it reads the
settings of config.json and computes rotary angles itself (`reference_positions`), straight from the models'
definitions. A piece of one matrix is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..checkpoint.source import RowRange
from .reference_positions import Float64Array, Settings, head_dim, hidden_from, rotates, rotation

TokenArray = npt.NDArray[np.int64]

_GEMMA = ("gemma2", "gemma3_text")


class WeightSource(Protocol):
    """Named tensors in float32, read when asked for."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A whole tensor."""
        ...

    def read_rows(self, rows: RowRange) -> npt.NDArray[np.float32]:
        """Some rows of a matrix."""
        ...

    def chunks(self, name: str) -> Iterator[npt.NDArray[np.float32]]:
        """A matrix from top to bottom, some rows at a time."""
        ...


def reference_logits(
    weights: WeightSource, config: Mapping[str, Any], tokens: TokenArray, context: int
) -> Float64Array:
    """Logits of every position.

    Args:
        weights: the checkpoint's tensors by their Hugging Face names.
        config: the parsed config.json.
        tokens: int64 [n].
        context: positions the exported graph serves; some rope scalings depend on it.

    Returns:
        float64 [n, vocabulary].
    """
    if config["model_type"] == "gemma3":
        config = _gemma3_text(config)
    rows = [RowRange("model.embed_tokens.weight", token, token + 1) for token in tokens.tolist()]
    hidden = np.concatenate([weights.read_rows(row) for row in rows]).astype(np.float64)
    if config["model_type"] in _GEMMA:
        hidden = hidden * math.sqrt(config["hidden_size"])
    hidden = hidden * _granite(config, "embedding_multiplier")
    for layer in range(config["num_hidden_layers"]):
        hidden = _layer(weights, config, layer, hidden, context)
    hidden = _norm(weights, config, "model.norm", hidden)
    tied = config.get("tie_word_embeddings", config["model_type"] in (*_GEMMA, "smollm3"))
    logits = _linear(weights, "model.embed_tokens" if tied else "lm_head", hidden, biased=False)
    logits = logits / _granite(config, "logits_scaling")
    return _soft_capped(logits, _cap(config, "final_logit_softcapping", {"gemma2": 30.0}))


def _layer(weights: WeightSource, config: Settings, layer: int, hidden: Float64Array, context: int) -> Float64Array:
    name, kind = f"model.layers.{layer}", config["model_type"]
    residual_multiplier = _granite(config, "residual_multiplier")

    def norm(which: str, value: Float64Array) -> Float64Array:
        return _norm(weights, config, f"{name}.{which}", value)

    def attention(value: Float64Array) -> Float64Array:
        return _attention(weights, config, layer, value, context)

    def feed_forward(value: Float64Array) -> Float64Array:
        if _has_experts(config, layer):
            return _experts(weights, config, f"{name}.mlp", value)
        return _feed_forward(weights, config, f"{name}.mlp", value)

    if kind == "olmo2":
        hidden = hidden + norm("post_attention_layernorm", attention(hidden))
        return hidden + norm("post_feedforward_layernorm", feed_forward(hidden))
    if kind in _GEMMA:
        attended = attention(norm("input_layernorm", hidden))
        hidden = hidden + norm("post_attention_layernorm", attended)
        fed = feed_forward(norm("pre_feedforward_layernorm", hidden))
        return hidden + norm("post_feedforward_layernorm", fed)
    hidden = hidden + attention(norm("input_layernorm", hidden)) * residual_multiplier
    return hidden + feed_forward(norm("post_attention_layernorm", hidden)) * residual_multiplier


def _attention(weights: WeightSource, config: Settings, layer: int, normed: Float64Array, context: int) -> Float64Array:
    kind, name, rows = config["model_type"], f"model.layers.{layer}.self_attn", len(normed)
    heads, dim = config["num_attention_heads"], head_dim(config)
    kv_heads = config.get("num_key_value_heads") or heads
    always = kind == "qwen2"  # biases there are part of the architecture, on q, k and v alone
    biased = always or bool(config.get("attention_bias", kind == "gpt_oss"))
    if kind == "phi3":
        together = _linear(weights, f"{name}.qkv_proj", normed, biased=False)
        query, key, value = np.split(together, [heads * dim, (heads + kv_heads) * dim], axis=-1)
    else:
        query, key, value = (_linear(weights, f"{name}.{each}_proj", normed, biased) for each in "qkv")

    def normed_heads(query: Float64Array, key: Float64Array) -> tuple[Float64Array, Float64Array]:
        return _norm(weights, config, f"{name}.q_norm", query), _norm(weights, config, f"{name}.k_norm", key)

    if kind == "olmo2":
        query, key = normed_heads(query, key)
    query, key, value = (each.reshape(rows, -1, dim) for each in (query, key, value))
    if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
        query, key = normed_heads(query, key)
    if rotates(config, layer):
        turn = rotation(config, layer, np.arange(rows), context)
        query, key = _rotate(query, *turn), _rotate(key, *turn)
    attended = np.empty_like(query)
    hidden = hidden_from(config, layer, rows)
    sinks = weights.read(f"{name}.sinks") if kind == "gpt_oss" else None
    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = query[:, head] @ key[:, group].T * _attention_scale(config)
        scores = _soft_capped(scores, _cap(config, "attn_logit_softcapping", {"gemma2": 50.0}))
        scores[hidden] = -np.inf
        if sinks is not None:
            scores = np.concatenate([scores, np.full((rows, 1), sinks[head])], axis=-1)
        odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended[:, head] = (odds / odds.sum(axis=-1, keepdims=True))[:, :rows] @ value[:, group]
    return _linear(weights, f"{name}.o_proj", attended.reshape(rows, -1), biased and not always)


def _attention_scale(config: Settings) -> float:
    kind = config["model_type"]
    if kind in _GEMMA:
        return float((config.get("query_pre_attn_scalar") or 256) ** -0.5)
    if kind == "granite":
        return _granite(config, "attention_multiplier")
    return 1 / math.sqrt(head_dim(config))


def _feed_forward(weights: WeightSource, config: Settings, name: str, normed: Float64Array) -> Float64Array:
    biased = config["model_type"] in ("llama", "granite", "smollm3") and bool(config.get("mlp_bias"))
    if config["model_type"] == "phi3":
        gate, up = np.split(_linear(weights, f"{name}.gate_up_proj", normed, biased=False), 2, axis=-1)
    else:
        gate, up = (_linear(weights, f"{name}.{each}_proj", normed, biased) for each in ("gate", "up"))
    return _linear(weights, f"{name}.down_proj", _activated(config, gate) * up, biased)


def _has_experts(config: Settings, layer: int) -> bool:
    if config["model_type"] == "gpt_oss":
        return True
    if config["model_type"] != "qwen3_moe" or layer in (config.get("mlp_only_layers") or []):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def _experts(weights: WeightSource, config: Settings, name: str, normed: Float64Array) -> Float64Array:
    """Each token through the experts it likes best, in shares of its liking."""
    oss = config["model_type"] == "gpt_oss"
    scores = _linear(weights, f"{name}.{'router' if oss else 'gate'}", normed, biased=oss)
    odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares = odds / odds.sum(axis=-1, keepdims=True)
    chosen = np.argsort(-shares, axis=-1)[:, : config["num_experts_per_tok"]]
    result = np.zeros_like(normed)
    for expert in np.unique(chosen):
        tokens = np.flatnonzero((chosen == expert).any(axis=-1))
        share = shares[tokens, expert]
        if oss or config.get("norm_topk_prob"):
            share = share / np.take_along_axis(shares[tokens], chosen[tokens], axis=-1).sum(axis=-1)
        if oss:
            made = _oss_expert(weights, config, f"{name}.experts", int(expert), normed[tokens])
        else:
            made = _feed_forward(weights, config, f"{name}.experts.{expert}", normed[tokens])
        result[tokens] += share[:, None] * made
    return result


def _oss_expert(weights: WeightSource, config: Settings, name: str, expert: int, normed: Float64Array) -> Float64Array:
    """One of gpt-oss's experts, whose gate and up outputs alternate."""

    def linear(which: str, rows: int, value: Float64Array) -> Float64Array:
        weight = weights.read_rows(RowRange(f"{name}.{which}", expert * rows, (expert + 1) * rows))
        return np.asarray(value @ weight.astype(np.float64).T + weights.read(f"{name}.{which}_bias")[expert])

    limit, alpha = config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702)
    both = linear("gate_up_proj", 2 * config["intermediate_size"], normed)
    gate, up = np.minimum(both[:, ::2], limit), np.clip(both[:, 1::2], -limit, limit)
    return linear("down_proj", config["hidden_size"], gate / (1 + np.exp(-alpha * gate)) * (up + 1))


def _activated(config: Settings, gate: Float64Array) -> Float64Array:
    gemma = config["model_type"] in _GEMMA
    name = config.get("hidden_activation" if gemma else "hidden_act") or ("gelu_pytorch_tanh" if gemma else "silu")
    if name == "gelu_pytorch_tanh":
        return np.asarray(gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))))
    with np.errstate(over="ignore"):  # far below zero the quotient is zero, as it should be
        return np.asarray(gate / (1 + np.exp(-gate)))


def _linear(weights: WeightSource, name: str, value: Float64Array, biased: bool) -> Float64Array:
    """value @ weight.T + bias, a piece of the weight at a time."""
    products = [value @ piece.astype(np.float64).T for piece in weights.chunks(f"{name}.weight")]
    result = np.concatenate(products, axis=-1)
    return result + weights.read(f"{name}.bias") if biased else result


def _norm(weights: WeightSource, config: Settings, name: str, value: Float64Array) -> Float64Array:
    usual = 1e-5 if config["model_type"] in ("phi3", "olmo2", "gpt_oss") else 1e-6
    epsilon = float(config.get("rms_norm_eps") or usual)
    scaled: Float64Array = value / np.sqrt(np.mean(value**2, axis=-1, keepdims=True) + epsilon)
    weight = weights.read(f"{name}.weight").astype(np.float64)
    return scaled * (1 + weight if config["model_type"] in _GEMMA else weight)


def _soft_capped(value: Float64Array, cap: float | None) -> Float64Array:
    return value if cap is None else np.asarray(cap * np.tanh(value / cap))


def _cap(config: Settings, name: str, usual: Mapping[str, float]) -> float | None:
    """A soft cap of the families that have it; `usual` by model type, when config.json does not name it."""
    if config["model_type"] not in _GEMMA or (config["model_type"] == "gemma3_text" and name.startswith("attn")):
        return None
    cap = config.get(name, usual.get(config["model_type"]))
    return None if cap is None else float(cap)


def _granite(config: Settings, name: str) -> float:
    """One of Granite's multipliers."""
    return float(config.get(name) or 1.0) if config["model_type"] == "granite" else 1.0


def _gemma3_text(config: Settings) -> Settings:
    """The language model's settings in a multimodal config.json, which names only what differs from the usual."""
    usual = {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    }
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return {**usual, **tied, **config["text_config"]}


def _rotate(heads: Float64Array, cosine: Float64Array, sine: Float64Array) -> Float64Array:
    """Turn channel pairs (i, i + dim/2) of the first dim channels of heads [n, heads, _] by angles [n, dim/2]."""
    half = cosine.shape[-1]
    first, second, rest = np.split(heads, [half, 2 * half], axis=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)
