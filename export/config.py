"""config.json of a Hugging Face checkpoint, read into the numbers the graph is built from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..edge.errors import CheckpointError
from ..models.json_file import is_finite, is_whole, read_json_object, shown
from ..models.manifest import SHORTEST_CONTEXT
from .family import find_family
from .rope import Dynamic, Linear, Llama3, Rope, RopeScaling, Unscaled, Yarn

LARGEST_COUNT: Final = (1 << 31) - 1
"""Of a whole number in config.json: the graph's operators count in 32 bits."""
LARGEST_NUMBER: Final = 1e30
"""Of a real number in config.json; larger ones mean nothing and their powers overflow."""
SUPPORTED_SCALINGS: Final = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer of the common plan (see `family`)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_epsilon: float
    rope: Rope
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def query_width(self) -> int:
        """Channels of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key heads together; of the value heads just as many."""
        return self.kv_heads * self.head_dim


def read_config(folder: Path) -> DecoderConfig:
    """Read `folder`/config.json.

    Raises:
        CheckpointError: it is absent, not JSON, lacks a number, or describes a model that is not supported.
    """
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{folder / 'config.json'} names no model_type", "download the checkpoint again")
    family = find_family(model_type)
    _refuse_unsupported(config, model_type)
    heads = _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", default=heads)
    hidden = _count(config, "hidden_size")
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = _count(config, "head_dim", default=family.default_head_dim or hidden // heads)
    if head_dim % 8:
        raise CheckpointError(
            f"head_dim {head_dim} is not a multiple of 8", "ONNX Runtime's GroupQueryAttention needs one that is"
        )
    return DecoderConfig(
        family=model_type,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        layers=_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_max_positions(config),
        norm_epsilon=_number(config, "rms_norm_eps", default=1e-6),
        rope=_read_rope(config),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias.read(config),
        output_bias=family.output_bias.read(config),
        mlp_bias=family.mlp_bias.read(config),
        qk_norm=family.qk_norm,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: the file is absent, unreadable or not a JSON object.
    """
    if not os.path.exists(path):  # Path.exists raises for names that are too long
        raise CheckpointError(f"{path.parent} holds no {path.name}", "give the folder of a Hugging Face checkpoint")
    return read_json_object(path, CheckpointError, "download the checkpoint again")


def _refuse_unsupported(config: Mapping[str, Any], model_type: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {shown(activation)} is not supported", "supported is silu")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        method = method if isinstance(method, str) else "unknown"
        raise CheckpointError(
            f"the checkpoint is already quantized ({method})",
            "export the original float checkpoint: float32, float16 and bfloat16 are supported",
        )
    if _slides(config):
        raise CheckpointError(
            f"this {model_type} checkpoint uses sliding-window attention", "supported is full attention in every layer"
        )
    rotated = config.get("partial_rotary_factor", 1.0)
    rotated = _rope_settings(config).get("partial_rotary_factor", rotated)
    if rotated != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor {shown(rotated)} is not supported", "supported is 1.0: every channel rotated"
        )


def _slides(config: Mapping[str, Any]) -> bool:
    layer_types = config.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, list):
        raise CheckpointError(f"config.json: layer_types must be a list, found {shown(layer_types)}")
    if layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return False
    # Layers below max_window_layers attend to everything.
    return _count(config, "max_window_layers", default=0, least=0) < _count(config, "num_hidden_layers")


def _read_rope(config: Mapping[str, Any]) -> Rope:
    """Rotary settings of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`)."""
    settings = _rope_settings(config)
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise CheckpointError(
            "rotary settings that differ between layers are not supported", "supported is one set for all layers"
        )
    base = _number(settings, "rope_theta", default=_number(config, "rope_theta", default=10000.0))
    if base <= 1:
        raise CheckpointError(f"config.json: rope_theta must be greater than 1, found {base}")
    return Rope(base, _read_scaling(settings, _max_positions(config)))


def _rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"config.json: rotary settings must be an object, found {shown(settings)}")
    return settings


def _read_scaling(settings: Mapping[str, Any], max_positions: int) -> RopeScaling:
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return Unscaled()
    if kind not in SUPPORTED_SCALINGS:
        raise CheckpointError(
            f"rope scaling {shown(kind)} is not supported", f"supported are {', '.join(SUPPORTED_SCALINGS)}"
        )
    if kind == "linear":
        return Linear(_number(settings, "factor"))
    if kind == "dynamic":
        return Dynamic(_number(settings, "factor"), max_positions)
    if kind == "llama3":
        low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
        if low >= high:
            raise CheckpointError(f"config.json: high_freq_factor {high} must be greater than low_freq_factor {low}")
        return Llama3(_number(settings, "factor"), low, high, _count(settings, "original_max_position_embeddings"))
    original = _count(settings, "original_max_position_embeddings", default=max_positions)
    return Yarn(
        factor=_number(settings, "factor", default=max_positions / original),
        original_positions=original,
        beta_fast=_number(settings, "beta_fast", default=32.0),
        beta_slow=_number(settings, "beta_slow", default=1.0),
        truncate=bool(settings.get("truncate", True)),
        attention_factor=_optional_number(settings, "attention_factor"),
        mscale=_optional_number(settings, "mscale"),
        mscale_all_dim=_optional_number(settings, "mscale_all_dim"),
    )


def _max_positions(config: Mapping[str, Any]) -> int:
    return _count(config, "max_position_embeddings", least=SHORTEST_CONTEXT)


def _count(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    value = config.get(name)
    value = default if value is None else value
    if value is None or not is_whole(value, least) or value > LARGEST_COUNT:
        kind = "positive whole number" if least == 1 else f"whole number of at least {least}"
        kind += f", at most {LARGEST_COUNT}" if value is not None and is_whole(value, LARGEST_COUNT) else ""
        raise CheckpointError(f"config.json: {name} must be a {kind}, found {shown(value)}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = _optional_number(config, name)
    value = default if value is None else value
    if value is None or value <= 0:
        raise CheckpointError(f"config.json: {name} must be a positive number, found {shown(config.get(name))}")
    return value


def _optional_number(config: Mapping[str, Any], name: str) -> float | None:
    value = config.get(name)
    if value is None:
        return None
    if not is_finite(value) or abs(value) > LARGEST_NUMBER:
        raise CheckpointError(f"config.json: {name} must be a number, at most {LARGEST_NUMBER:g}, found {shown(value)}")
    return float(value)
