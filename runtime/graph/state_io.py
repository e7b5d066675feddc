"""Finds a graph's inputs and outputs for the states of layers without attention.

`edge-run export` calls them `past_conv.N` and `past_recurrent.N` (docs/graph-contract.md), transformers.js' graphs do
too, ONNX Runtime GenAI's `past.N.conv` and `past.N.recurrent`, and others `past_ssm.N`, `cache_params.past.ssm.N` and
more. What the names share is a word for the content and a layer number. Only graphs of `edge-run export` return more
than the states after the last token: convolutions return the inputs at all new tokens, after those before them, and
linear attention returns the updates of its state by the new tokens (`past_recurrent_updates.N`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from ...errors import BundleError
from ..kv.state_buffers import UPDATED_WIDTH, StatePart, StateType
from .cache_io import EXPORT_HINT, shape_text
from .graph_io import GraphValue, StateTensor, element_type

_STATE_NAME: Final = re.compile(
    r".*(conv|ssm|recurrent|rwkv|mamba).*|cache_params\b.*|(.*[._])?state[._]?\d*", re.IGNORECASE
)
"""Names of inputs and outputs that hold states."""
_NAMES_IN_GENAI: Final = r"{}_(conv|recurrent|ssm)_names"
"""Keys of genai_config.json that name states."""
_PART: Final = re.compile(r"[a-z]+|\d+")
_FILLERS: Final = frozenset(
    {"past", "present", "new", "updated", "next", "input", "output", "in", "out", "cache", "params", "layer", "layers"}
    | {"state", "states"}
)
"""Words that say nothing about the content."""
_KINDS: Final = {"conv": "convolution"}
"""Words for the content of states whose usual name is another."""
_UPDATES: Final = "updates"
"""Word in the names of inputs with updates of states."""
_SELECTED_LOGITS: Final = "logit_rows"
"""An input that only graphs have that follow the graph contract."""

Key: TypeAlias = tuple[str, ...]
"""What the names of a state's input and output share: numbers and words."""


class FoundStates(NamedTuple):
    """The states of a graph."""

    tensors: tuple[StateTensor, ...]
    """By type, and for each in the order of the layers."""
    types: tuple[StateType, ...]
    """Their types, each of as many tensors as it has layers."""


def find_states(
    inputs: Sequence[GraphValue], outputs: Sequence[GraphValue], where: str, decoder: Mapping[str, Any]
) -> FoundStates:
    """Find the states of a graph.

    Args:
        inputs: the graph's inputs.
        outputs: the graph's outputs.
        where: names the file in errors.
        decoder: the `decoder` section of genai_config.json, which may name them.

    Raises:
        BundleError: an input has no matching output, or its type or shape is not supported.
    """
    pasts = states_by_key(inputs, decoder.get("inputs"), "past")
    presents = states_by_key(outputs, decoder.get("outputs"), "present")
    own = any(value.name == _SELECTED_LOGITS for value in inputs)
    names = {value.name for value in outputs}
    has_updates = own and any(_UPDATES in key for key in pasts)
    groups: dict[tuple[str, StateType], list[StateTensor]] = {}
    for key in sorted(pasts, key=_order):
        past = pasts[key]
        present = presents.get(key)
        if present is None:
            raise BundleError(f"{where} has no output for its state input {past.name}", EXPORT_HINT)
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
    return FoundStates(
        tuple(tensor for members in groups.values() for tensor in members),
        tuple(replace(each, layers=len(members)) for (_, each), members in groups.items()),
    )


def _updates_type(past: GraphValue, present: GraphValue, where: str) -> StateType:
    """The type of the updates of one state."""
    width = past.shape[2] if len(past.shape) == 3 else None
    if not isinstance(width, int) or past.type != "tensor(float)" or present.type != past.type:
        raise BundleError(f"{where} takes {past.name} as {past.type} {shape_text(past.shape)}", EXPORT_HINT)
    return StateType(1, (0, width), of_every_token=True, part=StatePart.UPDATES, kept=UPDATED_WIDTH)


def states_by_key(values: Sequence[GraphValue], section: object, side: str) -> dict[Key, GraphValue]:
    """Find the inputs (`side` "past") or outputs ("present") that hold states by their names.

    Args:
        values: the graph's inputs, or its outputs.
        section: the part of genai_config.json that may name them.
        side: which of the two.

    Returns:
        Them, by what an input shares with its output.
    """
    keys = {value.name: _key(value.name) for value in values if _STATE_NAME.fullmatch(value.name)}
    for name, pattern in section.items() if isinstance(section, Mapping) else ():
        match = re.fullmatch(_NAMES_IN_GENAI.format(side), name)
        if match is not None and isinstance(pattern, str) and pattern.count("%d") == 1:
            keys |= {pattern.replace("%d", str(layer)): (match[1], str(layer)) for layer in range(len(values))}
    return {keys[value.name]: value for value in values if value.name in keys}


def _key(name: str) -> Key:
    """What the name of a state's input shares with that of its output: its words, then its numbers."""
    parts = [part for part in _PART.findall(name.lower().replace("past_key_values", "")) if part not in _FILLERS]
    return tuple(sorted(parts, key=str.isdigit))


def _order(key: Key) -> tuple[list[str], list[int]]:
    return [part for part in key if not part.isdigit()], [int(part) for part in key if part.isdigit()]


def _state_type(past: GraphValue, present: GraphValue, where: str, *, own: bool) -> StateType:
    """The type of one state, of a graph that follows the graph contract (`own`) or of another tool's."""
    dtype = element_type(past)
    if dtype is None or dtype.kind != "f" or dtype.itemsize > 4 or present.type != past.type:
        types = past.type if present.type == past.type else f"{past.type} and {present.type}"
        raise BundleError(f"{where} has a state of type {types} ({past.name}), which is not supported", EXPORT_HINT)
    same_rank = len(present.shape) == len(past.shape)
    returned = present.shape if same_rank else (None,) * len(past.shape)
    of_every_token = own and len(returned) == 3 and not isinstance(returned[1], int)
    # The output may fix what the input leaves open.
    sizes = [size if isinstance(size, int) else other for size, other in zip(past.shape[1:], returned[1:], strict=True)]
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise BundleError(
            f"{where} leaves the size of its state open: {past.name} is {shape_text(past.shape)}", EXPORT_HINT
        )
    if isinstance(past.shape[0], int) and past.shape[0] != 1:
        raise BundleError(
            f"{where} has a fixed batch size of {past.shape[0]} ({past.name} is {shape_text(past.shape)})", EXPORT_HINT
        )
    shape = tuple(int(size or 0) for size in sizes)
    fixed = shape if not of_every_token else (None, *shape[1:])
    if present.shape and not (
        same_rank
        and all(
            not isinstance(other, int) or size in (None, other) for size, other in zip(fixed, returned[1:], strict=True)
        )
    ):
        raise BundleError(
            f"{where} takes {past.name} as {shape_text(past.shape)} and gives {present.name} as "
            f"{shape_text(present.shape)}",
            EXPORT_HINT,
        )
    return StateType(1, shape, of_every_token, dtype)
