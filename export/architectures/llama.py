"""Llama and the families that differ from it in little: Mistral, SmolLM3, OLMo 2, Phi-3."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ...models.manifest import BlockDiffusion
from .family import NORMS_AFTER, Family
from .layer_attention import window_in_every_layer, windows_without_rotation
from .vision import IDEFICS3

_MINISTRAL3: Final = Family(
    windows=window_in_every_layer,
    query_scaling=True,
    defaults={"rms_norm_eps": 1e-5},
)
"""Ministral 3: queries grow with their position behind the context that the model was first trained with."""

_LLAMA: Final = Family(attention_bias="attention_bias", mlp_bias="mlp_bias")
_IDEFICS3: Final = replace(_LLAMA, nested_type="llama", vision=IDEFICS3, defaults={"rms_norm_eps": 1e-5})
"""Language model of Idefics3 and SmolVLM."""

_LLADA: Final = Family(
    blocks=BlockDiffusion(32, 126336, bidirectional=True),
    settings={
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "max_position_embeddings": "max_sequence_length",
        "tie_word_embeddings": "weight_tying",
        "hidden_act": "activation_type",
    },
    tensors={
        "model.embed_tokens.": "model.transformer.wte.",
        "model.layers.#.input_layernorm.": "model.transformer.blocks.#.attn_norm.",
        "model.layers.#.self_attn.o_proj.": "model.transformer.blocks.#.attn_out.",
        "model.layers.#.self_attn.": "model.transformer.blocks.#.",
        "model.layers.#.post_attention_layernorm.": "model.transformer.blocks.#.ff_norm.",
        "model.layers.#.mlp.gate_proj.": "model.transformer.blocks.#.ff_proj.",
        "model.layers.#.mlp.down_proj.": "model.transformer.blocks.#.ff_out.",
        "model.layers.#.mlp.": "model.transformer.blocks.#.",
        "model.norm.": "model.transformer.ln_f.",
        "lm_head.": "model.transformer.ff_out.",
    },
    defaults={"rms_norm_eps": 1e-5},
    refused={name: f"what {name} asks for" for name in ("include_bias", "include_qkv_bias", "alibi", "scale_logits")},
)
"""LLaDA (arXiv 2502.09992): Llama all of whose tokens attend to each other, with the names of OLMo's first program."""

FAMILIES: Final[Mapping[str, Family]] = {
    # Llama 1 to 3, and the many models published in its format (SmolLM, TinyLlama, stories).
    "llama": _LLAMA,
    "llada": _LLADA,
    "idefics3": _IDEFICS3,
    "smolvlm": _IDEFICS3,
    # Mistral 7B, Nemo and Small (text); the first 7B uses a sliding window in every layer.
    "mistral": Family(
        windows=window_in_every_layer,
        defaults={"sliding_window": 4096},
    ),
    "ministral3": _MINISTRAL3,
    # Language model of multimodal Ministral 3 checkpoints; the image part is not exported.
    "mistral3": replace(_MINISTRAL3, nested_type="ministral3"),
    # SmolLM3: every fourth layer has no rotary positions.
    "smollm3": Family(
        attention_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows=windows_without_rotation,
        unrotated=True,
        defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
    ),
    # OLMo 2: norms after each part instead of before it, and across all heads.
    "olmo2": Family(
        attention_bias="attention_bias",
        norms=NORMS_AFTER,
        head_norm="whole",
        defaults={"rms_norm_eps": 1e-5},
    ),
    # Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, part of each head rotated, LongRoPE.
    "phi3": Family(
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
        windows=window_in_every_layer,
        partial_rotary=True,
        defaults={"rms_norm_eps": 1e-5},
    ),
}
