"""SmolLM3: every fourth layer has no rotary positions."""

from typing import Final

from .family import ConfigFlag, Family
from .sliding_windows import UnrotatedLayers

FAMILY: Final = Family(
    qkv_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    mlp_bias=ConfigFlag("mlp_bias"),
    windows=UnrotatedLayers(),
    unrotated=True,
    defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
)
