"""Positions for the reference decoder: rotary angles, and what a token may see, as the models define them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
Settings = Mapping[str, Any]

WITHOUT_WINDOWS = ("llama", "granite", "olmo2")


def slides(config: Settings, layer: int) -> bool:
    """Whether a layer attends to the window only."""
    kind = config["model_type"]
    if kind in WITHOUT_WINDOWS:
        return False
    if kind in ("mistral", "phi3"):
        return config.get("sliding_window", 4096 if kind == "mistral" else None) is not None
    if kind == "smollm3" and not config.get("use_sliding_window"):
        return False
    if config.get("layer_types"):
        return bool(config["layer_types"][layer] == "sliding_attention")
    if kind in ("gemma2", "gemma3_text", "gpt_oss"):
        period = config.get("sliding_window_pattern", 6) if kind == "gemma3_text" else 2
        return bool((layer + 1) % period)
    return _slides_from(config, layer)


def _slides_from(config: Settings, layer: int) -> bool:
    """The rule of the models that have `use_sliding_window`."""
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return False
    if config["model_type"] == "smollm3":
        return not rotates(config, layer)
    return bool(layer >= (config.get("max_window_layers") or 0))


def hidden_from(config: Settings, layer: int, rows: int) -> npt.NDArray[np.bool_]:
    """Which keys [query, key] a query must not see: later ones, and those before its window."""
    age = np.arange(rows)[:, None] - np.arange(rows)
    if not slides(config, layer):
        return np.asarray(age < 0)
    usual = 128 if config["model_type"] == "gpt_oss" else 4096
    return np.asarray((age < 0) | (age >= config.get("sliding_window", usual)))


def rotates(config: Settings, layer: int) -> bool:
    """Whether a layer has rotary positions at all."""
    if config["model_type"] != "smollm3":
        return True
    listed = config.get("no_rope_layers")
    return bool(listed[layer] if listed else (layer + 1) % (config.get("no_rope_layer_interval") or 4))


def head_dim(config: Settings) -> int:
    """Channels per head."""
    usual = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64}.get(config["model_type"])
    return int(config.get("head_dim") or usual or config["hidden_size"] // config["num_attention_heads"])


def rotation(
    config: Settings, layer: int, positions: npt.NDArray[np.int64], context: int
) -> tuple[Float64Array, Float64Array]:
    """Cosine and sine [n, dim/2] of every position and channel pair that turns, magnitudes included."""
    settings, theta = _rotary_settings(config, layer)
    share = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    dim = int(head_dim(config) * share)
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
        if "short_factor" in settings:
            speed, magnitude = _long_speed(pair, speed, settings, config, context)
        elif kind == "linear":
            speed /= settings["factor"]
        elif kind == "llama3":
            speed = _llama3_speed(speed, settings)
        elif kind == "yarn":
            speed, magnitude = _yarn_speed(pair, speed, theta, dim, settings, trained)
        angular.append(speed)
    angles = positions[:, None] * np.array(angular)
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude


def _rotary_settings(config: Settings, layer: int) -> tuple[Settings, float]:
    """A layer's scaling and theta."""
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] == "gpt_oss" and not settings:
        settings = {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        }
    usual = {"smollm3": 2e6, "gemma3_text": 1e6, "gpt_oss": 1.5e5}.get(config["model_type"], 1e4)
    theta = config.get("rope_theta") or usual
    if config["model_type"] == "gemma3_text":
        local = slides(config, layer)
        theta = (config.get("rope_local_base_freq") or 1e4) if local else theta
        if "full_attention" in settings:
            settings = settings["sliding_attention" if local else "full_attention"]
        elif local:
            settings = {}
    return settings, float(settings.get("rope_theta") or theta)


def _long_speed(pair: int, speed: float, settings: Settings, config: Settings, context: int) -> tuple[float, float]:
    """LongRoPE (Ding et al. 2024): angle per position of one channel pair, and the magnitude of the whole table."""
    trained = config["max_position_embeddings"]
    name = "original_max_position_embeddings"
    original = config.get(name) or settings.get(name) or trained
    factors = settings["long_factor" if context > original else "short_factor"]
    magnitude = settings.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(trained / original) / math.log(original)) if trained > original else 1.0
    return speed / factors[pair], float(magnitude)


def _llama3_speed(speed: float, settings: Settings) -> float:
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
    pair: int, speed: float, theta: float, dim: int, settings: Settings, trained: int
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
