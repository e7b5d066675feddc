"""The `vision_config` of a multimodal checkpoint as a `VisionConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from ...errors import CheckpointError
from ...models.json_file import is_whole, shown
from ..architectures.vision import SIGLIP_DEFAULTS, Projector, VisionFamily
from ..gguf.gguf_model import GgufModel
from .config import DecoderConfig
from .json_fields import count, number, read_json
from .safetensors_files import Checkpoint
from .source import ModelSource

_ACTIVATIONS: Final[Mapping[str, str]] = {"gelu_pytorch_tanh": "tanh", "gelu": "none", "silu": "silu"}
"""Supported activations: the `approximate` of ONNX's Gelu, or silu."""


@dataclass(frozen=True)
class VisionConfig:
    """A vision tower and its projector."""

    family: VisionFamily
    source: ModelSource
    """The tensors, by their names in the files."""
    tower: str
    """Module of the tower."""
    projector: str
    """Module of the projector."""
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    patch_size: int
    """Pixels of a side of a patch."""
    side: int
    """Patches of a side of a square image, and of learned position embeddings."""
    epsilon: float
    """What norms add to the variance."""
    activation: str
    """The `approximate` of ONNX's Gelu, or silu."""
    merged: int
    """Patches of a side of the square that becomes one token of the language model."""
    merged_size: int
    """Channels between the two linears of a `PATCH_MERGER`."""
    has_merger_norm: bool
    """Whether a `PATCH_MERGER` has its norm."""
    output_size: int
    """Channels of a token of the language model."""
    frames: int
    """Number of times that a patch has the pixels of an image, as if it were a video."""
    full_layers: tuple[int, ...] | None
    """Layers that attend to the whole image, where the others do within windows; None where all do."""
    deepstack: tuple[int, ...]
    """Layers that give features too, which the first layers of the language model add."""


def read_vision(source: ModelSource, decoder: DecoderConfig) -> VisionConfig | None:
    """The vision tower of a checkpoint; None where it has none, or only its language model is supported.

    Raises:
        CheckpointError: config.json lacks a setting of the tower, or has one that is not supported.
    """
    family = decoder.traits.vision
    whole = Checkpoint(source.folder, ()) if isinstance(source, Checkpoint) else None
    files = source.vision if isinstance(source, GgufModel) else whole
    if family is None or files is None:
        return None
    tower = next((name for name in family.towers if files.has_any(f"{name}.{family.layers}.")), None)
    projector = next((name for name in family.projectors if files.has_any(f"{name}.")), None)
    if tower is None or projector is None:
        return None
    config = read_json(source.folder / "config.json")
    nested = config.get("vision_config")
    if not isinstance(nested, Mapping):
        raise CheckpointError(f"config.json: vision_config must be an object, found {shown(nested)}")
    settings: Mapping[str, Any] = {**SIGLIP_DEFAULTS, **family.defaults, **nested}
    activation = settings["hidden_act"]
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise CheckpointError(
            f"config.json: hidden_act {shown(activation)} of vision_config is not supported",
            f"supported are {', '.join(_ACTIVATIONS)}",
        )
    # GGUF files of Qwen2.5-VL have queries, keys and values apart.
    if files.has_any(f"{tower}.{family.layers}.0.attn.q."):
        family = replace(family, qkv=("attn.q", "attn.k", "attn.v"))
    settings = {**settings, **{name: settings.get(own) for name, own in family.settings.items()}}
    side = count(settings, "image_size") // count(settings, "patch_size")
    if settings.get("num_position_embeddings") is not None:
        side = math.isqrt(count(settings, "num_position_embeddings"))
    merged, hidden_size = _merged(config, settings, family, side), count(settings, "hidden_size")
    return VisionConfig(
        family=family,
        source=files,
        tower=tower,
        projector=projector,
        hidden_size=hidden_size,
        intermediate_size=count(settings, "intermediate_size"),
        layers=count(settings, "num_hidden_layers", maximum=1000),
        heads=count(settings, "num_attention_heads"),
        patch_size=count(settings, "patch_size"),
        side=side,
        epsilon=number(settings, "layer_norm_eps"),
        activation=_ACTIVATIONS[activation],
        merged=merged,
        merged_size=count(config, "projector_hidden_size", default=merged**2 * hidden_size),
        has_merger_norm=files.has_any(f"{projector}.{family.merger[0]}."),
        output_size=decoder.hidden_size,
        frames=count(settings, "temporal_patch_size", default=2),
        full_layers=None if settings.get("window_size") is None else _layers(settings, "fullatt_block_indexes"),
        deepstack=_layers(settings, "deepstack_visual_indexes"),
    )


def _layers(settings: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """A setting that lists layers; none where it is absent."""
    listed = settings.get(name) or []
    if not isinstance(listed, list) or not all(is_whole(each, 0) for each in listed):
        raise CheckpointError(f"config.json: {name} must list layers, found {shown(listed)}")
    return tuple(listed)


def _merged(config: Mapping[str, Any], settings: Mapping[str, Any], family: VisionFamily, side: int) -> int:
    """Patches of a side of the square that becomes one token."""
    match family.projector:
        case Projector.PATCH_MERGER:
            return count({**config, **settings}, family.merge_size, default=2)
        case Projector.PIXEL_SHUFFLE:
            merged = count(config, "scale_factor", default=2)
        case Projector.AVERAGE_POOL:
            merged = side // int(count(config, "mm_tokens_per_image", default=256) ** 0.5)
    if not merged or side % merged:
        raise CheckpointError(f"config.json: {side} patches of a side cannot be merged {merged} at a time")
    return merged
