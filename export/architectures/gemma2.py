"""Gemma 2: norms around each part, soft caps, sliding windows in alternate layers."""

from typing import Final

from .family import NORMS_AROUND, ConfigFlag, Family, Power
from .sliding_windows import AllButEvery

FAMILY: Final = Family(
    qkv_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    norms=NORMS_AROUND,
    norms_add_one=True,
    activation="hidden_activation",
    windows=AllButEvery("sliding_window_pattern"),
    attention_scale=Power("query_pre_attn_scalar", -0.5),
    attention_softcap="attn_logit_softcapping",
    logits_softcap="final_logit_softcapping",
    embedding_scale=Power("hidden_size", 0.5),
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
)
