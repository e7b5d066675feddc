"""How often the target without some parts would guess its next token, for any parts and without a graph for each.

The graph gets a factor at every part that may be left out: 0 leaves the residual stream as it was, which is what
leaving the part out does. So one session judges any choice. It is judged as it is used: a guess is made behind rows of
the target, not of the draft. A text is read once by the whole target, whose rows stay in the cache; then every row that
is judged runs in a slot behind them all, seeing the rows before its place, and itself.
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
from .skipped_layers import SubLayer, inner_parts, join_of

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_GATES: Final = "gates"
_TOGETHER: Final = 32
"""Rows of logits in memory at a time."""
_MOST_SLOTS: Final = 1024
"""Of a cache that several texts share."""
_MASKED: Final = np.float32(-1e9)


class _Texts(NamedTuple):
    """Texts that the target has read, one after the other in one cache; none sees another.

    Positions are slots, for rotary attention does not care where a text begins.
    """

    tokens: TokenArray
    """Of all, int64 [n]."""
    begins: Int64Array
    """Where the text of each token begins, int64 [n]."""
    judged: Int64Array
    """Places of the rows that are judged, int64 [r]."""
    cache: list[tuple[str, str, npt.NDArray[Any]]]
    """See `ContractSession.buffers`."""


class SkipJudge:
    """Judges choices of parts on texts.

    Args:
        bundle: of the target.
        architecture: its numbers.
        texts: token ids, int64 [n] each, at least 2; what does not fit the context is not read.
        starts: of each text, the first token that a draft would have to guess.
        most: most rows to judge, spread evenly.

    Raises:
        ExportError: the graph does not run.
        InputError: there is nothing to guess.
    """

    def __init__(
        self, bundle: Path, architecture: Architecture, texts: Sequence[TokenArray], starts: Sequence[int], most: int
    ) -> None:
        self.parts: Final = inner_parts(architecture.layers)
        """What may be left out."""
        model = onnx.load(bundle / GRAPH_NAME, load_external_data=False)
        self._session = ContractSession(bundle, architecture, 1, gated(model, self.parts))
        self._together = min(_TOGETHER, max(1, architecture.context // 4))
        room = min(architecture.context, _MOST_SLOTS) - self._together
        fitting = [text[:room] for text in texts]
        places = _spread(fitting, starts, most)
        if not sum(map(len, places)):
            raise InputError("the texts have no answer to judge a draft on", "give longer ones")
        lengths = [len(text) if some.size else 0 for text, some in zip(fitting, places, strict=True)]
        self._groups = [
            self._group([fitting[each] for each in group], [places[each] for each in group])
            for group in _grouped(lengths, room)
        ]
        self.preferred: Final = np.concatenate([self._read(group) for group in self._groups])
        """The target's likeliest next token behind each judged row, int64 [n]."""

    @property
    def rows(self) -> int:
        """How many are judged."""
        return self.preferred.size

    def agreement(self, skipped: Collection[SubLayer]) -> float:
        """Share of rows behind which target and draft prefer the same token."""
        found = np.concatenate([logits.argmax(axis=1) for logits in self.logits(skipped)])
        return float(np.mean(found == self.preferred))

    def logits(self, skipped: Collection[SubLayer]) -> Iterator[Float32Array]:
        """The draft's logits behind the judged rows, float32 [m, vocabulary], some rows at a time."""
        gates = np.array([part not in skipped for part in self.parts], np.float32)
        for group in self._groups:
            self._session.buffers = group.cache
            self._session.length = group.tokens.size
            slots = np.arange(group.tokens.size)
            for first in range(0, group.judged.size, self._together):
                places = group.judged[first : first + self._together]
                before = (slots >= group.begins[places, None]) & (slots < places[:, None])
                bias = _bias(np.concatenate([before, np.eye(places.size, dtype=np.bool_)], axis=1))
                rows = np.arange(places.size)
                yield self._session.run(group.tokens[places], places, bias, rows, {_GATES: gates})

    def _read(self, group: _Texts) -> Int64Array:
        """Let the whole target read some texts; returns what it prefers behind the judged rows."""
        every = np.ones(len(self.parts), np.float32)
        preferred = []
        self._session.buffers = group.cache
        for start in range(0, group.tokens.size, self._together):
            rows = np.arange(start, min(start + self._together, group.tokens.size))
            slots = np.arange(rows[-1] + 1)
            bias = _bias((slots >= group.begins[rows, None]) & (slots <= rows[:, None]))
            self._session.length = start
            wanted = group.judged[np.isin(group.judged, rows)] - start
            logits = self._session.run(group.tokens[rows], rows, bias, wanted, {_GATES: every})
            preferred.append(logits.argmax(axis=1))
        return np.concatenate(preferred)

    def _group(self, texts: Sequence[TokenArray], places: Sequence[Int64Array]) -> _Texts:
        """Texts in a cache of their own, not read yet."""
        begins = np.cumsum([0, *map(len, texts)])
        cache = [
            (past, present, np.zeros((*one.shape[:2], begins[-1] + self._together, one.shape[3]), one.dtype))
            for past, present, one in self._session.buffers
        ]
        return _Texts(
            tokens=np.concatenate(texts),
            begins=np.repeat(begins[:-1], [len(text) for text in texts]),
            judged=np.concatenate([begin + some for begin, some in zip(begins[:-1], places, strict=True)]),
            cache=cache,
        )


def gated(model: ModelProto, parts: Sequence[SubLayer]) -> ModelProto:
    """A graph of the contract with another input, `gates`, float32 [parts]: the factor of what each part gives."""
    made = ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    factors = {part.join: f"{_GATES}.{number}" for number, part in enumerate(parts)}
    nodes = [helper.make_node("Split", [_GATES], list(factors.values()), name=_GATES, num_outputs=len(parts))]
    for node in graph.node:
        if (factor := factors.get(join_of(node))) is not None:
            nodes.append(helper.make_node("Mul", [node.input[0], factor], [f"{factor}.times"], name=f"{factor}.times"))
            node.input[0] = f"{factor}.times"
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info(_GATES, TensorProto.FLOAT, [len(parts)]))
    return made


def _bias(seen: npt.NDArray[np.bool_]) -> Float32Array:
    """What is added to scores for who sees whom."""
    bias: Float32Array = np.where(seen, np.float32(0), _MASKED)
    return bias


def _grouped(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of texts in groups of at most `room` tokens together; those of no length are left out."""
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


def _spread(texts: Sequence[TokenArray], starts: Sequence[int], most: int) -> list[Int64Array]:
    """By text the places of at most `most` rows whose next token is to be guessed, spread evenly over all there are."""
    every = [
        (number, place)
        for number, (text, start) in enumerate(zip(texts, starts, strict=True))
        for place in range(max(start - 1, 1), len(text) - 1)
    ]
    chosen = np.unique(np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(np.int64))
    found = np.array(every, np.int64).reshape(-1, 2)[chosen]
    return [found[found[:, 0] == number, 1] for number in range(len(texts))]
