"""Finds a graph's inputs and outputs for the states of layers without attention.

Known are convolution states as `edge-run export` writes them (docs/graph-contract.md): `past_conv.N` has a layer's
inputs at the last tokens, and `present_conv.N` those followed by the inputs at the new tokens. Other tools return the
state after the last token alone, and name it likewise; such graphs are refused (`unsupported.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from ...errors import BundleError
from ..kv.hybrid_arena import StateShape
from .cache_io import EXPORT_HINT
from .graph_io import GraphValue, StateTensor, element_type

_PAST: Final = re.compile(r"past_conv\.(\d+)")
_PRESENT: Final = re.compile(r"present_conv\.(\d+)")


class FoundStates(NamedTuple):
    """The states of a graph."""

    tensors: tuple[StateTensor, ...]
    """One for each layer that keeps a state, in the order of the layers."""
    shape: StateShape | None
    """None for a graph without states."""


def find_states(inputs: Sequence[GraphValue], outputs: Sequence[GraphValue], where: str) -> FoundStates:
    """Find the convolution states of a graph.

    Args:
        inputs: the graph's inputs.
        outputs: the graph's outputs.
        where: names the file in errors.

    Raises:
        BundleError: an input has no matching output, or the states of the layers differ in size.
    """
    presents = {match[1]: value for value in outputs if (match := _PRESENT.fullmatch(value.name))}
    pasts = {match[1]: value for value in inputs if (match := _PAST.fullmatch(value.name)) and _is_known(value)}
    tensors, shapes = [], {}
    for layer, past in sorted(pasts.items(), key=lambda pair: int(pair[0])):
        present = presents.get(layer)
        if present is None:
            raise BundleError(f"{where} has no output for its state input {past.name}", EXPORT_HINT)
        if not _is_of_every_token(present, past):
            # It is of another tool, which `reject_inputs` says.
            return FoundStates((), None)
        tensors.append(StateTensor(past.name, present.name))
        shapes[past.shape[1:]] = past.name
    if len(shapes) > 1:
        raise BundleError(
            f"{where} has convolution states of different sizes: {' and '.join(shapes.values())}", EXPORT_HINT
        )
    if not tensors:
        return FoundStates((), None)
    tokens, channels = next(iter(shapes))
    return FoundStates(tuple(tensors), StateShape(len(tensors), int(tokens or 0), int(channels or 0)))


def _is_known(past: GraphValue) -> bool:
    """Whether an input has the shape `[1, tokens, channels]` and float32 elements."""
    sizes = all(isinstance(size, int) and size > 0 for size in past.shape)
    return len(past.shape) == 3 and sizes and past.shape[0] == 1 and element_type(past) == np.float32


def _is_of_every_token(present: GraphValue, past: GraphValue) -> bool:
    """Whether an output grows with the number of new tokens, where the input has a fixed size."""
    if len(present.shape) != 3 or present.type != past.type:
        return False
    return not isinstance(present.shape[1], int) and present.shape[2] == past.shape[2]
