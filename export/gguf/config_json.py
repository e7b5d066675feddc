"""The config.json of a GGUF file's model, made from its metadata.

Settings that the exporter does not support are refused here: ignoring one would export a wrong model.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

from ...models.manifest import MIN_CONTEXT
from .gguf_metadata import GgufMetadata
from .rope_scaling import RopeFactors, rope_scaling

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Supported general.architecture values, which are also the model_type; Mistral and SmolLM files say llama."""

_NEUTRAL_VALUES: Final = {
    "expert_count": 0,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "attention.clamp_kqv": 0,
    "attention.max_alibi_bias": 0,
    "attention.scale": 0,
    "attention.temperature_scale": 0,
    "logit_scale": 1,
    "residual_scale": 1,
    "embedding_scale": 1,
}
"""Settings of other architectures, each with the value that has no effect."""


def config_settings(
    metadata: GgufMetadata, tensors: Set[str], vocab_size: int, rope_factors: RopeFactors | None
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
    _require_neutral(metadata, name)
    hidden, heads = (
        metadata.required_count(f"{name}.embedding_length"),
        metadata.required_count(f"{name}.attention.head_count"),
    )
    head_dim = _head_dim(metadata, name, hidden // heads)
    epsilon = metadata.positive(f"{name}.attention.layer_norm_rms_epsilon")
    if epsilon is None:
        raise metadata.missing(f"{name}.attention.layer_norm_rms_epsilon")
    base = metadata.positive(f"{name}.rope.freq_base") or 10000.0
    settings: dict[str, Any] = {
        "architectures": [f"{name.capitalize()}ForCausalLM"],
        "model_type": name,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": metadata.required_count(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.required_count(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count(f"{name}.attention.head_count_kv", 1) or heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.required_count(f"{name}.context_length", MIN_CONTEXT),
        "rms_norm_eps": epsilon,
        "rope_theta": base,
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    if name != "qwen2":  # qwen2 always has biases and no setting for them
        settings["attention_bias"] = any(tensor.endswith("attn_q.bias") for tensor in tensors)
    if name == "llama":
        settings["mlp_bias"] = any(tensor.endswith("ffn_gate.bias") for tensor in tensors)
    scaling = rope_scaling(metadata, name, base, head_dim, rope_factors)
    return settings if scaling is None else {**settings, "rope_scaling": scaling}


def architecture(metadata: GgufMetadata) -> str:
    """Return general.architecture.

    Raises:
        CheckpointError: the key is absent, or the architecture is not supported.
    """
    name = metadata.text("general.architecture")
    if name is None:
        raise metadata.missing("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.wrong(
            f"the architecture {name[:40]!r} is not supported as GGUF",
            f"supported are {', '.join(ARCHITECTURES)}: export the model's Hugging Face checkpoint instead",
        )
    return name


def _require_neutral(metadata: GgufMetadata, name: str) -> None:
    for setting, neutral in _NEUTRAL_VALUES.items():
        value = metadata.number(f"{name}.{setting}")
        if value not in (None, 0, neutral):
            raise metadata.wrong(
                f"{name}.{setting} is {value:g}, which is not supported", "export the model's Hugging Face checkpoint"
            )
    if metadata.flag(f"{name}.attention.causal") is False:
        raise metadata.wrong("the model's attention is not causal", "only language models can be exported")


def _head_dim(metadata: GgufMetadata, name: str, default: int) -> int:
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
