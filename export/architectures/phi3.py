"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, part of each head rotated, LongRoPE."""

from typing import Final

from .family import Family
from .sliding_windows import EveryLayer

FAMILY: Final = Family(
    qkv=("qkv_proj",),
    gate_up=("gate_up_proj",),
    windows=EveryLayer(),
    partial_rotary=True,
    defaults={"rms_norm_eps": 1e-5},
)
