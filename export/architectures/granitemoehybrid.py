"""IBM Granite 4.0-H without experts: Granite 3 with Mamba-2 in most layers, and attention mostly without positions."""

from dataclasses import replace
from typing import Final

from .family import Always, FeedForwardSize
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
    position_type="position_embedding_type",
    refused={"num_local_experts": "experts beside a shared feed-forward"},
    defaults={"num_local_experts": 8, "shared_intermediate_size": 1024},
)
