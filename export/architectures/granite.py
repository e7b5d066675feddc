"""IBM Granite 3 and 4.0-H."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from .family import Experts, Family, Power, SharedExpert
from .state_layers import read_mamba2

_GRANITE: Final = Family(
    attention_bias="attention_bias",
    mlp_bias="mlp_bias",
    attention_scale=Power("attention_multiplier"),
    embedding_scale=Power("embedding_multiplier"),
    residual_scale=Power("residual_multiplier"),
    logits_scale=Power("logits_scaling", -1),
)
"""IBM Granite 3 (dense): Llama with factors on embeddings, attention scores, residuals and logits."""

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
}
