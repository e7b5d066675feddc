"""Gemma 3 (text): head norms; five of six layers have a sliding window and their own theta."""

from typing import Final

from .family import NORMS_AROUND, ConfigFlag, Family, HeadNorm, Power
from .sliding_windows import AllButEvery

FAMILY: Final = Family(
    qkv_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    norms=NORMS_AROUND,
    norms_add_one=True,
    head_norm=HeadNorm.EACH_HEAD,
    activation="hidden_activation",
    windows=AllButEvery("sliding_window_pattern"),
    local_rope_base="rope_local_base_freq",
    attention_scale=Power("query_pre_attn_scalar", -0.5),
    logits_softcap="final_logit_softcapping",
    embedding_scale=Power("hidden_size", 0.5),
    # All settings are listed because multimodal checkpoints only state what differs.
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
)
