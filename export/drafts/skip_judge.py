"""How often the target without some parts would guess its next token, for any parts and without a graph for each.

The graph gets a factor at every part that may be left out: 0 leaves the residual stream as it was, which is what
leaving the part out does. So one session judges any choice. It is judged as it is used: a guess is made behind rows of
the target, not of the draft. The texts are read once by the whole target, whose rows stay in the cache; then every row
that is judged runs in a slot behind them all, seeing the rows of its text before it, and itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, TensorProto, helper

from ...edge.errors import InputError
from ...models.bundle import GRAPH_NAME
from ...models.manifest import Architecture
from ..session import GraphSession
from ..workbench import TokenArray
from .skipped_layers import SubLayer, inner_parts, join_of

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

_GATES: Final = "gates"
_TOGETHER: Final = 32
"""Rows of logits in memory at a time."""
_MASKED: Final = np.float32(-1e9)


class _Rows(NamedTuple):
    """Rows to be judged."""

    text: Int64Array
    """Which text each belongs to, int64 [n]."""
    place: Int64Array
    """Its place there."""


class SkipJudge:
    """Judges choices of parts on texts.

    Args:
        bundle: of the target.
        architecture: its numbers.
        texts: token ids, int64 [n] each, at least 2; short ones are judged best where attention has a window, which is
            counted from the beginning of all texts.
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
        total = sum(map(len, texts))
        self._session = GraphSession(bundle, architecture, total + _TOGETHER, gated(model, self.parts))
        self._begins = np.cumsum([0, *map(len, texts)])
        self._tokens = np.concatenate(texts)
        self._every = np.ones(len(self.parts), np.float32)
        self._rows = _spread(texts, starts, most)
        self.preferred: Final = self._read()
        """The target's likeliest next token behind each judged row, int64 [n]."""

    @property
    def rows(self) -> int:
        """How many are judged."""
        return self._rows.text.size

    def agreement(self, skipped: Collection[SubLayer]) -> float:
        """Share of rows behind which target and draft prefer the same token."""
        same = 0
        at = 0
        for logits in self.logits(skipped):
            same += int(np.sum(logits.argmax(axis=1) == self.preferred[at : at + len(logits)]))
            at += len(logits)
        return same / self.rows

    def logits(self, skipped: Collection[SubLayer]) -> Iterator[Float32Array]:
        """The draft's logits behind the judged rows, float32 [m, vocabulary], some rows at a time."""
        gates = np.array([part not in skipped for part in self.parts], np.float32)
        for first in range(0, self.rows, _TOGETHER):
            some = slice(first, first + _TOGETHER)
            text, place = self._rows.text[some], self._rows.place[some]
            begins, count = self._begins[text], text.size
            slots = np.arange(self._tokens.size)
            seen = (slots >= begins[:, None]) & (slots < (begins + place)[:, None])
            seen = np.concatenate([seen, np.eye(count, dtype=np.bool_)], axis=1)
            bias = np.where(seen, np.float32(0), _MASKED)
            self._session.length = self._tokens.size
            yield self._session.run(self._tokens[begins + place], place, bias, np.arange(count), {_GATES: gates})

    def _read(self) -> Int64Array:
        """Let the whole target read all texts, each on its own; returns what it prefers behind the judged rows."""
        preferred = np.empty(self.rows, np.int64)
        for number, (begin, end) in enumerate(zip(self._begins, self._begins[1:], strict=False)):
            for start in range(begin, end, _TOGETHER):
                stop = min(start + _TOGETHER, end)
                slots, rows = np.arange(stop), np.arange(start, stop)
                bias = np.where((slots >= begin) & (slots <= rows[:, None]), np.float32(0), _MASKED)
                mine = (self._rows.text == number) & np.isin(self._rows.place + begin, rows)
                wanted = self._rows.place[mine] + begin - start
                self._session.length = start
                logits = self._session.run(self._tokens[start:stop], rows - begin, bias, wanted, {_GATES: self._every})
                preferred[mine] = logits.argmax(axis=1)
        return preferred


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


def _spread(texts: Sequence[TokenArray], starts: Sequence[int], most: int) -> _Rows:
    """At most `most` rows whose next token is to be guessed, spread evenly over all there are."""
    every = [
        (number, place)
        for number, (text, start) in enumerate(zip(texts, starts, strict=True))
        for place in range(max(start - 1, 1), len(text) - 1)
    ]
    if not every:
        raise InputError("the texts have no answer to judge a draft on", "give longer ones")
    chosen = np.unique(np.linspace(0, len(every) - 1, min(most, len(every))).round().astype(np.int64))
    found = np.array(every, np.int64)[chosen]
    return _Rows(found[:, 0], found[:, 1])
