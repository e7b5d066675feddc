"""Gemma 2, 3 and 4."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from .family import NORMS_AROUND, Family
from .layer_attention import windows_but_in_every_nth
from .vision import GEMMA3

_DEFAULTS: Final = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
"""All settings that are the same in Gemma 3 and 4, because multimodal checkpoints only state what differs."""
_GEMMA: Final = Family(
    attention_bias="attention_bias",
    norms=NORMS_AROUND,
    activation="hidden_activation",
    windows=windows_but_in_every_nth,
    logits_softcap="final_logit_softcapping",
    embedding_scale=("hidden_size", 0.5),
)

_GEMMA3_TEXT: Final = replace(
    _GEMMA,
    norms_add_one=True,
    head_norm="head",
    local_rope_base="rope_local_base_freq",
    attention_scale=("query_pre_attn_scalar", -0.5),
    defaults={
        **_DEFAULTS,
        "vocab_size": 262_208,
        "num_hidden_layers": 26,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
    },
)
"""Gemma 3 (text): head norms; five of six layers have a sliding window and their own theta."""

_GEMMA4_TEXT: Final = replace(
    _GEMMA,
    head_norm="head",
    value_norm=True,
    windows=partial(windows_but_in_every_nth, last_full=True),
    full_attention=True,
    shared_caches="num_kv_shared_layers",
    double_wide="use_double_wide_mlp",
    per_layer_inputs=True,
    layer_scale="layer_scalar",
    local_rope_base="rope_local_base_freq",
    attention_scale=1.0,
    refused={
        "enable_moe_block": "experts beside the dense feed-forward, whose gate is GELU: the CPU operator has SiLU alone"
    },
    defaults={
        **_DEFAULTS,
        "vocab_size": 262_144,
        "num_hidden_layers": 30,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        },
        "sliding_window": 512,
    },
)
"""Gemma 4 (text): larger heads in full attention, shared caches, per-layer inputs, scaled layers."""

FAMILIES: Final[Mapping[str, Family]] = {
    # Gemma 2: norms around each part, soft caps, sliding windows in alternate layers.
    "gemma2": replace(
        _GEMMA,
        norms_add_one=True,
        attention_scale=("query_pre_attn_scalar", -0.5),
        attention_softcap="attn_logit_softcapping",
        defaults={
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_text": _GEMMA3_TEXT,
    # Multimodal Gemma 3.
    "gemma3": replace(_GEMMA3_TEXT, nested_type="gemma3_text", vision=GEMMA3),
    "gemma4_text": _GEMMA4_TEXT,
    # Language model of multimodal Gemma 4 checkpoints; images and sound are not exported.
    "gemma4": replace(_GEMMA4_TEXT, nested_type="gemma4_text"),
}
