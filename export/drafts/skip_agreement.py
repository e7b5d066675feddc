"""Measures how often a layer-skip draft agrees with its target.

One session of the target serves all choices of skipped sub-layers. The graph gets a gate at every sub-layer that may be
skipped: a factor of 0 leaves the residual stream unchanged, which is what skipping the sub-layer does. A draft is
measured as it is used: it predicts after slots that the target wrote, not the draft. The whole target reads each text
once, and its slots stay in the cache; then every measured position runs in a slot after all of them, and attends to the
slots before its position and to itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, TensorProto, helper

from ...errors import InputError
from ...models.bundle import GRAPH_NAME
from ...models.manifest import Architecture
from ...runtime.text.turn_markers import TokenArray
from ..check.contract_session import ContractSession
from .skipped_layers import SubLayer, inner_sub_layers, join_of

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_GATES: Final = "gates"
_MAX_WIDTH: Final = 32
"""Largest number of positions of a pass, whose logits are in memory at a time."""
_MAX_SLOTS: Final = 1024
"""Largest number of slots of a cache that several texts share."""
_MASKED: Final = np.float32(-1e9)


class _TextGroup(NamedTuple):
    """Texts that the target has read into one cache, one after the other; none attends to another.

    Positions are slots, since rotary attention does not depend on where a text begins.
    """

    tokens: TokenArray
    """Token ids of all texts, int64 [n]."""
    starts: Int64Array
    """Slot at which the text of each token begins, int64 [n]."""
    measured: Int64Array
    """Slots of the positions that are measured, int64 [m]."""
    cache: list[tuple[str, str, npt.NDArray[Any]]]
    """See `ContractSession.buffers`."""


class SkipAgreement:
    """Measures the agreement of choices of skipped sub-layers on texts.

    Args:
        bundle: The target's bundle.
        architecture: Its numbers.
        texts: Token ids, int64 [n] each, at least 2; what exceeds the context is left out.
        starts: For each text, the index of the first token that a draft would predict.
        max_positions: Largest number of positions to measure, spread evenly.

    Raises:
        ExportError: The graph does not run.
        InputError: No position can be measured.
    """

    def __init__(
        self,
        bundle: Path,
        architecture: Architecture,
        texts: Sequence[TokenArray],
        starts: Sequence[int],
        max_positions: int,
    ) -> None:
        self.sub_layers: Final = inner_sub_layers(architecture.layers)
        """Sub-layers that may be skipped."""
        model = onnx.load(bundle / GRAPH_NAME, load_external_data=False)
        self._session = ContractSession(bundle, architecture, 1, gated(model, self.sub_layers))
        self._width = min(_MAX_WIDTH, max(1, architecture.context // 4))
        room = min(architecture.context, _MAX_SLOTS) - self._width
        fitting = [text[:room] for text in texts]
        positions = _spread_positions(fitting, starts, max_positions)
        if not sum(map(len, positions)):
            raise InputError("the texts have no answer to measure a draft on", "give longer ones")
        lengths = [len(text) if some.size else 0 for text, some in zip(fitting, positions, strict=True)]
        self._groups = [
            self._group([fitting[each] for each in group], [positions[each] for each in group])
            for group in _grouped(lengths, room)
        ]
        self.preferred: Final = np.concatenate([self._read(group) for group in self._groups])
        """The target's likeliest next token at each measured position, int64 [m]."""

    def agreement(self, skipped: Collection[SubLayer]) -> float:
        """Share of positions at which target and draft prefer the same token."""
        found = np.concatenate([logits.argmax(axis=1) for logits in self.logits(skipped)])
        return float(np.mean(found == self.preferred))

    def logits(self, skipped: Collection[SubLayer]) -> Iterator[Float32Array]:
        """The draft's logits at the measured positions, float32 [m, vocabulary], some positions at a time."""
        gates = np.array([each not in skipped for each in self.sub_layers], np.float32)
        for group in self._groups:
            self._session.buffers = group.cache
            self._session.length = group.tokens.size
            slots = np.arange(group.tokens.size)
            for first in range(0, group.measured.size, self._width):
                positions = group.measured[first : first + self._width]
                before = (slots >= group.starts[positions, None]) & (slots < positions[:, None])
                bias = _bias(np.concatenate([before, np.eye(positions.size, dtype=np.bool_)], axis=1))
                every = np.arange(positions.size)
                yield self._session.run(group.tokens[positions], positions, bias, every, {_GATES: gates})

    def _read(self, group: _TextGroup) -> Int64Array:
        """Run the whole target on some texts; returns its preferred tokens at the measured positions."""
        gates = np.ones(len(self.sub_layers), np.float32)
        preferred = []
        self._session.buffers = group.cache
        for start in range(0, group.tokens.size, self._width):
            positions = np.arange(start, min(start + self._width, group.tokens.size))
            slots = np.arange(positions[-1] + 1)
            bias = _bias((slots >= group.starts[positions, None]) & (slots <= positions[:, None]))
            self._session.length = start
            wanted = group.measured[np.isin(group.measured, positions)] - start
            logits = self._session.run(group.tokens[positions], positions, bias, wanted, {_GATES: gates})
            preferred.append(logits.argmax(axis=1))
        return np.concatenate(preferred)

    def _group(self, texts: Sequence[TokenArray], positions: Sequence[Int64Array]) -> _TextGroup:
        """Texts with a cache of their own that is not filled yet."""
        starts = np.cumsum([0, *map(len, texts)])
        cache = [
            (past, present, np.zeros((*one.shape[:2], starts[-1] + self._width, one.shape[3]), one.dtype))
            for past, present, one in self._session.buffers
        ]
        return _TextGroup(
            tokens=np.concatenate(texts),
            starts=np.repeat(starts[:-1], [len(text) for text in texts]),
            measured=np.concatenate([start + some for start, some in zip(starts[:-1], positions, strict=True)]),
            cache=cache,
        )


def gated(model: ModelProto, sub_layers: Sequence[SubLayer]) -> ModelProto:
    """Copy a graph and add an input `gates`, float32 [sub-layers], with a factor for each sub-layer's output."""
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    gates = {each.join: f"{_GATES}.{number}" for number, each in enumerate(sub_layers)}
    nodes = [helper.make_node("Split", [_GATES], list(gates.values()), name=_GATES, num_outputs=len(sub_layers))]
    for node in graph.node:
        if (gate := gates.get(join_of(node))) is not None:
            nodes.append(helper.make_node("Mul", [node.input[0], gate], [f"{gate}.product"], name=f"{gate}.product"))
            node.input[0] = f"{gate}.product"
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info(_GATES, TensorProto.FLOAT, [len(sub_layers)]))
    return made


def _bias(attended: npt.NDArray[np.bool_]) -> Float32Array:
    """Attention bias for a mask of attended slots."""
    bias: Float32Array = np.where(attended, np.float32(0), _MASKED)
    return bias


def _grouped(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Indices of texts in groups of at most `room` tokens; texts of length 0 are left out."""
    groups: list[list[int]] = []
    left = 0
    for number, length in enumerate(lengths):
        if not length:
            continue
        if length > left:
            groups.append([])
            left = room
        groups[-1].append(number)
        left -= length
    return groups


def _spread_positions(texts: Sequence[TokenArray], starts: Sequence[int], max_positions: int) -> list[Int64Array]:
    """For each text the positions at which a draft predicts, at most `max_positions` in all, spread evenly."""
    every = [
        (number, position)
        for number, (text, start) in enumerate(zip(texts, starts, strict=True))
        for position in range(max(start - 1, 1), len(text) - 1)
    ]
    chosen = np.unique(np.linspace(0, len(every) - 1, min(max_positions, len(every))).round().astype(np.int64))
    found = np.array(every, np.int64).reshape(-1, 2)[chosen]
    return [found[found[:, 0] == number, 1] for number in range(len(texts))]
