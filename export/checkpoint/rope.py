"""Rotary position embedding: the settings of config.json, and the cosine and sine tables of the graph.

Of the `dim` rotated channels of a head, pair i (channels i and i + dim/2) is rotated by `position * frequency[i]`. Rope
scalings extend a model's context; they change the frequencies and, in two cases, multiply the tables by an attention
factor. Source: Hugging Face transformers, `modeling_rope_utils`; transformers 4 calls the settings `rope_theta` and
`rope_scaling`, transformers 5 `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError
from ...models.json_file import shown
from ...models.manifest import MIN_CONTEXT
from ..architectures.family import Family
from .json_fields import count, number, optional_list, optional_number

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
"""Layer types for which `rope_parameters` may have separate settings."""


@dataclass(frozen=True)
class Rope:
    """Theta and scaling of a rotary position embedding.

    The kinds of scaling, whose frequencies start from those of Su et al. 2021 (RoFormer), base ** (-2 i / dim):

    - linear: every position is divided by `factor` (Chen et al. 2023, position interpolation). Of a head's channel
      pairs only the first `share` turn (Gemma 4).
    - dynamic: the base grows with the sequence once it is longer than `original_positions` (dynamic NTK). A cached key
      cannot be rotated again when the sequence grows, so the base is computed for the whole exported context.
    - llama3: frequencies that make fewer than `low` turns over the original context are divided by `factor`, those that
      make more than `high` kept, and those between interpolated (Llama 3.1).
    - yarn: the same, interpolated by the number of the channel pair (Peng et al. 2023).
    - longrope: each frequency is divided by its own factor (Ding et al. 2024). One list applies up to
      `original_positions`, another to longer contexts; the exported context determines which.
    """

    base: float
    kind: str = "linear"
    factor: float = 1.0
    share: float = 1.0
    original_positions: int = 0
    low: float = 1.0
    high: float = 4.0
    truncate: bool = True
    """Whether the bounds between pairs of YaRN are whole numbers."""
    attention_factor: float = 1.0
    """Multiplies cosines and sines."""
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()

    def frequencies(self, dim: int, context: int) -> npt.NDArray[np.float64]:
        """Radians per position of each pair of `dim` channels in a graph for `context` positions, float64 [dim / 2]."""
        unscaled: npt.NDArray[np.float64] = self.base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        frequencies: npt.NDArray[np.float64]
        match self.kind:
            case "dynamic":
                length = max(context, self.original_positions)
                growth = self.factor * length / self.original_positions - (self.factor - 1)
                return Rope(self.base * growth ** (dim / (dim - 2))).frequencies(dim, context)
            case "llama3":
                turns = self.original_positions * unscaled / (2 * math.pi)
                kept = np.clip((turns - self.low) / (self.high - self.low), 0.0, 1.0)
                frequencies = kept * unscaled + (1 - kept) * unscaled / self.factor
            case "yarn":
                first, last = (self._pair_at(turns, dim) for turns in (self.high, self.low))
                if self.truncate:
                    first, last = math.floor(first), math.ceil(last)
                first, last = max(first, 0), min(last, dim - 1)
                if first == last:
                    last += 0.001  # avoids a division by zero
                interpolated = np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)
                frequencies = unscaled * (1 - interpolated) + unscaled / self.factor * interpolated
            case "longrope":
                frequencies = unscaled / np.array(self.long if context > self.original_positions else self.short)
            case _:
                frequencies = unscaled / self.factor
                frequencies[int(self.share * dim // 2) :] = 0.0
        return frequencies

    def table(self, dim: int, context: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Compute cosines and sines in float64; returns float32 [context, dim / 2] each."""
        angles = np.arange(context, dtype=np.float64)[:, None] * self.frequencies(dim, context)
        cosines, sines = np.cos(angles) * self.attention_factor, np.sin(angles) * self.attention_factor
        return cosines.astype(np.float32), sines.astype(np.float32)

    def _pair_at(self, turns: float, dim: int) -> float:
        """Return the (fractional) channel pair that makes that many turns over the original context."""
        return dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.base))


@dataclass(frozen=True)
class QueryScaling:
    """Growth of queries with their position, which keeps attention sharp over long contexts.

    Every query is multiplied by `1 + beta * log(1 + floor(position / original_positions))`. Source: Llama 4's
    temperature of attention, in Hugging Face transformers as `get_llama_4_attn_scale`.
    """

    beta: float
    original_positions: int

    def table(self, context: int) -> npt.NDArray[np.float32]:
        """The factors of all positions, computed in float64; float32 [context, 1]."""
        steps = np.arange(context, dtype=np.int64)[:, None] // self.original_positions
        return (1 + self.beta * np.log1p(steps)).astype(np.float32)


def max_positions(config: Mapping[str, Any]) -> int:
    """Return max_position_embeddings, the longest context the checkpoint supports.

    Raises:
        CheckpointError: config.json lacks the setting.
    """
    return count(config, "max_position_embeddings", minimum=MIN_CONTEXT)


def read_rotations(
    config: Mapping[str, Any], family: Family, head_dim: int, local_head_dim: int
) -> tuple[tuple[Rope, int], tuple[Rope, int]]:
    """Read the rotary settings of a parsed config.json; `local_head_dim` is the head size of sliding-window layers.

    Returns:
        The rotary embedding of layers with full attention and the number of a head's leading channels that it rotates,
        then those of sliding-window layers, the same where the family has only one.

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
    whole = _read_rope(config, settings, family, head_dim)
    return whole, whole if family.local_rope_base is None else _read_rope(config, local, family, local_head_dim)


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


def _read_rope(
    config: Mapping[str, Any], settings: Mapping[str, Any], family: Family, head_dim: int
) -> tuple[Rope, int]:
    channels = _rotated_channels(config, settings, family, head_dim)
    base = number(settings, "rope_theta", default=number(config, "rope_theta", default=10000.0))
    if base <= 1:
        raise CheckpointError(f"config.json: rope_theta must be greater than 1, found {base}")
    return Rope(base, **_read_scaling(config, settings, channels)), channels


def _read_scaling(config: Mapping[str, Any], settings: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """The fields of `Rope` that `settings` determines."""
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in settings):
        kind = "longrope"  # its name in the first Phi-3 checkpoints
    longest, original = max_positions(config), "original_max_position_embeddings"
    match kind:
        case "default" | "mrope":
            found: dict[str, Any] = {}
        case "linear":
            found = {"factor": number(settings, "factor")}
        case "proportional":
            share = number(settings, "partial_rotary_factor", default=1.0)
            if share > 1:
                raise CheckpointError(f"config.json: partial_rotary_factor must be at most 1, found {share}")
            found = {"factor": number(settings, "factor", default=1.0), "share": share}
        case "dynamic":
            found = {"kind": kind, "factor": number(settings, "factor"), "original_positions": longest}
        case "llama3":
            low, high = number(settings, "low_freq_factor"), number(settings, "high_freq_factor")
            if low >= high:
                raise CheckpointError(
                    f"config.json: high_freq_factor {high} must be greater than low_freq_factor {low}"
                )
            factor, positions = number(settings, "factor"), count(settings, original)
            found = {"kind": kind, "factor": factor, "low": low, "high": high, "original_positions": positions}
        case "yarn":
            positions = count(settings, original, default=longest)
            factor = number(settings, "factor", default=longest / positions)
            found = {
                "kind": kind,
                "factor": factor,
                "original_positions": positions,
                "low": number(settings, "beta_slow", default=1.0),
                "high": number(settings, "beta_fast", default=32.0),
                "truncate": bool(settings.get("truncate", True)),
                "attention_factor": _yarn_attention_factor(settings, factor),
            }
        case "longrope":
            positions = count(config if config.get(original) is not None else settings, original, longest, minimum=2)
            growth = number(settings, "factor", default=longest / positions)
            magnitude = 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(positions))
            lists = {name: _factors(settings, f"{name}_factor", channels // 2) for name in ("short", "long")}
            factor = number(settings, "attention_factor", default=magnitude)
            found = {"kind": kind, "original_positions": positions, "attention_factor": factor, **lists}
        case _:
            raise CheckpointError(
                f"rope scaling {shown(kind)} is not supported",
                "supported are default, linear, dynamic, llama3, yarn, longrope, proportional",
            )
    return found


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    given, above, below = (optional_number(settings, name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return given
    above, below = (above, below) if above and below else (1.0, 0.0)
    growth = math.log(max(factor, 1.0))
    return (0.1 * above * growth + 1.0) / (0.1 * below * growth + 1.0)


def _factors(settings: Mapping[str, Any], name: str, length: int) -> tuple[float, ...]:
    listed = optional_list(settings, name, length)
    if listed is None:
        raise CheckpointError(f"config.json: {name} must be a list, found None")
    return tuple(number({name: factor}, name) for factor in listed)
