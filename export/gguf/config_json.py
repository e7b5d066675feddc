"""A GGUF file's metadata as the config.json that its checkpoint had.

What a file may say and the exporter cannot honour is refused here, since a setting overlooked is a wrong model.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

from ...models.manifest import SHORTEST_CONTEXT
from .gguf_metadata import GgufMetadata
from .rope_scaling import RopeFactors, rope_scaling

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Values of general.architecture; each is also the Hugging Face model_type. Mistral and SmolLM come as llama."""

_NEUTRAL: Final = {
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
"""Settings of other architectures, and the value beside absence that leaves a llama or a qwen as it is."""


def read_settings(
    metadata: GgufMetadata, tensors: Set[str], vocab_size: int, rope_factors: RopeFactors | None
) -> dict[str, Any]:
    """The settings config.json would have, tokens aside.

    Args:
        metadata: the file's keys.
        tensors: names of the file's tensors.
        vocab_size: rows of the embedding.
        rope_factors: divisors of the rotary frequencies, float32 [head_dim / 2], where the file has them.

    Raises:
        CheckpointError: the file is of another architecture, lacks a key, or asks for what cannot be exported.
    """
    name = architecture(metadata)
    _require_neutral(metadata, name)
    hidden, heads = metadata.need_count(f"{name}.embedding_length"), metadata.need_count(f"{name}.attention.head_count")
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
        "intermediate_size": metadata.need_count(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.need_count(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count(f"{name}.attention.head_count_kv", 1) or heads,
        "head_dim": head_dim,
        "max_position_embeddings": metadata.need_count(f"{name}.context_length", SHORTEST_CONTEXT),
        "rms_norm_eps": epsilon,
        "rope_theta": base,
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    if name != "qwen2":  # whose biases need no flag
        settings["attention_bias"] = any(tensor.endswith("attn_q.bias") for tensor in tensors)
    if name == "llama":
        settings["mlp_bias"] = any(tensor.endswith("ffn_gate.bias") for tensor in tensors)
    scaling = rope_scaling(metadata, name, base, head_dim, rope_factors)
    return settings if scaling is None else {**settings, "rope_scaling": scaling}


def architecture(metadata: GgufMetadata) -> str:
    """The file's general.architecture.

    Raises:
        CheckpointError: it is absent or not supported.
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
    for setting, neutral in _NEUTRAL.items():
        value = metadata.number(f"{name}.{setting}")
        if value not in (None, 0, neutral):
            raise metadata.wrong(
                f"{name}.{setting} is {value:g}, which is not supported", "export the model's Hugging Face checkpoint"
            )
    if metadata.flag(f"{name}.attention.causal") is False:
        raise metadata.wrong("the model's attention is not causal", "it is no model that writes text")


def _head_dim(metadata: GgufMetadata, name: str, default: int) -> int:
    """Channels of a head, the same for keys, values and the rotation."""
    dim = metadata.count(f"{name}.attention.key_length", 1) or default
    if dim < 1:
        raise metadata.wrong(f"{name}.attention.head_count is larger than {name}.embedding_length", "download it again")
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        other = metadata.count(key, 1) or dim
        if other != dim:
            raise metadata.wrong(
                f"{key} is {other} and a head has {dim} channels", "supported are heads of one size, rotated whole"
            )
    return dim
