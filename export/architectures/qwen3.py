"""Qwen3 (dense): RMS-normalized query and key heads, 128 channels a head unless config.json says otherwise."""

from typing import Final

from ..family import Always, ConfigFlag, Family

FAMILY: Final = Family(
    qkv_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    mlp_bias=Always(False),
    qk_norm=True,
    default_head_dim=128,
)
