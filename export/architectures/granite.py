"""IBM Granite 3 (dense): Llama with factors on embeddings, attention scores, residuals and logits."""

from typing import Final

from .family import ConfigFlag, Family, Power

FAMILY: Final = Family(
    qkv_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    mlp_bias=ConfigFlag("mlp_bias"),
    attention_scale=Power("attention_multiplier"),
    embedding_scale=Power("embedding_multiplier"),
    residual_scale=Power("residual_multiplier"),
    logits_scale=Power("logits_scaling", -1),
)
