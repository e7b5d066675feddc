"""The config.json of a GGUF file's model, made from its metadata.

Settings that the exporter does not support are refused here: ignoring one would export a wrong model.

Files of Llama 3.1 and later hold a tensor of frequency divisors, one per channel pair.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...models.gguf_header import GgufHeader
from ...models.manifest import MIN_CONTEXT

ARCHITECTURES: Final = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2vl": "qwen2",
    "qwen3vl": "qwen3",
    "gemma3": "gemma3_text",
    "lfm2": "lfm2",
}
"""The model_type of the supported general.architecture values; Mistral and SmolLM files say llama."""

_NEUTRAL_VALUES: Final = {
    **dict.fromkeys(("expert_count", "attention.sliding_window", "attn_logit_softcapping"), 0),
    **dict.fromkeys(("final_logit_softcapping", "attention.clamp_kqv", "attention.max_alibi_bias"), 0),
    **dict.fromkeys(("attention.scale", "attention.temperature_scale"), 0),
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), 1),
}
"""Settings of other architectures, each with the value that has no effect."""
RopeFactors = npt.NDArray[np.float32]
ROPE_FACTORS: Final = "rope_freqs.weight"
"""Name of the tensor of rotary frequency divisors."""


def config_settings(
    metadata: GgufHeader, tensors: Set[str], vocab_size: int, rope_factors: RopeFactors | None
) -> dict[str, Any]:
    """Return the settings of config.json, without the special tokens.

    Args:
        metadata: keys of the file.
        tensors: names of the tensors in the file.
        vocab_size: number of embedding rows.
        rope_factors: divisors of the rotary frequencies, float32 [head_dim / 2]; None where the file has none.

    Raises:
        CheckpointError: the file has another architecture, lacks a key, or needs something that is not supported.
    """
    name = architecture(metadata)
    for setting, neutral in _NEUTRAL_VALUES.items():
        value = metadata.number(f"{name}.{setting}")
        if value not in (None, 0, neutral) and (name, setting) != ("gemma3", "attention.sliding_window"):
            raise metadata.wrong(
                f"{name}.{setting} is {value:g}, which is not supported", "export the model's Hugging Face checkpoint"
            )
    if metadata.flag(f"{name}.attention.causal") is False:
        raise metadata.wrong("the model's attention is not causal", "only language models can be exported")
    hidden = metadata.required_count(f"{name}.embedding_length")
    heads = metadata.required_count(f"{name}.attention.head_count")
    head_dim = _head_dim(metadata, name, hidden // heads)
    settings: dict[str, Any] = {
        "architectures": [f"{name.capitalize()}ForCausalLM"],
        "model_type": ARCHITECTURES[name],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": metadata.required_count(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.required_count(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": max(_kv_heads(metadata, name, heads)),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.required_count(f"{name}.context_length", MIN_CONTEXT),
        "rms_norm_eps": metadata.required(metadata.positive, f"{name}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.positive(f"{name}.rope.freq_base") or 10000.0,
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        **_own_settings(metadata, name, heads, hidden, head_dim),
    }
    if not name.startswith("qwen2"):  # qwen2 always has biases and no setting for them
        settings["attention_bias"] = any(tensor.endswith("attn_q.bias") for tensor in tensors)
    if name == "llama":
        settings["mlp_bias"] = any(tensor.endswith("ffn_gate.bias") for tensor in tensors)
    scaling = rope_scaling(metadata, name, head_dim, rope_factors)
    return settings if scaling is None else {**settings, "rope_scaling": scaling}


def _kv_heads(metadata: GgufHeader, name: str, heads: int) -> list[int]:
    """Numbers of key and value heads: one for all layers, or one of each, 0 for a convolution."""
    key = f"{name}.attention.head_count_kv"
    if name == "lfm2" and isinstance(metadata.metadata.get(key), list):
        return metadata.required(metadata.counts, key)
    return [metadata.count(key, 1) or heads]


def _own_settings(metadata: GgufHeader, name: str, heads: int, hidden: int, head_dim: int) -> dict[str, Any]:
    """The settings that a family alone has."""
    layers = metadata.required_count(f"{name}.block_count")
    if name == "gemma3":
        # llama.cpp tells Gemma 3 27B, whose scores have another factor, by its number of layers.
        scalar = hidden // heads if layers == 62 else head_dim
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "sliding_window": metadata.required_count(f"{name}.attention.sliding_window"),
            "sliding_window_pattern": metadata.count(f"{name}.attention.sliding_window_pattern", 1) or 6,
            "rope_local_base_freq": metadata.positive(f"{name}.rope.freq_base_swa") or 10_000.0,
        }
    if name == "lfm2":
        kinds = ["full_attention" if count else "conv" for count in _kv_heads(metadata, name, heads)]
        return {
            "layer_types": kinds,
            "conv_L_cache": metadata.required_count(f"{name}.shortconv.l_cache"),
            "norm_eps": metadata.required(metadata.positive, f"{name}.attention.layer_norm_rms_epsilon"),
            "block_auto_adjust_ff_dim": False,
        }
    sections = metadata.counts(f"{name}.rope.dimension_sections")
    if sections is None:
        return {}
    return {"rope_scaling": {"rope_type": "default", "mrope_section": sections[:3]}}


def architecture(metadata: GgufHeader) -> str:
    """Return general.architecture.

    Raises:
        CheckpointError: the key is absent, or the architecture is not supported.
    """
    name = metadata.required(metadata.text, "general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.wrong(
            f"the architecture {name[:40]!r} is not supported as GGUF",
            f"supported are {', '.join(ARCHITECTURES)}: export the model's Hugging Face checkpoint instead",
        )
    return name


def _head_dim(metadata: GgufHeader, name: str, default: int) -> int:
    """Number of channels per head, which keys, values and rotary embedding must share."""
    dim = metadata.count(f"{name}.attention.key_length", 1) or default
    if dim < 1:
        raise metadata.wrong(f"{name}.attention.head_count is larger than {name}.embedding_length", "download it again")
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        other = metadata.count(key, 1) or dim
        if other != dim:
            raise metadata.wrong(
                f"{key} is {other}, but a head has {dim} channels", "supported are heads of one size, fully rotated"
            )
    return dim


def rope_scaling(metadata: GgufHeader, name: str, head_dim: int, factors: RopeFactors | None) -> dict[str, Any] | None:
    """Return the `rope_scaling` of config.json, None for unscaled frequencies.

    Args:
        metadata: keys of the file.
        name: architecture of the file.
        head_dim: channels per head.
        factors: the tensor `ROPE_FACTORS`, float32 [head_dim / 2]; None where the file has none.

    Raises:
        CheckpointError: the scaling is not one of none, linear, yarn and divisors.
    """
    prefix = f"{name}.rope.scaling"
    kind = metadata.text(f"{prefix}.type") or "none"
    factor = metadata.positive(f"{prefix}.factor") or metadata.positive(f"{name}.rope.scale_linear")
    if factors is not None and not np.all(factors == 1):
        if factors.shape != (head_dim // 2,) or factors.min() <= 0:
            raise metadata.wrong(
                f"{ROPE_FACTORS} does not hold {head_dim // 2} positive divisors", "download the file again"
            )
        if kind != "none":
            raise metadata.wrong(
                f"the file has both {ROPE_FACTORS} and {prefix}.type {kind!r:.40}", "only one of them is supported"
            )
        # Divisors of any kind, as LongRoPE has them, the same for every context.
        divisors = [float(each) for each in factors]
        return {"rope_type": "longrope", "factor": 1.0, "short_factor": divisors, "long_factor": divisors}
    if kind == "none" and factor in (None, 1.0):
        return None
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor or 1.0}
    if kind != "yarn" or factor is None:
        raise metadata.wrong(
            f"rope scaling {kind!r:.40} with factor {factor} is not supported",
            "supported are none, linear, yarn and a tensor of divisors",
        )
    for setting in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        value = metadata.number(f"{prefix}.{setting}")
        if value not in (None, 1.0):
            raise metadata.wrong(f"{prefix}.{setting} is {value:g}", "supported is 1")
    if metadata.number(f"{prefix}.yarn_log_multiplier") not in (None, 0.0):
        raise metadata.wrong(f"{prefix}.yarn_log_multiplier is not supported", "export the model's checkpoint instead")
    yarn = {
        "factor": factor,
        "original_max_position_embeddings": metadata.count(f"{prefix}.original_context_length", 1),
        "beta_fast": metadata.positive(f"{prefix}.yarn_beta_fast"),
        "beta_slow": metadata.positive(f"{prefix}.yarn_beta_slow"),
    }
    return {"rope_type": "yarn", **{setting: value for setting, value in yarn.items() if value is not None}}
