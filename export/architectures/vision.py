"""How the vision towers of multimodal families differ.

Every tower is a transformer over the patches of an image whose tokens attend to each other: norm, attention, norm,
feed-forward. A projector makes fewer tokens of them, as wide as the language model. A `VisionFamily` states the
differences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

Projector = Enum("Projector", ["PIXEL_SHUFFLE", "AVERAGE_POOL", "PATCH_MERGER"])
"""What makes tokens of the language model of a tower's: the channels of neighbouring tokens side by side, then a linear
(Idefics3); their mean, then an RMS norm and a matrix (Gemma 3); or the channels of a square of tokens side by side,
then two linears (Qwen-VL, LFM2-VL). Towers with the last one keep images in about their size, so that patches come one
after another."""


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
    mlp: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")
    """Modules of the feed-forward; of three, the first gates the second."""
    siglip2: bool = False
    """Whether it is SigLIP 2: no rotary positions, a norm behind the layers, and a norm over a whole square in its
    `PATCH_MERGER`, which some checkpoints lack."""
    rms_norms: bool = False
    """Whether norms are RMS norms without biases."""
    patches: str = "embeddings.patch_embedding"
    positions: str | None = "embeddings.position_embedding"
    """Module of the learned position embeddings; None for a tower without."""
    merger: tuple[str, str, str] = ("", "", "")
    """The norm and the two linears of a `PATCH_MERGER`."""
    merge_size: str = "spatial_merge_size"
    """Setting with the patches of a side of the square that becomes one token."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Names of settings of `vision_config` that differ from SigLIP's."""
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
QWEN2_5_VL: Final = VisionFamily(
    towers=("visual", "model.visual"),
    projectors=("visual.merger", "model.visual.merger"),
    projector=Projector.PATCH_MERGER,
    layers="blocks",
    norms=("norm1", "norm2"),
    qkv=("attn.qkv",),
    output="attn.proj",
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    rms_norms=True,
    patches="patch_embed.proj",
    positions=None,
    merger=("ln_q", "mlp.0", "mlp.2"),
    settings={"num_hidden_layers": "depth", "num_attention_heads": "num_heads"},
    defaults={
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "hidden_act": "silu",
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
)
"""Qwen2.5-VL: most layers attend within windows."""
QWEN3_VL: Final = replace(
    QWEN2_5_VL,
    towers=("model.visual", "visual"),
    projectors=("model.visual.merger", "visual.merger"),
    mlp=("mlp.linear_fc1", "mlp.linear_fc2"),
    rms_norms=False,
    positions="pos_embed",
    merger=("norm", "linear_fc1", "linear_fc2"),
    defaults={
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
)
"""Qwen3-VL: learned positions too, and features of several layers, which layers of the language model add."""
LFM2_VL: Final = VisionFamily(
    towers=("model.vision_tower.vision_model", "model.vision_tower"),
    projectors=("model.multi_modal_projector",),
    projector=Projector.PATCH_MERGER,
    siglip2=True,
    merger=("layer_norm", "linear_1", "linear_2"),
    merge_size="downsample_factor",
    settings={"num_position_embeddings": "num_patches"},
    defaults={"num_patches": 256, "temporal_patch_size": 1},
)
"""LFM2-VL: SigLIP 2 with learned positions that are resized."""
