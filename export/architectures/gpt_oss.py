"""gpt-oss: MXFP4 experts, attention sinks, biases, a sliding window in every second layer."""

from collections.abc import Mapping
from typing import Final

from .family import Experts, Family
from .layer_attention import windows_but_in_every_nth

FAMILIES: Final[Mapping[str, Family]] = {
    "gpt_oss": Family(
        attention_bias="attention_bias",
        experts=Experts(
            count=("num_local_experts",),
            intermediate_size="intermediate_size",
            normalized=True,
            router="router",
            bias=True,
            stacked=True,
            alpha="swiglu_alpha",
            limit="swiglu_limit",
            up_offset=1.0,
        ),
        quant_method="mxfp4",
        sinks=True,
        windows=windows_but_in_every_nth,
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
    ),
}
