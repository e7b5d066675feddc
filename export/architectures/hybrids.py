"""IBM Granite 3 and 4.0-H, and LFM2: attention with normalized heads between layers of gated short convolutions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from .family import Experts, Family, Norms, Power, SharedExpert
from .state_layers import read_convolutions, read_mamba2
from .vision import LFM2_VL

_GRANITE: Final = Family(
    attention_bias="attention_bias",
    mlp_bias="mlp_bias",
    attention_scale=Power("attention_multiplier"),
    embedding_scale=Power("embedding_multiplier"),
    residual_scale=Power("residual_multiplier"),
    logits_scale=Power("logits_scaling", -1),
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
}
