"""config.json of a Hugging Face checkpoint, read into the numbers the graph is built from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..edge.errors import CheckpointError
from .family import find_family
from .rope import Dynamic, Linear, Llama3, Rope, RopeScaling, Unscaled, Yarn

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
        max_positions=_count(config, "max_position_embeddings"),
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
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path.parent} holds no {path.name}", "give the folder of a Hugging Face checkpoint"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}", "download the checkpoint again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", "download the checkpoint again")
    return data


def _refuse_unsupported(config: Mapping[str, Any], model_type: str) -> None:
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act {activation!r} is not supported", "supported is silu")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else "unknown"
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
            f"partial_rotary_factor {rotated} is not supported", "supported is 1.0: every channel rotated"
        )


def _slides(config: Mapping[str, Any]) -> bool:
    layer_types = config.get("layer_types")
    if layer_types:
        return any(kind != "full_attention" for kind in layer_types)
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return False
    # Layers below max_window_layers attend to everything.
    return int(config.get("max_window_layers") or 0) < _count(config, "num_hidden_layers")


def _read_rope(config: Mapping[str, Any]) -> Rope:
    """Rotary settings of transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`)."""
    settings = _rope_settings(config)
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise CheckpointError(
            "rotary settings that differ between layers are not supported", "supported is one set for all layers"
        )
    base = _number(settings, "rope_theta", default=_number(config, "rope_theta", default=10000.0))
    return Rope(base, _read_scaling(settings, _count(config, "max_position_embeddings")))


def _rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"config.json: rotary settings must be an object, found {settings!r}")
    return settings


def _read_scaling(settings: Mapping[str, Any], max_positions: int) -> RopeScaling:
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return Unscaled()
    if kind not in SUPPORTED_SCALINGS:
        raise CheckpointError(
            f"rope scaling {kind!r} is not supported", f"supported are {', '.join(SUPPORTED_SCALINGS)}"
        )
    if kind == "linear":
        return Linear(_number(settings, "factor"))
    if kind == "dynamic":
        return Dynamic(_number(settings, "factor"), max_positions)
    original = _count(settings, "original_max_position_embeddings", default=max_positions)
    if kind == "llama3":
        low, high = _number(settings, "low_freq_factor"), _number(settings, "high_freq_factor")
        return Llama3(_number(settings, "factor"), low, high, original)
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


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json: {name} must be a positive whole number, found {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = _optional_number(config, name)
    value = default if value is None else value
    if value is None or value <= 0:
        raise CheckpointError(f"config.json: {name} must be a positive number, found {config.get(name)!r}")
    return value


def _optional_number(config: Mapping[str, Any], name: str) -> float | None:
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"config.json: {name} must be a number, found {value!r}")
    return float(value)
