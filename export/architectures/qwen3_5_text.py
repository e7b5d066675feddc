"""Qwen3.5: gated delta nets in three layers of four, attention whose output is gated in the others."""

from typing import Final

from .delta_net import DeltaNet
from .family import ConfigFlag, Family, HeadNorm
from .multi_token_prediction import MultiTokenPrediction

FAMILY: Final = Family(
    qkv_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    norms_add_one=True,
    head_norm=HeadNorm.EACH_HEAD,
    gated_attention=True,
    partial_rotary=True,
    delta_net=DeltaNet(),
    mtp=MultiTokenPrediction(),
    defaults={"head_dim": 256, "partial_rotary_factor": 0.25},
)
