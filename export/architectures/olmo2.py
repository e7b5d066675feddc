"""OLMo 2: norms after each part instead of before it, and across all heads."""

from typing import Final

from .family import NORMS_AFTER, ConfigFlag, Family, HeadNorm

FAMILY: Final = Family(
    qkv_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    norms=NORMS_AFTER,
    head_norm=HeadNorm.WHOLE,
    defaults={"rms_norm_eps": 1e-5},
)
