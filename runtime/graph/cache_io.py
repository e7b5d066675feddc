"""Finds a graph's cache inputs and outputs, and their slot dimension.

Exporters call the cache `past_key_values.3.key`, `past_keys_3`, `past_3` (keys and values in one tensor) and more, and
return it as `present.3.key` and the like. What the names share is a layer number and a word for the content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from ...errors import BundleError
from ..kv.buffers import CacheTensorType
from .graph_io import CacheTensor, GraphValue, element_type

_WORD: Final = re.compile(r"[a-z]+|\d+")
_FILLER_WORDS: Final = frozenset(
    {"past", "present", "new", "updated", "input", "output", "in", "out", "self", "attn", "layer", "layers"}
)
_CACHE_WORDS: Final = frozenset({"cache", "kv", "past", "present"})
_SLOT_AXIS: Final[Mapping[int, int]] = {3: 1, 4: 2, 5: 3}
"""The usual slot dimension by rank: `[B, T, 2D]`, `[B, H, T, D]`, `[2, B, H, T, D]`."""
EXPORT_HINT: Final = "export the model with edge-run export, or choose another variant of it"
"""Hint of errors about graphs that this version cannot run."""


class _Content(Enum):
    KEY = auto()
    VALUE = auto()
    BOTH = auto()


class CachePart(NamedTuple):
    """Layer and content of a cache tensor."""

    layer: int
    content: _Content


_CONTENTS: Final[Mapping[frozenset[str], _Content]] = {
    **{frozenset({word}): _Content.KEY for word in ("key", "keys", "k")},
    **{frozenset({word}): _Content.VALUE for word in ("value", "values", "v")},
    **dict.fromkeys((frozenset(), frozenset({"key", "value"}), frozenset({"key", "values"})), _Content.BOTH),
}


def cache_part(name: str) -> CachePart | None:
    """The part of the cache that an input or output of this name holds; None if the name is not one of a cache."""
    words = _WORD.findall(name.lower())
    numbers = [index for index, word in enumerate(words) if word.isdigit()]
    if len(numbers) != 1 or not _CACHE_WORDS.intersection(words):
        return None
    index = numbers[0]
    ignored = _FILLER_WORDS | {"cache", "kv"}
    before, after = frozenset(words[:index]) - ignored, frozenset(words[index + 1 :]) - ignored
    # In past_key_values.3.key the words before the number are the cache's name.
    content = _CONTENTS.get(after) if after else _CONTENTS.get(before)
    if content is None or (after and before not in (frozenset(), frozenset({"key", "values"}))):
        return None
    return CachePart(int(words[index]), content)


def find_cache(
    inputs: Sequence[GraphValue],
    outputs: Sequence[GraphValue],
    where: str,
    known_parts: Mapping[str, CachePart],
    sizes: Mapping[int, int],
) -> tuple[CacheTensor, ...]:
    """Find the cache tensors of a graph: keys of all layers, then values.

    Args:
        inputs: the graph's inputs.
        outputs: the graph's outputs.
        where: names the file in errors.
        known_parts: parts of the cache by the names of inputs and outputs, where genai_config.json names them.
        sizes: sizes of dimensions 1 and 3 of `[B, H, T, D]`, used where the graph leaves them open.

    Raises:
        BundleError: an input has no matching output, or its type or shape is not supported.
    """
    pasts = _by_part(inputs, known_parts, where)
    presents = _by_part(outputs, known_parts, where)
    tensors = []
    for part in sorted(pasts, key=lambda part: (part.content.value, part.layer)):
        past = pasts[part]
        if part not in presents:
            raise BundleError(f"{where} has no output for its cache input {past.name}", EXPORT_HINT)
        present = presents[part]
        if past.type != present.type:
            raise BundleError(
                f"{where} takes {past.name} as {past.type} and gives {present.name} as {present.type}", EXPORT_HINT
            )
        tensors.append(CacheTensor(past.name, present.name, _tensor_type(past, present, where, sizes)))
    return tuple(tensors)


def fixed_slots(
    tensor: CacheTensor, inputs: Mapping[str, GraphValue], outputs: Mapping[str, GraphValue]
) -> tuple[int | None, bool]:
    """Number of slots of a cache tensor if the graph fixes it (else None), and whether its output has as many."""
    axis = tensor.tensor_type.axis
    past = inputs[tensor.past].shape[axis]
    present = outputs[tensor.present].shape
    if not isinstance(past, int):
        return None, True
    is_open = len(present) <= axis or not isinstance(present[axis], int)
    return past, is_open or present[axis] == past


def _by_part(
    values: Sequence[GraphValue], known_parts: Mapping[str, CachePart], where: str
) -> dict[CachePart, GraphValue]:
    found: dict[CachePart, GraphValue] = {}
    for value in values:
        part = known_parts.get(value.name) or cache_part(value.name)
        if part is None:
            continue
        if part in found:
            raise BundleError(
                f"{where} has two cache tensors for the same layer and content: {found[part].name} and {value.name}",
                EXPORT_HINT,
            )
        found[part] = value
    return found


def _tensor_type(past: GraphValue, present: GraphValue, where: str, sizes: Mapping[int, int]) -> CacheTensorType:
    dtype = element_type(past)
    if dtype is None or dtype.kind not in "fiu" or dtype.itemsize > 4:
        raise BundleError(f"{where} has a cache of type {past.type} ({past.name}), which is not supported", EXPORT_HINT)
    rank = len(past.shape)
    if rank not in _SLOT_AXIS:
        raise BundleError(f"{where} has a cache of {rank} dimensions ({past.name}): {list(past.shape)}", EXPORT_HINT)
    shape: list[int | str | None] = list(past.shape)
    batch = 1 if rank == 5 else 0
    open_axes = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if len(present.shape) == rank:  # the output may fix what the input leaves open
        for axis in open_axes:
            other = present.shape[axis]
            if isinstance(other, int) and axis != _SLOT_AXIS[rank]:
                shape[axis] = other
    if not isinstance(shape[batch], int):
        shape[batch] = 1
    if rank == 4 and sum(not isinstance(size, int) for size in shape) > 1:
        # If several dimensions after the batch are open, the usual one counts slots.
        for axis, size in sizes.items():
            if not isinstance(shape[axis], int):
                shape[axis] = size
    still_open = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if len(still_open) > 1:
        raise BundleError(
            f"{where} leaves the sizes of its cache open: {past.name} is {shape_text(past.shape)}",
            "put the model's config.json beside it",
        )
    if shape[batch] != 1:
        raise BundleError(
            f"{where} has a fixed batch size of {shape[batch]} ({past.name} is {shape_text(past.shape)})", EXPORT_HINT
        )
    slot_axis = still_open[0] if still_open else _SLOT_AXIS[rank]
    if any(size == 0 for axis, size in enumerate(shape) if axis != slot_axis):
        raise BundleError(f"{where} has an empty cache: {past.name} is {shape_text(past.shape)}", EXPORT_HINT)
    return CacheTensorType(dtype, tuple(size if isinstance(size, int) else 0 for size in shape), slot_axis)


def shape_text(shape: Sequence[int | str | None]) -> str:
    """A shape as errors show it."""
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
