"""Granite 4.0-H: Mamba-2 in most layers, attention mostly without positions, experts beside a dense feed-forward."""

from dataclasses import replace
from typing import Final

from .family import Always, Experts, FeedForwardSize, SharedExpert
from .granite import FAMILY as GRANITE
from .mamba2 import Mamba2

FAMILY: Final = replace(
    GRANITE,
    mlp_bias=Always(False),
    mamba=Mamba2(),
    mlp="shared_mlp",
    gate_up=("input_linear",),
    down="output_linear",
    intermediate_size=FeedForwardSize(("shared_intermediate_size",)),
    experts=Experts(
        count=("num_local_experts",),
        intermediate_size="intermediate_size",
        normalized=Always(True),
        module="block_sparse_moe",
        router="router.layer",
        # The feed-forward of models without experts.
        shared=SharedExpert("shared_mlp", gate=None, intermediate_size="shared_intermediate_size"),
    ),
    position_type="position_embedding_type",
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
)
