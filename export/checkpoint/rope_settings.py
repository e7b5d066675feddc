"""The rotary settings of config.json.

Transformers 4 calls them `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ...models.json_file import shown
from ...models.manifest import MIN_CONTEXT
from ..architectures.family import Family
from ..graph.rope import Dynamic, Linear, Llama3, LongRope, QueryScaling, Rope, RopeScaling, Yarn
from .json_fields import count, number, optional_list, optional_number

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
"""Layer types for which `rope_parameters` may have separate settings."""


class Rotations(NamedTuple):
    """The rotary embeddings of a model."""

    channels: int
    """Number of leading channels of a head that are rotated in layers with full attention."""
    rope: Rope
    local_channels: int
    """The same in sliding-window layers."""
    local_rope: Rope
    """Rotary embedding of sliding-window layers; the same as `rope` where the family has only one."""


def max_positions(config: Mapping[str, Any]) -> int:
    """Return max_position_embeddings, the longest context the checkpoint supports.

    Raises:
        CheckpointError: config.json lacks the setting.
    """
    return count(config, "max_position_embeddings", minimum=MIN_CONTEXT)


def read_rotations(config: Mapping[str, Any], family: Family, head_dim: int, local_head_dim: int) -> Rotations:
    """Read the rotary settings of a parsed config.json; `local_head_dim` is the head size of sliding-window layers.

    Raises:
        CheckpointError: the settings are malformed or not supported.
    """
    settings = _settings(config) or family.defaults.get("rope_parameters", {})
    local: Mapping[str, Any] = {}
    if family.local_rope_base is not None:
        # In transformers 4, rope_scaling applies only to the other layers.
        local = {"rope_theta": number(config, family.local_rope_base)}
        if _GLOBAL in settings or _LOCAL in settings:
            rotary = {kind: _object(settings.get(kind), f"rotary settings of {kind}") for kind in (_GLOBAL, _LOCAL)}
            settings, local = rotary[_GLOBAL], {**local, **rotary[_LOCAL]}
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise CheckpointError(
            "rotary settings that differ between layers are not supported", "supported is one set for all layers"
        )
    channels = _rotated_channels(config, settings, family, head_dim)
    rope = _read_rope(config, settings, channels)
    if family.local_rope_base is None:
        return Rotations(channels, rope, channels, rope)
    local_channels = _rotated_channels(config, local, family, local_head_dim)
    return Rotations(channels, rope, local_channels, _read_rope(config, local, local_channels))


def read_query_scaling(config: Mapping[str, Any], family: Family) -> QueryScaling | None:
    """Read how queries grow with their position; None if they do not.

    Raises:
        CheckpointError: the settings are malformed.
    """
    settings = _settings(config)
    beta = optional_number(settings, "llama_4_scaling_beta") if family.query_scaling else None
    if beta is None:
        return None
    return QueryScaling(beta, count(settings, "original_max_position_embeddings"))


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return _object(config.get("rope_parameters") or config.get("rope_scaling"), "rotary settings")


def _object(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(found := value or {}, Mapping):
        raise CheckpointError(f"config.json: {what} must be an object, found {shown(found)}")
    return found


def _rotated_channels(config: Mapping[str, Any], settings: Mapping[str, Any], family: Family, head_dim: int) -> int:
    if settings.get("rope_type") == "proportional":  # it has frequencies for all channels
        return head_dim
    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if not family.partial_rotary and share != 1.0:
        raise CheckpointError(
            f"partial_rotary_factor {shown(share)} is not supported", "supported is 1.0: every channel rotated"
        )
    channels = int(head_dim * number({"partial_rotary_factor": share}, "partial_rotary_factor", default=1.0))
    if channels % 2 or not 4 <= channels <= head_dim:
        raise CheckpointError(
            f"partial_rotary_factor {shown(share)} rotates {channels} of {head_dim} channels",
            "supported is an even number of at least 4",
        )
    return channels


def _read_rope(config: Mapping[str, Any], settings: Mapping[str, Any], channels: int) -> Rope:
    base = number(settings, "rope_theta", default=number(config, "rope_theta", default=10000.0))
    if base <= 1:
        raise CheckpointError(f"config.json: rope_theta must be greater than 1, found {base}")
    return Rope(base, _read_scaling(config, settings, channels))


def _read_scaling(config: Mapping[str, Any], settings: Mapping[str, Any], channels: int) -> RopeScaling:
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in settings):
        kind = "longrope"  # its name in the first Phi-3 checkpoints
    longest = max_positions(config)
    match kind:
        case "default" | "linear" | "mrope":
            return Linear(number(settings, "factor") if kind == "linear" else 1.0)
        case "proportional":
            share = number(settings, "partial_rotary_factor", default=1.0)
            if share > 1:
                raise CheckpointError(f"config.json: partial_rotary_factor must be at most 1, found {share}")
            return Linear(number(settings, "factor", default=1.0), share)
        case "dynamic":
            return Dynamic(number(settings, "factor"), longest)
        case "llama3":
            low, high = number(settings, "low_freq_factor"), number(settings, "high_freq_factor")
            if low >= high:
                raise CheckpointError(
                    f"config.json: high_freq_factor {high} must be greater than low_freq_factor {low}"
                )
            return Llama3(number(settings, "factor"), low, high, count(settings, "original_max_position_embeddings"))
        case "yarn":
            original = count(settings, "original_max_position_embeddings", default=longest)
            return Yarn(
                factor=number(settings, "factor", default=longest / original),
                original_positions=original,
                beta_fast=number(settings, "beta_fast", default=32.0),
                beta_slow=number(settings, "beta_slow", default=1.0),
                truncate=bool(settings.get("truncate", True)),
                attention_factor=optional_number(settings, "attention_factor"),
                mscale=optional_number(settings, "mscale"),
                mscale_all_dim=optional_number(settings, "mscale_all_dim"),
            )
        case "longrope":
            name = "original_max_position_embeddings"
            original = count(config if config.get(name) is not None else settings, name, default=longest, minimum=2)
            growth = number(settings, "factor", default=longest / original)
            magnitude = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(original))
            return LongRope(
                short=_factors(settings, "short_factor", channels // 2),
                long=_factors(settings, "long_factor", channels // 2),
                original_positions=original,
                attention_factor=number(settings, "attention_factor", default=magnitude),
            )
    raise CheckpointError(
        f"rope scaling {shown(kind)} is not supported",
        "supported are default, linear, dynamic, llama3, yarn, longrope, proportional",
    )


def _factors(settings: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
    listed = optional_list(settings, name, length)
    if listed is None:
        raise CheckpointError(f"config.json: {name} must be a list, found None")
    return tuple(number({name: factor}, name) for factor in listed)
