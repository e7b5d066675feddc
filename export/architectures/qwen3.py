"""Qwen3 (dense): RMS-normalized query and key heads of 128 channels by default."""

from typing import Final

from .family import ConfigFlag, Family, HeadNorm
from .sliding_windows import LayersFrom

FAMILY: Final = Family(
    qkv_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    head_norm=HeadNorm.EACH_HEAD,
    windows=LayersFrom(),
    defaults={"head_dim": 128},
)
