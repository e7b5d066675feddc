"""Finds a graph's inputs and outputs for the states of layers without attention.

Known are `past_conv.N` with `present_conv.N` and `past_recurrent.N` with `present_recurrent.N`, as `edge-run export`
writes them (docs/graph-contract.md). The output says by its shape what it holds: with a dimension that grows, the input
followed by the layer's inputs at all new tokens; with the shape of the input, the state after the last token alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ...errors import BundleError
from ..kv.state_buffers import StateType
from .cache_io import EXPORT_HINT
from .graph_io import GraphValue, StateTensor, element_type

_PAST: Final = re.compile(r"past_(conv|recurrent)\.(\d+)")


class FoundStates(NamedTuple):
    """The states of a graph."""

    tensors: tuple[StateTensor, ...]
    """By type, and for each in the order of the layers."""
    types: tuple[StateType, ...]
    """Their types, each of as many tensors as it has layers."""


def find_states(inputs: Sequence[GraphValue], outputs: Sequence[GraphValue], where: str) -> FoundStates:
    """Find the states of a graph.

    Args:
        inputs: the graph's inputs.
        outputs: the graph's outputs.
        where: names the file in errors.

    Raises:
        BundleError: an input has no matching output.
    """
    presents = {value.name: value for value in outputs}
    pasts = [(match, value) for value in inputs if (match := _PAST.fullmatch(value.name)) and _is_known(value)]
    groups: dict[tuple[str, tuple[int, ...], bool], list[StateTensor]] = {}
    for match, past in sorted(pasts, key=lambda pair: (pair[0][1], int(pair[0][2]))):
        present = presents.get(f"present_{match[1]}.{match[2]}")
        if present is None:
            raise BundleError(f"{where} has no output for its state input {past.name}", EXPORT_HINT)
        if not _is_state(present, past):
            # It is of another tool, which `reject_inputs` says.
            return FoundStates((), ())
        shape = tuple(int(size or 0) for size in past.shape[1:])
        key = match[1], shape, present.shape != past.shape
        groups.setdefault(key, []).append(StateTensor(past.name, present.name))
    return FoundStates(
        tuple(tensor for members in groups.values() for tensor in members),
        tuple(StateType(len(members), shape, grows) for (_, shape, grows), members in groups.items()),
    )


def _is_known(past: GraphValue) -> bool:
    """Whether an input has fixed sizes for a batch of one, and float32 elements."""
    sizes = all(isinstance(size, int) and size > 0 for size in past.shape)
    return len(past.shape) > 2 and sizes and past.shape[0] == 1 and element_type(past) == np.float32


def _is_state(present: GraphValue, past: GraphValue) -> bool:
    """Whether an output has the shape of the input, or one that grows with the number of new tokens."""
    if len(present.shape) != len(past.shape) or present.type != past.type:
        return False
    if present.shape == past.shape:
        return True
    return len(past.shape) == 3 and not isinstance(present.shape[1], int) and present.shape[2] == past.shape[2]
