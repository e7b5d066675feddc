"""Finds a graph's cache inputs and outputs with their slot dimension, and the states of layers without attention.

Exporters call the cache `past_key_values.3.key`, `past_keys_3`, `past_3` (keys and values in one tensor) and more, and
return it as `present.3.key` and the like. What the names share is a layer number and a word for the content.

`edge-run export` calls states `past_conv.N` and `past_recurrent.N` (docs/graph-contract.md), transformers.js' graphs do
too, ONNX Runtime GenAI's `past.N.conv` and `past.N.recurrent`, and others `past_ssm.N`, `cache_params.past.ssm.N` and
more. Their names share the same two things. Only graphs of `edge-run export` return more than the states after the last
token: convolutions return the inputs at all new tokens, after those before them, and linear attention returns the
updates of its state by the new tokens (`past_recurrent_updates.N`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Final, TypeAlias

from ...errors import BundleError
from ..kv.buffers import CacheTensorType
from ..kv.state_buffers import UPDATED_WIDTH, StatePart, StateType
from .graph_io import CacheTensor, GraphValue, StateTensor

_WORD: Final = re.compile(r"[a-z]+|\d+")
_FILLER_WORDS: Final = frozenset(
    {"past", "present", "new", "updated", "input", "output", "in", "out", "self", "attn", "layer", "layers"}
)
_CACHE_WORDS: Final = frozenset({"cache", "kv", "past", "present"})
_SLOT_AXIS: Final[Mapping[int, int]] = {3: 1, 4: 2, 5: 3}
"""The usual slot dimension by rank: `[B, T, 2D]`, `[B, H, T, D]`, `[2, B, H, T, D]`."""
_STATE_NAME: Final = re.compile(
    r".*(conv|ssm|recurrent|rwkv|mamba).*|cache_params\b.*|(.*[._])?state[._]?\d*", re.IGNORECASE
)
"""Names of inputs and outputs that hold states."""
_FILLERS: Final = _FILLER_WORDS | {"next", "cache", "params", "state", "states"}
"""Words that say nothing about the content of a state."""
_KINDS: Final = {"conv": "convolution"}
"""Words for the content of states whose usual name is another."""
_UPDATES: Final = "updates"
"""Word in the names of inputs with updates of states."""
_WINDOW: Final = re.compile("window_([1-9][0-9]*)")
"""Name of the dimension of slots in layers with a sliding window; see `attention_edits.take_windows`."""
_SELECTED_LOGITS: Final = "logit_rows"
"""An input that only graphs have that follow the graph contract."""


def unsupported(what: str) -> BundleError:
    """The error about a graph that this version cannot run."""
    return BundleError(what, "export the model with edge-run export, or choose another variant of it")


Key: TypeAlias = tuple[str, ...]
"""What the names of a state's input and output share: numbers and words."""


CachePart: TypeAlias = tuple[int, int]
"""Content of a cache tensor (0 for keys, 1 for values, 2 for both) and its layer."""

_CONTENTS: Final[Mapping[frozenset[str], int]] = {
    **{frozenset({word}): 0 for word in ("key", "keys", "k")},
    **{frozenset({word}): 1 for word in ("value", "values", "v")},
    **dict.fromkeys((frozenset(), frozenset({"key", "value"}), frozenset({"key", "values"})), 2),
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
    return content, int(words[index])


def find_cache(
    inputs: Sequence[GraphValue],
    outputs: Sequence[GraphValue],
    where: str,
    usual: Mapping[str, str],
    sizes: Mapping[int, int],
) -> tuple[tuple[CacheTensor, ...], int]:
    """Find the cache tensors of a graph: keys of all layers, then values; and count the layers.

    Args:
        inputs: the graph's inputs.
        outputs: the graph's outputs.
        where: names the file in errors.
        usual: usual names of inputs and outputs that have others; see `introspection.usual_names`.
        sizes: sizes of dimensions 1 and 3 of `[B, H, T, D]`, used where the graph leaves them open.

    Raises:
        BundleError: an input has no matching output, or its type or shape is not supported.
    """
    pasts = _by_part(inputs, usual, where)
    presents = _by_part(outputs, usual, where)
    tensors = []
    for part, past in sorted(pasts.items(), key=itemgetter(0)):
        if part not in presents:
            raise unsupported(f"{where} has no output for its cache input {past.name}")
        present = presents[part]
        if past.type != present.type:
            raise unsupported(f"{where} takes {past.name} as {past.type} and gives {present.name} as {present.type}")
        tensor_type = _tensor_type(past, present, where, sizes)
        window = _WINDOW.fullmatch(str(past.shape[tensor_type.axis]))
        tensors.append(CacheTensor(past.name, present.name, tensor_type, int(window[1]) if window else 0))
    return tuple(tensors), len({layer for _, layer in pasts})


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


def _by_part(values: Sequence[GraphValue], usual: Mapping[str, str], where: str) -> dict[CachePart, GraphValue]:
    found: dict[CachePart, GraphValue] = {}
    for value in values:
        part = cache_part(usual.get(value.name, value.name))
        if part is None:
            continue
        if part in found:
            raise unsupported(
                f"{where} has two cache tensors for the same layer and content: {found[part].name} and {value.name}"
            )
        found[part] = value
    return found


def _tensor_type(past: GraphValue, present: GraphValue, where: str, sizes: Mapping[int, int]) -> CacheTensorType:
    dtype = past.dtype
    if dtype.kind not in "fiu" or dtype.itemsize > 4:
        raise unsupported(f"{where} has a cache of type {past.type} ({past.name}), which is not supported")
    rank = len(past.shape)
    if rank not in _SLOT_AXIS:
        raise unsupported(f"{where} has a cache of {rank} dimensions ({past.name}): {list(past.shape)}")
    shape: list[int | str | None] = list(past.shape)
    batch = 1 if rank == 5 else 0
    if len(present.shape) == rank:  # the output may fix what the input leaves open
        fixed = {axis: size for axis, size in enumerate(present.shape) if axis != _SLOT_AXIS[rank]}
        shape = [size if isinstance(size, int) else fixed.get(axis, size) for axis, size in enumerate(shape)]
    if not isinstance(shape[batch], int):
        shape[batch] = 1
    if rank == 4 and sum(not isinstance(size, int) for size in shape) > 1:
        # If several dimensions after the batch are open, the usual one counts slots.
        shape = [size if isinstance(size, int) else sizes.get(axis, size) for axis, size in enumerate(shape)]
    still_open = [axis for axis, size in enumerate(shape) if not isinstance(size, int)]
    if len(still_open) > 1:
        raise BundleError(
            f"{where} leaves the sizes of its cache open: {past.name} is {shape_text(past.shape)}",
            "put the model's config.json beside it",
        )
    if shape[batch] != 1:
        size = shape[batch]
        raise unsupported(f"{where} has a fixed batch size of {size} ({past.name} is {shape_text(past.shape)})")
    slot_axis = (*still_open, _SLOT_AXIS[rank])[0]
    if any(size == 0 for axis, size in enumerate(shape) if axis != slot_axis):
        raise unsupported(f"{where} has an empty cache: {past.name} is {shape_text(past.shape)}")
    return CacheTensorType(dtype, tuple(size if isinstance(size, int) else 0 for size in shape), slot_axis)


def shape_text(shape: Sequence[int | str | None]) -> str:
    """A shape as errors show it."""
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


def find_states(
    inputs: Sequence[GraphValue], outputs: Sequence[GraphValue], where: str, usual: Mapping[str, str]
) -> tuple[tuple[StateTensor, ...], tuple[StateType, ...]]:
    """Find the states of a graph: by type, for each in the order of the layers, and their types, each with its layers.

    Args:
        inputs: the graph's inputs.
        outputs: the graph's outputs.
        where: names the file in errors.
        usual: as for `find_cache`.

    Raises:
        BundleError: an input has no matching output, or its type or shape is not supported.
    """
    pasts = states_by_key(inputs, usual)
    presents = states_by_key(outputs, usual)
    own = any(value.name == _SELECTED_LOGITS for value in inputs)
    names = {value.name for value in outputs}
    has_updates = own and any(_UPDATES in key for key in pasts)
    groups: dict[tuple[str, StateType], list[StateTensor]] = {}
    for key in sorted(pasts, key=_order):
        past = pasts[key]
        present = presents.get(key)
        if present is None:
            raise unsupported(f"{where} has no output for its state input {past.name}")
        words, numbers = _order(key)
        kind = " ".join(_KINDS.get(word, word) for word in words) or "state"
        advanced = past.name.replace("past_", "advanced_", 1)
        tensor = StateTensor(
            past.name, present.name, numbers[0] if numbers else 0, kind, advanced if advanced in names else None
        )
        if has_updates and _UPDATES in key:
            state_type = _updates_type(past, present, where)
        else:
            state_type = _state_type(past, present, where, own=own)
        if has_updates and tensor.advanced is not None:
            state_type = replace(state_type, part=StatePart.UPDATED)
        elif has_updates and state_type.of_every_token:
            state_type = replace(state_type, kept=UPDATED_WIDTH)
        groups.setdefault((kind, state_type), []).append(tensor)
    tensors = tuple(tensor for members in groups.values() for tensor in members)
    return tensors, tuple(replace(each, layers=len(members)) for (_, each), members in groups.items())


def _updates_type(past: GraphValue, present: GraphValue, where: str) -> StateType:
    """The type of the updates of one state."""
    width = past.shape[2] if len(past.shape) == 3 else None
    if not isinstance(width, int) or past.type != "tensor(float)" or present.type != past.type:
        raise unsupported(f"{where} takes {past.name} as {past.type} {shape_text(past.shape)}")
    return StateType(1, (0, width), of_every_token=True, part=StatePart.UPDATES, kept=UPDATED_WIDTH)


def states_by_key(values: Sequence[GraphValue], usual: Mapping[str, str]) -> dict[Key, GraphValue]:
    """Find the inputs or outputs that hold states by their names.

    Args:
        values: the graph's inputs, or its outputs.
        usual: as for `find_cache`.

    Returns:
        Them, by what an input shares with its output: words, then numbers.
    """
    found = {}
    for value in values:
        name = usual.get(value.name, value.name)
        if _STATE_NAME.fullmatch(name):
            parts = _WORD.findall(name.lower().replace("past_key_values", ""))
            found[tuple(sorted((part for part in parts if part not in _FILLERS), key=str.isdigit))] = value
    return found


def _order(key: Key) -> tuple[list[str], list[int]]:
    return [part for part in key if not part.isdigit()], [int(part) for part in key if part.isdigit()]


def _state_type(past: GraphValue, present: GraphValue, where: str, *, own: bool) -> StateType:
    """The type of one state, of a graph that follows the graph contract (`own`) or of another tool's."""
    dtype = past.dtype
    if dtype.kind != "f" or dtype.itemsize > 4 or present.type != past.type:
        types = past.type if present.type == past.type else f"{past.type} and {present.type}"
        raise unsupported(f"{where} has a state of type {types} ({past.name}), which is not supported")
    same_rank = len(present.shape) == len(past.shape)
    returned = present.shape if same_rank else (None,) * len(past.shape)
    of_every_token = own and len(returned) == 3 and not isinstance(returned[1], int)
    # The output may fix what the input leaves open.
    sizes = [size if isinstance(size, int) else other for size, other in zip(past.shape[1:], returned[1:], strict=True)]
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise unsupported(f"{where} leaves the size of its state open: {past.name} is {shape_text(past.shape)}")
    if isinstance(past.shape[0], int) and past.shape[0] != 1:
        size = past.shape[0]
        raise unsupported(f"{where} has a fixed batch size of {size} ({past.name} is {shape_text(past.shape)})")
    shape = tuple(int(size or 0) for size in sizes)
    fixed = shape if not of_every_token else (None, *shape[1:])
    if present.shape and not (
        same_rank
        and all(
            not isinstance(other, int) or size in (None, other) for size, other in zip(fixed, returned[1:], strict=True)
        )
    ):
        raise unsupported(
            f"{where} takes {past.name} as {shape_text(past.shape)} and gives {present.name} as "
            f"{shape_text(present.shape)}"
        )
    return StateType(1, shape, of_every_token, dtype)
