"""IBM Granite 3 and 4.0-H, LFM2 (attention between layers of gated short convolutions), and gpt-oss."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from .family import Experts, Family, Norms, SharedExpert
from .layer_attention import windows_but_in_every_nth
from .state_layers import read_convolutions, read_mamba2
from .vision import LFM2_VL

_GRANITE: Final = Family(
    attention_bias="attention_bias",
    mlp_bias="mlp_bias",
    attention_scale=("attention_multiplier", 1.0),
    embedding_scale=("embedding_multiplier", 1.0),
    residual_scale=("residual_multiplier", 1.0),
    logits_scale=("logits_scaling", -1.0),
)
"""IBM Granite 3 (dense): Llama with factors on embeddings, attention scores, residuals and logits."""
_LFM2: Final = Family(
    gate_up=("w1", "w3"),
    down="w2",
    mlp="feed_forward",
    output="out_proj",
    norms=Norms(before_attention="operator_norm", before_mlp="ffn_norm"),
    head_norm="head",
    head_norms=("q_layernorm", "k_layernorm"),
    final_norm="embedding_norm",
    norm_epsilon="norm_eps",
    intermediate_size=("block_ff_dim", "intermediate_size"),
    adjusted_size="block_auto_adjust_ff_dim",
    state_layers=read_convolutions,
    tied_head=("tie_embedding", "tie_word_embeddings"),
    defaults={
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 128_000,
    },
)

FAMILIES: Final[Mapping[str, Family]] = {
    "granite": _GRANITE,
    # Granite 4.0-H: Mamba-2 in most layers, attention mostly without positions, experts beside a dense feed-forward.
    "granitemoehybrid": replace(
        _GRANITE,
        mlp_bias=False,
        state_layers=read_mamba2,
        mlp="shared_mlp",
        gate_up=("input_linear",),
        down="output_linear",
        intermediate_size=("shared_intermediate_size",),
        experts=Experts(
            count=("num_local_experts",),
            intermediate_size="intermediate_size",
            normalized=True,
            module="block_sparse_moe",
            router="router.layer",
            # The feed-forward of models without experts.
            shared=SharedExpert("shared_mlp", gate=None, intermediate_size="shared_intermediate_size"),
        ),
        position_type="position_embedding_type",
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    ),
    "lfm2": _LFM2,
    "lfm2_vl": replace(_LFM2, nested_type="lfm2", vision=LFM2_VL),
    # MXFP4 experts, attention sinks, biases, a sliding window in every second layer.
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
