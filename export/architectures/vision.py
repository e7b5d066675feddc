"""How the vision towers of multimodal families differ.

Every tower is a transformer over the patches of an image whose tokens attend to each other: norm, attention, norm,
feed-forward. A projector makes fewer tokens of them, as wide as the language model. A `VisionFamily` states the
differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final


class Projector(Enum):
    """What makes tokens of the language model of a tower's."""

    PIXEL_SHUFFLE = auto()
    """The channels of neighbouring tokens side by side, then a linear (Idefics3)."""
    AVERAGE_POOL = auto()
    """The mean of neighbouring tokens, then an RMS norm and a matrix (Gemma 3)."""


@dataclass(frozen=True)
class VisionFamily:
    """How a family's tower and projector differ from SigLIP's names and settings."""

    towers: tuple[str, ...]
    """Modules of the tower, of which a checkpoint has one."""
    projectors: tuple[str, ...]
    """Modules of the projector."""
    projector: Projector
    layers: str = "encoder.layers"
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    """Norms of a layer before attention and feed-forward."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output: str = "self_attn.out_proj"
    mlp: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of settings that `vision_config` may omit, where they differ from SigLIP's."""


SIGLIP_DEFAULTS: Final[Mapping[str, Any]] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
IDEFICS3: Final = VisionFamily(
    towers=("model.vision_model",),
    projectors=("model.connector",),
    projector=Projector.PIXEL_SHUFFLE,
    defaults={"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32},
)
"""Idefics3 and SmolVLM: SigLIP over square tiles."""
GEMMA3: Final = VisionFamily(
    towers=("vision_tower.vision_model", "model.vision_tower.vision_model", "model.vision_tower", "vision_tower"),
    projectors=("multi_modal_projector", "model.multi_modal_projector"),
    projector=Projector.AVERAGE_POOL,
)
"""Gemma 3: SigLIP over the whole image, resized to a square."""
