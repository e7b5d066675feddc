"""Which layers of a hybrid have attention, by the kinds that config.json names."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import CheckpointError
from ...models.json_file import shown


def layers_of_kind(kinds: Sequence[object], mixer: tuple[str, ...], attention: tuple[str, ...]) -> tuple[bool, ...]:
    """Whether each layer has a mixer in place of attention.

    Args:
        kinds: the entries of `layer_types`, one per layer.
        mixer: the names of layers with the mixer; errors name the first.
        attention: the names of layers with attention; errors name the first.

    Raises:
        CheckpointError: a kind has none of the names, or no layer has attention.
    """
    for kind in kinds:
        if kind not in (*mixer, *attention):
            raise CheckpointError(
                f"config.json: layer_types has {shown(kind)}", f"supported are {mixer[0]} and {attention[0]}"
            )
    if not any(kind in attention for kind in kinds):
        raise CheckpointError("no layer of the checkpoint has attention", "supported are models with a key/value cache")
    return tuple(kind in mixer for kind in kinds)
