"""Rotary angles and attention masks of the reference decoder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Settings = Mapping[str, Any]

DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Families with gated delta nets, gated attention and partial rotary positions."""
WITHOUT_WINDOWS = ("llama", "granite", "granitemoehybrid", "olmo2", "lfm2", *DELTA_NETS)


def has_window(config: Settings, layer: int) -> bool:
    """Whether a layer has sliding-window attention."""
    kind = config["model_type"]
    if kind in WITHOUT_WINDOWS:
        return False
    if kind in ("mistral", "ministral3", "phi3"):
        return config.get("sliding_window", 4096 if kind == "mistral" else None) is not None
    if kind == "smollm3" and not config.get("use_sliding_window"):
        return False
    if config.get("layer_types"):
        return bool(config["layer_types"][layer] == "sliding_attention")
    if kind in ("gemma2", "gemma3_text", "gpt_oss"):
        period = config.get("sliding_window_pattern", 6) if kind == "gemma3_text" else 2
        return bool((layer + 1) % period)
    return _has_optional_window(config, layer)


def _has_optional_window(config: Settings, layer: int) -> bool:
    """`has_window` for models with the setting `use_sliding_window`."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return False
    if config["model_type"] == "smollm3":
        return not has_rotary(config, layer)
    return bool(layer >= (config.get("max_window_layers") or 0))


def has_attention(config: Settings, layer: int) -> bool:
    """Whether a layer of a hybrid model has attention, and not a convolution or linear attention."""
    if config.get("layer_types"):
        return bool(config["layer_types"][layer] in ("attention", "full_attention"))
    if config["model_type"] in DELTA_NETS:
        return (layer + 1) % int(config.get("full_attention_interval") or 4) == 0
    return config.get("full_attn_idxs") is None or layer in config["full_attn_idxs"]


def masked_positions(config: Settings, layer: int, length: int) -> npt.NDArray[np.bool_]:
    """Keys that a query does not attend to, bool [query, key]: later ones, and those before its window."""
    distance = np.arange(length)[:, None] - np.arange(length)
    if not has_window(config, layer):
        return np.asarray(distance < 0)
    default = 128 if config["model_type"] == "gpt_oss" else 4096
    return np.asarray((distance < 0) | (distance >= config.get("sliding_window", default)))


def has_rotary(config: Settings, layer: int) -> bool:
    """Whether a layer has rotary positions."""
    if config["model_type"] == "granitemoehybrid":
        return bool(config.get("position_embedding_type") == "rope")
    if config["model_type"] != "smollm3":
        return True
    listed = config.get("no_rope_layers")
    return bool(listed[layer] if listed else (layer + 1) % (config.get("no_rope_layer_interval") or 4))


def head_dim(config: Settings) -> int:
    """Number of channels per head."""
    wide = dict.fromkeys(("gemma2", "gemma3_text", *DELTA_NETS), 256)
    default = {"qwen3": 128, "gpt_oss": 64, **wide}.get(config["model_type"])
    return int(config.get("head_dim") or default or config["hidden_size"] // config["num_attention_heads"])


def rotation(
    config: Settings, layer: int, positions: npt.NDArray[np.int64], context: int
) -> tuple[Float64Array, Float64Array]:
    """Cosine and sine, each [n, dim/2], of every position and rotated channel pair, times the attention factor."""
    settings, theta = _rotary_settings(config, layer)
    usual = 0.25 if config["model_type"] in DELTA_NETS else 1.0
    fraction = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or usual
    dim = int(head_dim(config) * fraction)
    kind = settings.get("rope_type", settings.get("type", "default"))
    trained_length = config["max_position_embeddings"]
    if kind == "dynamic" and context > trained_length:
        # NTK-aware: the slowest pair is stretched by the ratio, the fastest is unchanged.
        stretch = settings["factor"] * context / trained_length - (settings["factor"] - 1)
        theta = theta * stretch ** (dim / (dim - 2))
    attention_factor = 1.0
    frequencies = []
    for pair in range(dim // 2):
        frequency = theta ** (-2 * pair / dim)
        if "short_factor" in settings:
            frequency, attention_factor = _longrope_frequency(pair, frequency, settings, config, context)
        elif kind == "linear":
            frequency /= settings["factor"]
        elif kind == "llama3":
            frequency = _llama3_frequency(frequency, settings)
        elif kind == "yarn":
            frequency, attention_factor = _yarn_frequency(pair, frequency, theta, dim, settings, trained_length)
        frequencies.append(frequency)
    angles = positions[:, None] * np.array(frequencies)
    return np.cos(angles) * attention_factor, np.sin(angles) * attention_factor


def query_scales(config: Settings, positions: npt.NDArray[np.int64]) -> Float64Array:
    """Factor [n] on the query of every position, as in Llama 4; 1 for models without it."""
    settings = config.get("rope_parameters") or {}
    if config["model_type"] != "ministral3" or not settings.get("llama_4_scaling_beta"):
        return np.ones(len(positions))
    turns = np.floor(positions / settings["original_max_position_embeddings"])
    return np.asarray(1 + settings["llama_4_scaling_beta"] * np.log(1 + turns))


def _rotary_settings(config: Settings, layer: int) -> tuple[Settings, float]:
    """RoPE scaling settings and theta of a layer."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] == "gpt_oss" and not settings:
        settings = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    default = {"smollm3": 2e6, "gemma3_text": 1e6, "gpt_oss": 1.5e5, "lfm2": 1e6}.get(config["model_type"], 1e4)
    theta = config.get("rope_theta") or default
    if config["model_type"] == "gemma3_text":
        is_local = has_window(config, layer)
        theta = (config.get("rope_local_base_freq") or 1e4) if is_local else theta
        if "full_attention" in settings:
            settings = settings["sliding_attention" if is_local else "full_attention"]
        elif is_local:
            settings = {}
    return settings, float(settings.get("rope_theta") or theta)


def _longrope_frequency(
    pair: int, frequency: float, settings: Settings, config: Settings, context: int
) -> tuple[float, float]:
    """LongRoPE (Ding et al. 2024): angle per position of one channel pair, and the attention factor."""
    trained_length = config["max_position_embeddings"]
    name = "original_max_position_embeddings"
    original = config.get(name) or settings.get(name) or trained_length
    factors = settings["long_factor" if context > original else "short_factor"]
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        factor = settings.get("factor") or trained_length / original
        attention_factor = math.sqrt(1 + max(math.log(factor), 0.0) / math.log(original))
    return frequency / factors[pair], float(attention_factor)


def _llama3_frequency(frequency: float, settings: Settings) -> float:
    wavelength = 2 * math.pi / frequency
    original = settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    if wavelength < original / high:
        return frequency
    if wavelength > original / low:
        return frequency / float(settings["factor"])
    smooth = (original / wavelength - low) / (high - low)
    return float((1 - smooth) * frequency / settings["factor"] + smooth * frequency)


def _yarn_frequency(
    pair: int, frequency: float, theta: float, dim: int, settings: Settings, trained_length: int
) -> tuple[float, float]:
    """YaRN (Peng et al. 2023): angle per position of one channel pair, and the attention factor."""
    original = settings.get("original_max_position_embeddings") or trained_length
    factor = settings.get("factor") or trained_length / original
    # The ramp lies between the pairs that rotate beta_fast and beta_slow times over the original context.
    bounds = [
        dim * math.log(original / (2 * math.pi * (settings.get(name) or default))) / (2 * math.log(theta))
        for name, default in (("beta_fast", 32), ("beta_slow", 1))
    ]
    if settings.get("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], dim - 1)
    ramp = (pair - low) / (high - low) if high != low else (pair - low) / 0.001
    interpolate = min(max(ramp, 0.0), 1.0)
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        above, below = settings.get("mscale"), settings.get("mscale_all_dim")
        growth = max(math.log(factor), 0.0) / 10
        attention_factor = (1 + growth * above) / (1 + growth * below) if above and below else 1 + growth
    return (1 - interpolate) * frequency + interpolate * frequency / factor, float(attention_factor)
