"""Reference decoder in float64 NumPy, with the full attention matrix and no cache.

Exported graphs are compared with it, so it shares no code with their construction: it reads config.json and computes
rotary angles itself (`reference_positions`), as the models define them. Only a chunk of one matrix is in memory at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..checkpoint.source import ModelSource
from .reference_gemma4 import gemma4_logits
from .reference_operations import (
    convolved,
    delta_net,
    embedding_rows,
    experts,
    gated,
    gated_by_half,
    gelu_tanh,
    has_experts,
    linear,
    mamba2,
    rms_norm,
    rotate,
    silu,
    soft_capped,
    softmax,
)
from .reference_positions import (
    DELTA_NETS,
    Float64Array,
    Settings,
    has_attention,
    has_rotary,
    head_dim,
    masked_positions,
    query_scales,
    rotation,
)

TokenArray = npt.NDArray[np.int64]

_GEMMA = ("gemma2", "gemma3_text")
_GRANITE = ("granite", "granitemoehybrid")
_LANGUAGE_MODELS: Final = {
    "idefics3": "llama",
    "lfm2_vl": "lfm2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "smolvlm": "llama",
}
"""What the language models of families that see compute as."""
_IN_BLOCKS = {
    "sdar": "qwen3",
    "sdar_moe": "qwen3_moe",
    "Fast_dLLM_Qwen": "qwen2",
    "Dream": "qwen2",
    "llada": "llama",
}
"""Families with block diffusion, and those that they compute like under the same mask."""
_ADDING_ONE = (*_GEMMA, *DELTA_NETS)
"""Families whose norms scale by 1 + weight."""


def reference_logits(weights: ModelSource, config: Mapping[str, Any], tokens: TokenArray, context: int) -> Float64Array:
    """Compute the logits of every position.

    Args:
        weights: the checkpoint's tensors by their Hugging Face names.
        config: the parsed config.json.
        tokens: token ids, int64 [n].
        context: number of positions that the exported graph supports; some RoPE scalings depend on it.

    Returns:
        float64 [n, vocabulary].
    """
    if config["model_type"] in ("gemma4", "gemma4_text"):
        return gemma4_logits(weights, config, tokens)
    config = language_settings(config)
    hidden = reference_states(weights, config, tokens, context)[-1]
    name = "model.embedding_norm" if config["model_type"] == "lfm2" else "model.norm"
    return reference_lm_head(weights, config, reference_norm(weights, config, name, hidden))


def reference_lm_head(weights: ModelSource, config: Settings, hidden: Float64Array) -> Float64Array:
    """Compute the logits float64 [n, vocabulary] of states after the last norm, float64 [n, hidden]."""
    tied = config.get("tie_word_embeddings", config["model_type"] in (*_GEMMA, "smollm3", "lfm2"))
    tied = config.get("tie_embedding", tied) if config["model_type"] == "lfm2" else tied
    logits = linear(weights, "model.embed_tokens" if tied else "lm_head", hidden, biased=False)
    logits = logits / _granite(config, "logits_scaling")
    return soft_capped(logits, _cap(config, "final_logit_softcapping", {"gemma2": 30.0}))


def reference_states(
    weights: ModelSource, config: Mapping[str, Any], tokens: TokenArray, context: int
) -> list[Float64Array]:
    """Compute the residual stream of every position; arguments as for `reference_logits`, but not for Gemma 4.

    Returns:
        float64 [n, hidden] before each layer, and after the last one.
    """
    config = language_settings(config)
    hidden = embedding_rows(weights, tokens)
    if config["model_type"] in _GEMMA:
        hidden = hidden * math.sqrt(config["hidden_size"])
    states = [hidden * _granite(config, "embedding_multiplier")]
    for layer in range(config["num_hidden_layers"]):
        states.append(reference_layer(weights, config, layer, states[-1], context))
    return states


def language_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model, which are nested in some multimodal models."""
    if config["model_type"] == "gemma3":
        return _gemma3_text(config)
    if config["model_type"] in _IN_BLOCKS:
        return {**config, "model_type": _IN_BLOCKS[config["model_type"]]}
    if config["model_type"] in ("mistral3", "qwen3_5", "qwen3_5_moe"):
        return {"tie_word_embeddings": False, **config, **config["text_config"]}
    if (kind := _LANGUAGE_MODELS.get(config["model_type"])) is not None:
        outer = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        return {"rms_norm_eps": 1e-5, **outer, **config.get("text_config", config), "model_type": kind}
    return config


def reference_layer(
    weights: ModelSource, config: Settings, layer: int, hidden: Float64Array, context: int
) -> Float64Array:
    """Compute the residual stream after a layer from the one before it, float64 [n, hidden]."""
    name, kind = f"model.layers.{layer}", config["model_type"]
    residual_multiplier = _granite(config, "residual_multiplier")

    def norm(suffix: str, value: Float64Array) -> Float64Array:
        return reference_norm(weights, config, f"{name}.{suffix}", value)

    def attention(value: Float64Array) -> Float64Array:
        return reference_attention(weights, config, layer, value, context)

    def mix_tokens(value: Float64Array) -> Float64Array:
        if kind not in (*DELTA_NETS, "granitemoehybrid") or has_attention(config, layer):
            return attention(value)
        if kind == "granitemoehybrid":
            return mamba2(weights, config, f"{name}.mamba", value)
        return delta_net(weights, config, f"{name}.linear_attn", value)

    def feed_forward(value: Float64Array) -> Float64Array:
        if has_experts(config, layer):
            return experts(weights, config, name, value)
        if kind == "granitemoehybrid":
            return gated_by_half(weights, f"{name}.shared_mlp", value)
        return reference_feed_forward(weights, config, f"{name}.mlp", value)

    if kind == "olmo2":
        hidden = hidden + norm("post_attention_layernorm", attention(hidden))
        return hidden + norm("post_feedforward_layernorm", feed_forward(hidden))
    if kind == "lfm2":
        normed = norm("operator_norm", hidden)
        mixed = attention(normed) if has_attention(config, layer) else _convolution(weights, config, name, normed)
        hidden = hidden + mixed
        return hidden + gated(weights, f"{name}.feed_forward", ("w1", "w3", "w2"), norm("ffn_norm", hidden))
    if kind in _GEMMA:
        attended = attention(norm("input_layernorm", hidden))
        hidden = hidden + norm("post_attention_layernorm", attended)
        expanded = feed_forward(norm("pre_feedforward_layernorm", hidden))
        return hidden + norm("post_feedforward_layernorm", expanded)
    hidden = hidden + mix_tokens(norm("input_layernorm", hidden)) * residual_multiplier
    return hidden + feed_forward(norm("post_attention_layernorm", hidden)) * residual_multiplier


def reference_attention(
    weights: ModelSource, config: Settings, layer: int, normed: Float64Array, context: int
) -> Float64Array:
    """Compute the output of the attention of a layer from its input, float64 [n, _]."""
    kind, name, length = config["model_type"], f"model.layers.{layer}.self_attn", len(normed)
    heads, dim = config["num_attention_heads"], head_dim(config)
    kv_heads = config.get("num_key_value_heads") or heads
    qkv_only = kind == "qwen2"  # its biases are part of the architecture, on q, k and v alone
    biased = qkv_only or bool(config.get("attention_bias", kind == "gpt_oss"))
    if kind == "phi3":
        fused = linear(weights, f"{name}.qkv_proj", normed, biased=False)
        query, key, value = np.split(fused, [heads * dim, (heads + kv_heads) * dim], axis=-1)
    else:
        query, key, value = (linear(weights, f"{name}.{each}_proj", normed, biased) for each in "qkv")

    gate = None
    if kind in DELTA_NETS:
        query, gate = (each.reshape(length, -1) for each in np.split(query.reshape(length, heads, -1), 2, axis=-1))
    suffix = "layernorm" if kind == "lfm2" else "norm"

    def normed_heads(query: Float64Array, key: Float64Array) -> tuple[Float64Array, Float64Array]:
        names = f"{name}.q_{suffix}", f"{name}.k_{suffix}"
        return reference_norm(weights, config, names[0], query), reference_norm(weights, config, names[1], key)

    if kind == "olmo2":
        query, key = normed_heads(query, key)
    query, key, value = (each.reshape(length, -1, dim) for each in (query, key, value))
    if kind in ("qwen3", "qwen3_moe", "gemma3_text", "lfm2", *DELTA_NETS):
        query, key = normed_heads(query, key)
    if has_rotary(config, layer):
        angles = rotation(config, layer, np.arange(length), context)
        query, key = rotate(query, *angles), rotate(key, *angles)
    query = query * query_scales(config, np.arange(length))[:, None, None]
    attended = np.empty_like(query)
    masked = masked_positions(config, layer, length)
    sinks = weights.read(f"{name}.sinks") if kind == "gpt_oss" else None
    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = query[:, head] @ key[:, group].T * _attention_scale(config)
        scores = soft_capped(scores, _cap(config, "attn_logit_softcapping", {"gemma2": 50.0}))
        scores[masked] = -np.inf
        if sinks is not None:
            scores = np.concatenate([scores, np.full((length, 1), sinks[head])], axis=-1)
        attended[:, head] = softmax(scores)[:, :length] @ value[:, group]
    output = "out_proj" if kind == "lfm2" else "o_proj"
    attended = attended.reshape(length, -1)
    if gate is not None:
        attended = attended / (1 + np.exp(-gate))
    return linear(weights, f"{name}.{output}", attended, biased and not qkv_only)


def _convolution(weights: ModelSource, config: Settings, layer: str, normed: Float64Array) -> Float64Array:
    """LFM2's gated short convolution: every channel's inputs at the last few tokens, weighted by its kernel."""
    name, biased = f"{layer}.conv", bool(config.get("conv_bias"))
    gate_in, gate_out, value = np.split(linear(weights, f"{name}.in_proj", normed, biased), 3, axis=-1)
    mixed = convolved(weights, f"{name}.conv.weight", gate_in * value)
    if biased:
        mixed = mixed + weights.read(f"{name}.conv.bias")
    return linear(weights, f"{name}.out_proj", gate_out * mixed, biased)


def _attention_scale(config: Settings) -> float:
    kind = config["model_type"]
    if kind in _GEMMA:
        return float((config.get("query_pre_attn_scalar") or 256) ** -0.5)
    if kind in _GRANITE:
        return _granite(config, "attention_multiplier")
    return 1 / math.sqrt(head_dim(config))


def reference_feed_forward(weights: ModelSource, config: Settings, name: str, normed: Float64Array) -> Float64Array:
    """Compute the output of a dense feed-forward from its input, float64 [n, hidden]."""
    biased = config["model_type"] in ("llama", "granite", "smollm3") and bool(config.get("mlp_bias"))
    if config["model_type"] == "phi3":
        gate, up = np.split(linear(weights, f"{name}.gate_up_proj", normed, biased=False), 2, axis=-1)
    else:
        gate, up = (linear(weights, f"{name}.{each}_proj", normed, biased) for each in ("gate", "up"))
    return linear(weights, f"{name}.down_proj", _activated(config, gate) * up, biased)


def _activated(config: Settings, gate: Float64Array) -> Float64Array:
    gemma = config["model_type"] in _GEMMA
    name = config.get("hidden_activation" if gemma else "hidden_act") or ("gelu_pytorch_tanh" if gemma else "silu")
    return gelu_tanh(gate) if name == "gelu_pytorch_tanh" else silu(gate)


def reference_norm(weights: ModelSource, config: Settings, name: str, value: Float64Array) -> Float64Array:
    """Compute an RMS norm of the model."""
    default = 1e-5 if config["model_type"] in ("phi3", "olmo2", "gpt_oss", "lfm2") else 1e-6
    epsilon = float(config.get("norm_eps" if config["model_type"] == "lfm2" else "rms_norm_eps") or default)
    weight = weights.read(f"{name}.weight").astype(np.float64)
    return rms_norm(value, epsilon) * (1 + weight if config["model_type"] in _ADDING_ONE else weight)


def _cap(config: Settings, name: str, defaults: Mapping[str, float]) -> float | None:
    """The soft cap of a Gemma model; `defaults` by model type apply if config.json does not name it."""
    if config["model_type"] not in _GEMMA or (config["model_type"] == "gemma3_text" and name.startswith("attn")):
        return None
    cap = config.get(name, defaults.get(config["model_type"]))
    return None if cap is None else float(cap)


def _granite(config: Settings, name: str) -> float:
    """One of Granite's multipliers; 1 for other models."""
    return float(config.get(name) or 1.0) if config["model_type"] in _GRANITE else 1.0


def _gemma3_text(config: Settings) -> Settings:
    """The language model's settings in a multimodal config.json, which lists only non-default ones."""
    defaults = {
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
    return {**defaults, **tied, **config["text_config"]}
