"""Llama 1 to 3, and the many models published in its format (SmolLM, TinyLlama, stories)."""

from typing import Final

from .family import ConfigFlag, Family

FAMILY: Final = Family(
    qkv_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    mlp_bias=ConfigFlag("mlp_bias"),
)
