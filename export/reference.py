"""A decoder written for reading: float64 NumPy, the full attention matrix, no cache.

This is what an exported graph is compared with, so it shares no code with the graph's construction: it reads the
settings of config.json and computes rotary angles itself, straight from the models' definitions. A piece of one matrix
is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .checkpoint import RowRange

Float64Array = npt.NDArray[np.float64]
TokenArray = npt.NDArray[np.int64]


class WeightSource(Protocol):
    """Named tensors in float32, read when asked for."""

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A whole tensor."""
        ...

    def read_rows(self, rows: RowRange) -> npt.NDArray[np.float32]:
        """Some rows of a matrix."""
        ...

    def pieces(self, name: str) -> Iterator[npt.NDArray[np.float32]]:
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
        context: positions the exported graph serves; dynamic rope scaling depends on it.

    Returns:
        float64 [n, vocabulary].
    """
    rows = [RowRange("model.embed_tokens.weight", token, token + 1) for token in tokens.tolist()]
    hidden = np.concatenate([weights.read_rows(row) for row in rows]).astype(np.float64)
    epsilon = _epsilon(config)
    rotation = _rotation(config, np.arange(len(tokens)), context)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        normed = _rms_norm(hidden, weights.read(f"{name}.input_layernorm.weight"), epsilon)
        hidden = hidden + _attention(weights, config, f"{name}.self_attn", normed, rotation)
        normed = _rms_norm(hidden, weights.read(f"{name}.post_attention_layernorm.weight"), epsilon)
        hidden = hidden + _feed_forward(weights, config, f"{name}.mlp", normed)
    hidden = _rms_norm(hidden, weights.read("model.norm.weight"), epsilon)
    head = "model.embed_tokens" if config.get("tie_word_embeddings", False) else "lm_head"
    return _linear(weights, head, hidden, biased=False)


def _attention(
    weights: WeightSource,
    config: Mapping[str, Any],
    name: str,
    normed: Float64Array,
    rotation: tuple[Float64Array, Float64Array],
) -> Float64Array:
    rows = len(normed)
    heads, dim = config["num_attention_heads"], _head_dim(config)
    kv_heads = config.get("num_key_value_heads") or heads
    always = config["model_type"] == "qwen2"  # biases there are part of the architecture, on q, k and v alone
    biased = always or bool(config.get("attention_bias"))
    query = _linear(weights, f"{name}.q_proj", normed, biased).reshape(rows, heads, dim)
    key = _linear(weights, f"{name}.k_proj", normed, biased).reshape(rows, kv_heads, dim)
    value = _linear(weights, f"{name}.v_proj", normed, biased).reshape(rows, kv_heads, dim)
    if config["model_type"] == "qwen3":
        query = _rms_norm(query, weights.read(f"{name}.q_norm.weight"), _epsilon(config))
        key = _rms_norm(key, weights.read(f"{name}.k_norm.weight"), _epsilon(config))
    query, key = _rotate(query, *rotation), _rotate(key, *rotation)
    attended = np.empty_like(query)
    future = np.triu(np.ones((rows, rows), bool), 1)
    for head in range(heads):
        group = head // (heads // kv_heads)
        scores = query[:, head] @ key[:, group].T / math.sqrt(dim)
        scores[future] = -np.inf
        odds = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended[:, head] = odds / odds.sum(axis=-1, keepdims=True) @ value[:, group]
    return _linear(weights, f"{name}.o_proj", attended.reshape(rows, -1), biased and not always)


def _feed_forward(weights: WeightSource, config: Mapping[str, Any], name: str, normed: Float64Array) -> Float64Array:
    biased = config["model_type"] == "llama" and bool(config.get("mlp_bias"))
    gate = _linear(weights, f"{name}.gate_proj", normed, biased)
    up = _linear(weights, f"{name}.up_proj", normed, biased)
    return _linear(weights, f"{name}.down_proj", gate / (1 + np.exp(-gate)) * up, biased)


def _linear(weights: WeightSource, name: str, value: Float64Array, biased: bool) -> Float64Array:
    """value @ weight.T + bias, a piece of the weight at a time."""
    products = [value @ piece.astype(np.float64).T for piece in weights.pieces(f"{name}.weight")]
    result = np.concatenate(products, axis=-1)
    return result + weights.read(f"{name}.bias") if biased else result


def _rms_norm(value: Float64Array, weight: npt.NDArray[np.float32], epsilon: float) -> Float64Array:
    scaled: Float64Array = value / np.sqrt(np.mean(value**2, axis=-1, keepdims=True) + epsilon)
    return scaled * weight


def _epsilon(config: Mapping[str, Any]) -> float:
    return float(config.get("rms_norm_eps") or 1e-6)


def _head_dim(config: Mapping[str, Any]) -> int:
    if config.get("head_dim"):
        return int(config["head_dim"])
    return 128 if config["model_type"] == "qwen3" else int(config["hidden_size"] // config["num_attention_heads"])


def _rotate(heads: Float64Array, cosine: Float64Array, sine: Float64Array) -> Float64Array:
    """Turn channel pairs (i, i + dim/2) of heads [n, heads, dim] by the angles of their rows [n, dim/2]."""
    first, second = np.split(heads, 2, axis=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def _rotation(
    config: Mapping[str, Any], positions: npt.NDArray[np.int64], context: int
) -> tuple[Float64Array, Float64Array]:
    """Cosine and sine [n, dim/2] of every position and channel pair, magnitudes included."""
    dim = _head_dim(config)
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = settings.get("rope_type", settings.get("type", "default"))
    trained = config["max_position_embeddings"]
    if kind == "dynamic" and context > trained:
        # NTK-aware: the slowest pair is stretched by the ratio, the fastest kept.
        stretch = settings["factor"] * context / trained - (settings["factor"] - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    magnitude = 1.0
    angular = []
    for pair in range(dim // 2):
        speed = theta ** (-2 * pair / dim)
        if kind == "linear":
            speed /= settings["factor"]
        elif kind == "llama3":
            speed = _llama3_speed(speed, settings)
        elif kind == "yarn":
            speed, magnitude = _yarn_speed(pair, speed, theta, dim, settings, trained)
        angular.append(speed)
    angles = positions[:, None] * np.array(angular)
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude


def _llama3_speed(speed: float, settings: Mapping[str, Any]) -> float:
    wavelength = 2 * math.pi / speed
    original = settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    if wavelength < original / high:
        return speed
    if wavelength > original / low:
        return speed / float(settings["factor"])
    smooth = (original / wavelength - low) / (high - low)
    return float((1 - smooth) * speed / settings["factor"] + smooth * speed)


def _yarn_speed(
    pair: int, speed: float, theta: float, dim: int, settings: Mapping[str, Any], trained: int
) -> tuple[float, float]:
    """YaRN (Peng et al. 2023): angle per position of one channel pair, and the magnitude of the whole table."""
    original = settings.get("original_max_position_embeddings") or trained
    factor = settings.get("factor") or trained / original
    # The pairs that turn beta_fast and beta_slow times over the original context bound the ramp.
    bounds = [
        dim * math.log(original / (2 * math.pi * (settings.get(name) or default))) / (2 * math.log(theta))
        for name, default in (("beta_fast", 32), ("beta_slow", 1))
    ]
    if settings.get("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], dim - 1)
    ramp = (pair - low) / (high - low) if high != low else (pair - low) / 0.001
    interpolate = min(max(ramp, 0.0), 1.0)
    magnitude = settings.get("attention_factor")
    if magnitude is None:
        above, below = settings.get("mscale"), settings.get("mscale_all_dim")
        growth = max(math.log(factor), 0.0) / 10
        magnitude = (1 + growth * above) / (1 + growth * below) if above and below else 1 + growth
    return (1 - interpolate) * speed + interpolate * speed / factor, float(magnitude)
