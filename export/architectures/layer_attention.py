"""Which layers have attention, with which heads and window, and whose keys and values they read.

Newer checkpoints list the layers in `layer_types`; for older ones the rule depends on the model type. A token attends
to the `sliding_window` most recent tokens, including itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ...errors import CheckpointError
from ...models.json_file import shown
from ..checkpoint.json_fields import count, optional_list

KEYS_AS_VALUES: Final = "attention_k_eq_v"
"""Setting of whether values are the keys before their norm and rotation in layers with full attention."""
_OVERRIDES: Final = "per_layer_config"
"""Setting in which transformers 5 stores what differs, by the index of the layer."""
WINDOW: Final = "sliding_window"
_FULL, _SLIDING = "full_attention", "sliding_attention"


HeadShape = tuple[int, int]
"""Number of key and value heads of a layer, and number of channels of a head."""


def full_attention_heads(config: Mapping[str, Any], usual: HeadShape, windows: Sequence[int | None]) -> list[HeadShape]:
    """Return the heads of each layer of a model in which full attention has other heads than attention with a window.

    Raises:
        CheckpointError: a setting is malformed.
    """
    if (overrides := config.get(_OVERRIDES)) is not None:
        return [_overridden(overrides, layer, usual) for layer in range(len(windows))]
    kv_heads, head_dim = usual
    kv_heads = count(config, "num_global_key_value_heads", kv_heads) if config.get(KEYS_AS_VALUES) else kv_heads
    full = kv_heads, count(config, "global_head_dim", head_dim)
    return [usual if window is not None else full for window in windows]


def _overridden(overrides: object, layer: int, usual: HeadShape) -> HeadShape:
    found = overrides.get(str(layer), {}) if isinstance(overrides, Mapping) else overrides
    if not isinstance(found, Mapping) or not found.keys() <= {"head_dim", "num_key_value_heads"}:
        raise CheckpointError(
            f"config.json: {_OVERRIDES} of layer {layer} is {shown(found)}",
            "supported are head_dim and num_key_value_heads",
        )
    kv_heads, head_dim = usual
    return count(found, "num_key_value_heads", kv_heads), count(found, "head_dim", head_dim)


def cache_owners(config: Mapping[str, Any], setting: str | None, windows: Sequence[int | None]) -> list[int]:
    """Return the layer whose keys and values each layer reads: mostly itself.

    Args:
        config: the parsed config.json.
        setting: name of the number of last layers without keys and values of their own; None for a family without them.
        windows: the window of each layer; a layer without keys reads the keys of the last layer of its kind before it.

    Raises:
        CheckpointError: the setting is malformed, or a layer has no other to read from.
    """
    layers = len(windows)
    shared = 0 if setting is None else count(config, setting, default=0, minimum=0, maximum=layers)
    first = layers - shared
    owners = list(range(layers))
    for layer in range(first, layers):
        candidates = [each for each in range(first) if windows[each] == windows[layer]]
        if not candidates:
            raise CheckpointError(
                f"config.json: {setting} {shared} leaves layer {layer} without a layer of its kind to read from"
            )
        owners[layer] = candidates[-1]
    return owners


def layers_of_kind(kinds: Sequence[object], mixer: tuple[str, ...], attention: tuple[str, ...]) -> tuple[bool, ...]:
    """Whether each layer has a mixer in place of attention.

    Args:
        kinds: the entries of `layer_types`, one per layer.
        mixer: the names of layers with the mixer; errors name the first.
        attention: the names of layers with attention; errors name the first.

    Raises:
        CheckpointError: a kind has none of the names, or no layer has attention.
    """
    _require_known(kinds, (*mixer, *attention), f"{mixer[0]} and {attention[0]}")
    if not any(kind in attention for kind in kinds):
        raise CheckpointError("no layer of the checkpoint has attention", "supported are models with a key/value cache")
    return tuple(kind in mixer for kind in kinds)


Windows = Callable[[Mapping[str, Any], int], list[int | None]]
"""The rule of a model type: from a parsed config.json and the number of layers, the window of each layer, None for full
attention. It raises CheckpointError where the settings contradict each other or are not supported."""


def no_windows(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """Full attention in all layers, a rule of `Windows`."""
    if any(_layer_types(config, layers) or []):
        raise CheckpointError(
            f"this {config['model_type']} checkpoint uses sliding-window attention",
            "supported is full attention in every layer",
        )
    return [None] * layers


def window_in_every_layer(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """A window in all layers if `sliding_window` is set; `layer_types` is ignored. See `Windows`."""
    return [None if config.get(WINDOW) is None else count(config, WINDOW)] * layers


def windows_in_last_layers(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """With `use_sliding_window`, a window in all layers from `max_window_layers` on; see `Windows`."""
    sliding = _layer_types(config, layers)
    if sliding is None:
        if not config.get("use_sliding_window") or config.get(WINDOW) is None:
            return [None] * layers
        first = count(config, "max_window_layers", default=0, minimum=0)
        sliding = [layer >= first for layer in range(layers)]
    return _windows(config, sliding)


def windows_but_in_every_nth(config: Mapping[str, Any], layers: int, *, last_full: bool = False) -> list[int | None]:
    """A window in all layers except every n-th one, n being `sliding_window_pattern`; see `Windows`.

    With `last_full`, the last layer has full attention in any case.
    """
    sliding = _layer_types(config, layers)
    if sliding is None:
        period = count(config, "sliding_window_pattern")
        sliding = [(layer + 1) % period != 0 for layer in range(layers)]
    return _windows(config, [*sliding[:-1], False] if last_full else sliding)


def windows_without_rotation(config: Mapping[str, Any], layers: int) -> list[int | None]:
    """With `use_sliding_window`, a window in the layers without rotary positions; see `Windows`."""
    if not config.get("use_sliding_window") or config.get(WINDOW) is None:
        return [None] * layers
    sliding = _layer_types(config, layers)
    return _windows(config, [not rotated for rotated in rotated_layers(config, layers)] if sliding is None else sliding)


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
    _require_known(kinds, (_FULL, _SLIDING), f"{_FULL} and {_SLIDING}")
    return [kind == _SLIDING for kind in kinds]


def _require_known(kinds: Sequence[object], names: tuple[str, ...], supported: str) -> None:
    unknown = [kind for kind in kinds if kind not in names]
    if unknown:
        raise CheckpointError(f"config.json: layer_types has {shown(unknown[0])}", f"supported are {supported}")
