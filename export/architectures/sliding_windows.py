"""Which layers of a model see only a sliding window: the newest so many tokens, their own included.

Newer checkpoints list it (`layer_types`); of older ones it is the model type's rule.
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
    """A model type's rule."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """Every layer's window; None where it sees everything.

        Raises:
            CheckpointError: the settings contradict each other or mean something that is not supported.
        """
        ...


@dataclass(frozen=True)
class Never:
    """All layers see everything."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        if any(_listed(config, layers) or []):
            raise CheckpointError(
                f"this {config['model_type']} checkpoint uses sliding-window attention",
                "supported is full attention in every layer",
            )
        return [None] * layers


@dataclass(frozen=True)
class EveryLayer:
    """All layers have the window, where there is one; `layer_types` is not asked."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        return [None if config.get(WINDOW) is None else count(config, WINDOW)] * layers


@dataclass(frozen=True)
class LayersFrom:
    """With `use_sliding_window`, the layers from a number on."""

    first: str = "max_window_layers"
    """The setting that holds the first one's number; 0 when absent."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        slides = _listed(config, layers)
        if slides is None:
            if not config.get("use_sliding_window") or config.get(WINDOW) is None:
                return [None] * layers
            first = count(config, self.first, default=0, least=0)
            slides = [layer >= first for layer in range(layers)]
        return _windows(config, slides)


@dataclass(frozen=True)
class AllButEvery:
    """All layers but every so many."""

    period: str
    """The setting that holds how many."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        slides = _listed(config, layers)
        if slides is None:
            period = count(config, self.period)
            slides = [(layer + 1) % period != 0 for layer in range(layers)]
        return _windows(config, slides)


@dataclass(frozen=True)
class UnrotatedLayers:
    """With `use_sliding_window`, the layers without rotary positions."""

    def of_layers(self, config: Mapping[str, Any], layers: int) -> list[int | None]:
        """See `Windows.of_layers`."""
        if not config.get("use_sliding_window") or config.get(WINDOW) is None:
            return [None] * layers
        slides = _listed(config, layers)
        return _windows(config, [not turns for turns in rotated_layers(config, layers)] if slides is None else slides)


def rotated_layers(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Of a model with unrotated layers: whether each layer has rotary positions.

    Raises:
        CheckpointError: `no_rope_layers` is no list of zeros and ones, or `no_rope_layer_interval` no number.
    """
    listed = optional_list(config, "no_rope_layers", layers)
    if listed is None:
        period = count(config, "no_rope_layer_interval", default=4)
        return [(layer + 1) % period != 0 for layer in range(layers)]
    if any(entry not in (0, 1) for entry in listed):
        raise CheckpointError(f"config.json: no_rope_layers must hold zeros and ones, found {shown(listed)}")
    return [bool(entry) for entry in listed]


def _windows(config: Mapping[str, Any], slides: list[bool]) -> list[int | None]:
    window = count(config, WINDOW) if any(slides) else None
    return [window if sliding else None for sliding in slides]


def _listed(config: Mapping[str, Any], layers: int) -> list[bool] | None:
    """Whether each layer slides as `layer_types` has it; None where there is no such list."""
    kinds = optional_list(config, "layer_types", layers)
    if kinds is None:
        return None
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise CheckpointError(
                f"config.json: layer_types has {shown(kind)}", f"supported are {_FULL} and {_SLIDING}"
            )
    return [kind == _SLIDING for kind in kinds]
