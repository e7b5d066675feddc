"""Which of a graph's ports are its cache, and which dimension of each counts rows.

Exporters call the cache `past_key_values.3.key`, `past_keys_3`, `past_3` (keys and values in one tensor) and more, and
give it back as `present.3.key` and the like. What they share is a layer's number and a word for what is kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Final, NamedTuple

from ...errors import BundleError
from ..kv.arena import TensorForm
from .graph_io import CacheTensor, GraphValue, element_type

_WORD: Final = re.compile(r"[a-z]+|\d+")
_SIDES: Final = frozenset(
    {"past", "present", "new", "updated", "input", "output", "in", "out", "self", "attn", "layer", "layers"}
)
_CACHE: Final = frozenset({"cache", "kv", "past", "present"})
_BATCH_FIRST: Final = 0
_ROWS_AXIS: Final[Mapping[int, int]] = {3: 1, 4: 2, 5: 3}
"""Where rows usually are, by rank: `[B, T, 2D]`, `[B, H, T, D]`, `[2, B, H, T, D]`."""
_HINT: Final = "export the model with edge-run export, or choose another variant of it"


class _Kept(Enum):
    KEY = auto()
    VALUE = auto()
    BOTH = auto()


class Slot(NamedTuple):
    """A layer and what of it a port keeps."""

    layer: int
    kept: _Kept


_KINDS: Final[Mapping[frozenset[str], _Kept]] = {
    **{frozenset({word}): _Kept.KEY for word in ("key", "keys", "k")},
    **{frozenset({word}): _Kept.VALUE for word in ("value", "values", "v")},
    **dict.fromkeys((frozenset(), frozenset({"key", "value"}), frozenset({"key", "values"})), _Kept.BOTH),
}


def slot_of(name: str) -> Slot | None:
    """What a port of this name keeps; None if it is no part of a cache."""
    words = _WORD.findall(name.lower())
    numbers = [at for at, word in enumerate(words) if word.isdigit()]
    if len(numbers) != 1 or not _CACHE.intersection(words):
        return None
    at = numbers[0]
    plain = _SIDES | {"cache", "kv"}
    before, after = frozenset(words[:at]) - plain, frozenset(words[at + 1 :]) - plain
    # In past_key_values.3.key the words before the number are the cache's name.
    kept = _KINDS.get(after) if after else _KINDS.get(before)
    if kept is None or (after and before not in (frozenset(), frozenset({"key", "values"}))):
        return None
    return Slot(int(words[at]), kept)


def find_cache(
    inputs: Sequence[GraphValue],
    outputs: Sequence[GraphValue],
    where: str,
    named: Mapping[str, Slot],
    sizes: Mapping[int, int],
) -> tuple[CacheTensor, ...]:
    """The cache tensors of a graph, keys of all layers before values.

    Args:
        inputs: of the graph.
        outputs: of the graph.
        where: names the file in errors.
        named: ports whose part is known from elsewhere.
        sizes: what dimensions 1 and 3 of `[B, H, T, D]` are where the graph leaves them open.

    Raises:
        BundleError: an input has no output, or its type or shape cannot be followed.
    """
    ins = _by_slot(inputs, named, where)
    outs = _by_slot(outputs, named, where)
    tensors = []
    for slot in sorted(ins, key=lambda slot: (slot.kept.value, slot.layer)):
        past = ins[slot]
        if slot not in outs:
            raise BundleError(f"{where} gives nothing back for its cache input {past.name}", _HINT)
        present = outs[slot]
        if past.type != present.type:
            raise BundleError(
                f"{where} takes {past.name} as {past.type} and gives {present.name} as {present.type}", _HINT
            )
        tensors.append(CacheTensor(past.name, present.name, _form(past, present, where, sizes)))
    return tuple(tensors)


def fixed_rows(
    tensor: CacheTensor, inputs: Mapping[str, GraphValue], outputs: Mapping[str, GraphValue]
) -> tuple[int | None, bool]:
    """Rows of a cache tensor whose size the graph fixes (else None), and whether its output has as many."""
    past = inputs[tensor.past].shape[tensor.form.axis]
    present = outputs[tensor.present].shape
    same = len(present) <= tensor.form.axis or not isinstance(present[tensor.form.axis], int)
    if not isinstance(past, int):
        return None, True
    return past, same or present[tensor.form.axis] == past


def _by_slot(ports: Sequence[GraphValue], named: Mapping[str, Slot], where: str) -> dict[Slot, GraphValue]:
    found: dict[Slot, GraphValue] = {}
    for port in ports:
        slot = named.get(port.name) or slot_of(port.name)
        if slot is None:
            continue
        if slot in found:
            raise BundleError(f"{where} has two ports for one cache: {found[slot].name} and {port.name}", _HINT)
        found[slot] = port
    return found


def _form(past: GraphValue, present: GraphValue, where: str, sizes: Mapping[int, int]) -> TensorForm:
    dtype = element_type(past)
    if dtype is None or dtype.kind not in "fiu" or dtype.itemsize > 4:
        raise BundleError(f"{where} has a cache of {past.type} ({past.name}), which is not supported", _HINT)
    rank = len(past.shape)
    if rank not in _ROWS_AXIS:
        raise BundleError(f"{where} has a cache of {rank} dimensions ({past.name}): {list(past.shape)}", _HINT)
    shape: list[int | str | None] = list(past.shape)
    batch = 1 if rank == 5 else _BATCH_FIRST
    open_dims = [at for at, size in enumerate(shape) if not isinstance(size, int)]
    if len(present.shape) == rank:  # what one side leaves open the other may say
        for at in open_dims:
            other = present.shape[at]
            if isinstance(other, int) and at != _ROWS_AXIS[rank]:
                shape[at] = other
    if not isinstance(shape[batch], int):
        shape[batch] = 1
    if rank == 4 and sum(not isinstance(size, int) for size in shape) > 1:
        # Of several open dimensions behind the batch, the usual one counts rows.
        for at, size in sizes.items():
            if not isinstance(shape[at], int):
                shape[at] = size
    left = [at for at, size in enumerate(shape) if not isinstance(size, int)]
    if len(left) > 1:
        raise BundleError(
            f"{where} leaves the sizes of its cache open: {past.name} is {_shown(past)}",
            "put the model's config.json beside it",
        )
    if shape[batch] != 1:
        raise BundleError(f"{where} works on {shape[batch]} texts at once ({past.name} is {_shown(past)})", _HINT)
    axis = left[0] if left else _ROWS_AXIS[rank]
    if any(size == 0 for at, size in enumerate(shape) if at != axis):
        raise BundleError(f"{where} has an empty cache: {past.name} is {_shown(past)}", _HINT)
    return TensorForm(dtype, tuple(size if isinstance(size, int) else 0 for size in shape), axis)


def _shown(port: GraphValue) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in port.shape) + "]"
