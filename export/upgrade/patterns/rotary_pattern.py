"""Rotary position embedding in plain operators: where the unrotated heads are, and the cosines and sines.

From queries (or keys) as they meet in the scores one walks towards the tokens, to the values through which everything
must pass. What lies between such a value and the rotated heads is a piece with heads and positions going in and heads
coming out, and its meaning is found by experiment (`probe`). A rotation turns pairs of channels (x, y) into

    (x * cos - y * sin, y * cos + x * sin)

where cos and sin depend on the position and the pair only. Heads of x = 1, y = 0 therefore come out as the table
itself, with every frequency scaling and attention factor that is in it. Random heads must come out as that table says,
at other lengths too: a table that depends on more than the position is none. Pairs are channels i and i + n/2 of the
first n (GPT-NeoX, LLaMA) or 2i and 2i + 1 (GPT-J); channels from n on are not rotated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ....errors import ExportError
from .attention_pattern import Attention
from .subgraph_probe import Extent, Moment, Probe

Float32Array = npt.NDArray[np.float32]

_CHUNK: Final = 1024
"""Positions whose cosines and sines are found in one run."""
_TRIES: Final = 4
"""How many values back from the rotated heads are tried."""
_TOLERANCE: Final = 1e-4


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """A rotation by position."""

    cosines: Float32Array
    """[context, pairs]"""
    sines: Float32Array
    """[context, pairs]"""
    interleaved: bool
    """Whether a pair is channels 2i and 2i + 1."""

    @property
    def pairs(self) -> int:
        """Pairs of channels that are rotated."""
        return int(self.cosines.shape[1])

    def rotate(self, heads: Float32Array, positions: Sequence[int]) -> Float32Array:
        """Rotate heads [heads, rows, head_dim], whose rows have these positions."""
        rotated: Float32Array = heads.copy()
        first, second = self._split(heads)
        cosines, sines = self.cosines[list(positions)], self.sines[list(positions)]
        to_first, to_second = self._split(rotated)
        to_first[:] = first * cosines - second * sines
        to_second[:] = second * cosines + first * sines
        return rotated

    def _split(self, heads: Float32Array) -> tuple[Float32Array, Float32Array]:
        return pairs_of(heads, self.pairs, self.interleaved)


def pairs_of(heads: Float32Array, pairs: int, interleaved: bool) -> tuple[Float32Array, Float32Array]:
    """Views of the first and second channels of the rotated pairs, [..., pairs] each."""
    if interleaved:
        return heads[..., 0 : 2 * pairs : 2], heads[..., 1 : 2 * pairs : 2]
    return heads[..., :pairs], heads[..., pairs : 2 * pairs]


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer."""

    query: str
    """Queries before it, [1, heads, rows, head_dim] or [1, rows, heads, head_dim]."""
    key: str
    """Keys before it, likewise."""
    table: RotaryTable


def find_rotation(probe: Probe, attention: Attention, context: int, known: Sequence[RotaryTable]) -> Rotation | None:
    """How a layer rotates its queries and keys; None if it does not, or not in a way that is recognised.

    Args:
        probe: over the graph.
        attention: the layer's.
        context: positions that the table is made for.
        known: tables of earlier layers; one that fits is used again.
    """
    found = _find(probe, attention.key.new, attention.kv_heads, attention.head_dim, context, known)
    if found is None:
        return None
    key, table = found
    for query in _passed_through(probe, attention.query):
        heads = _Heads.of(probe, query, attention.heads, attention.head_dim)
        if heads is not None and _fits(probe, query, attention.query, heads, table):
            return Rotation(query, key, table)
    return None


def _find(
    probe: Probe, rotated: str, count: int, width: int, context: int, known: Sequence[RotaryTable]
) -> tuple[str, RotaryTable] | None:
    """The value before the rotation, and its table."""
    for name in _passed_through(probe, rotated):
        heads = _Heads.of(probe, name, count, width)
        if heads is None:
            continue
        for table in known:
            if _fits(probe, name, rotated, heads, table):
                return name, table
        for interleaved in (False, True):
            table_found = _table(probe, name, rotated, heads, context, interleaved)
            if table_found is not None and _fits(probe, name, rotated, heads, table_found):
                return name, table_found
    return None


def _passed_through(probe: Probe, name: str) -> Iterator[str]:
    """Values that everything token-dependent in `name` comes from, nearest first."""
    order = probe.order
    frontier = {name}
    for _ in range(_TRIES):
        while True:
            made = [(order[node], each) for each in frontier if (node := probe.graph.producer(each)) is not None]
            if not made:
                return
            latest = max(made)[1]
            node = probe.graph.producer(latest)
            inputs = () if node is None else node.inputs
            frontier.remove(latest)
            frontier.update(each for each in inputs if each in probe.tokens_of)
            if len(frontier) == 1:
                break
        yield next(iter(frontier))


@dataclass(frozen=True)
class _Heads:
    """How the heads of one value are laid out."""

    count: int
    width: int
    rows_first: bool

    @classmethod
    def of(cls, probe: Probe, name: str, count: int, width: int) -> _Heads | None:
        layouts: dict[tuple[Extent, ...], bool] = {
            (1, "rows", count, width): True,
            (1, count, "rows", width): False,
        }
        rows_first = layouts.get(probe.extents(name) or ())
        return None if rows_first is None else cls(count, width, rows_first)

    def laid_out(self, heads: Float32Array) -> Float32Array:
        """Heads [heads, rows, head_dim] as the value has them."""
        return (heads.swapaxes(0, 1) if self.rows_first else heads)[None]


def _table(probe: Probe, name: str, rotated: str, heads: _Heads, context: int, interleaved: bool) -> RotaryTable | None:
    """What comes out for first channels of 1 and second channels of 0; `rotated` is [1, heads, rows, head_dim]."""
    cosines: list[Float32Array] = []
    sines: list[Float32Array] = []
    pairs = _pairs(probe, name, rotated, heads, context)
    if not pairs:
        return None
    for start in range(0, context, _CHUNK):
        rows = min(_CHUNK, context - start)
        linear = np.zeros((heads.count, rows, heads.width), np.float32)
        pairs_of(linear, pairs, interleaved)[0][:] = 1
        try:
            out = probe.run([rotated], Moment(rows, start), {name: heads.laid_out(linear)})[rotated][0, 0]
        except ExportError:
            return None
        first, second = pairs_of(out, pairs, interleaved)
        cosines.append(first.copy())
        sines.append(second.copy())
        if start == 0 and not _fits(probe, name, rotated, heads, RotaryTable(cosines[0], sines[0], interleaved)):
            return None
    return RotaryTable(np.concatenate(cosines), np.concatenate(sines), interleaved)


def _pairs(probe: Probe, name: str, rotated: str, heads: _Heads, context: int) -> int:
    """How many pairs of channels are rotated: those past the last that changes are passed on."""
    moment = Moment(2, context - 2)  # far on, where the slowest pair has turned by more than a rounding
    given = np.random.default_rng(0).uniform(1, 2, (heads.count, moment.rows, heads.width)).astype(np.float32)
    try:
        out = probe.run([rotated], moment, {name: heads.laid_out(given)})[rotated]
    except ExportError:
        return 0
    if out.shape != (1, *given.shape):
        return 0
    changed = np.flatnonzero((out[0] != given).any(axis=(0, 1)))
    return 0 if not len(changed) else (int(changed[-1]) + 2) // 2


def _fits(probe: Probe, name: str, rotated: str, heads: _Heads, table: RotaryTable) -> bool:
    """Whether random heads are rotated as the table says, at its start, its end and in between, one row or many."""
    context = len(table.cosines)
    random = np.random.default_rng(1)
    starts = {int(each) for each in np.geomspace(1, context, 12)}
    moments = [Moment(min(17, context), 0), *(Moment(1, start - 1) for start in sorted(starts))]
    for moment in moments:
        given = random.standard_normal((heads.count, moment.rows, heads.width)).astype(np.float32)
        try:
            out = probe.run([rotated], moment, {name: heads.laid_out(given)})[rotated]
        except ExportError:
            return False
        expected = table.rotate(given, range(moment.past, moment.total))
        if out.shape != (1, *given.shape) or not np.allclose(out[0], expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return False
    return True
