"""Which layers use sliding-window attention.

Newer checkpoints list the layers in `layer_types`; for older ones the rule depends on the model type. A token attends
to the `sliding_window` most recent tokens, including itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ...errors import CheckpointError
from ...models.json_file import shown
from ..checkpoint.json_fields import count, optional_list

WINDOW: Final = "sliding_window"
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Windows(Protocol):
    """The rule of a model type."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """Return the window of each layer, None for full attention.

        Raises:
            CheckpointError: the settings contradict each other or are not supported.
        """
        ...


@dataclass(frozen=True)
class Never:
    """Full attention in all layers."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        if any(_layer_types(config, layers) or []):
            raise CheckpointError(
                f"this {config['model_type']} checkpoint uses sliding-window attention",
                "supported is full attention in every layer",
            )
        return [None] * layers


@dataclass(frozen=True)
class EveryLayer:
    """A window in all layers if `sliding_window` is set; `layer_types` is ignored."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        return [None if config.get(WINDOW) is None else count(config, WINDOW)] * layers


@dataclass(frozen=True)
class LayersFrom:
    """With `use_sliding_window`, a window in all layers from a certain one on."""

    first: str = "max_window_layers"
    """Setting of the first such layer; 0 when absent."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        sliding = _layer_types(config, layers)
        if sliding is None:
            if not config.get("use_sliding_window") or config.get(WINDOW) is None:
                return [None] * layers
            first = count(config, self.first, default=0, minimum=0)
            sliding = [layer >= first for layer in range(layers)]
        return _windows(config, sliding)


@dataclass(frozen=True)
class AllButEvery:
    """A window in all layers except every n-th one."""

    period: str
    """Setting of n."""
    last_full: bool = False
    """Whether the last layer has full attention in any case."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        sliding = _layer_types(config, layers)
        if sliding is None:
            period = count(config, self.period)
            sliding = [(layer + 1) % period != 0 for layer in range(layers)]
        if self.last_full:
            sliding = [*sliding[:-1], False]
        return _windows(config, sliding)


@dataclass(frozen=True)
class UnrotatedLayers:
    """With `use_sliding_window`, a window in the layers without rotary positions."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        if not config.get("use_sliding_window") or config.get(WINDOW) is None:
            return [None] * layers
        sliding = _layer_types(config, layers)
        return _windows(
            config, [not rotated for rotated in rotated_layers(config, layers)] if sliding is None else sliding
        )


def rotated_layers(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Whether each layer has rotary positions, in a model where some do not.

    Raises:
        CheckpointError: `no_rope_layers` is not a list of zeros and ones, or `no_rope_layer_interval` is not an
        integer.
    """
    listed = optional_list(config, "no_rope_layers", layers)
    if listed is None:
        period = count(config, "no_rope_layer_interval", default=4)
        return [(layer + 1) % period != 0 for layer in range(layers)]
    if any(entry not in (0, 1) for entry in listed):
        raise CheckpointError(f"config.json: no_rope_layers must hold zeros and ones, found {shown(listed)}")
    return [bool(entry) for entry in listed]


def _windows(config: Mapping[str, Any], sliding: list[bool]) -> list[int | None]:
    window = count(config, WINDOW) if any(sliding) else None
    return [window if is_sliding else None for is_sliding in sliding]


def _layer_types(config: Mapping[str, Any], layers: int) -> list[bool] | None:
    """Whether each layer is a sliding one in `layer_types`; None without that list."""
    kinds = optional_list(config, "layer_types", layers)
    if kinds is None:
        return None
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise CheckpointError(
                f"config.json: layer_types has {shown(kind)}", f"supported are {_FULL} and {_SLIDING}"
            )
    return [kind == _SLIDING for kind in kinds]
