"""Finds rotary position embedding in plain operators, and its cosines and sines.

The search follows queries (or keys) from the attention scores back to values that everything token-dependent passes
through. What is between such a value and the rotated heads is a subgraph with heads and positions as inputs and heads
as output, and its meaning is found by running it on made-up values (`subgraph_runner`). A rotation turns pairs of
channels (x, y) into

    (x * cos - y * sin, y * cos + x * sin)

where cos and sin depend on the position and the pair only. Heads of x = 1, y = 0 therefore become the table itself,
with all frequency scaling and attention factors. Random heads must be rotated as the table says, at other lengths too:
otherwise the rotation depends on more than the position. Pairs are channels i and i + n/2 of the first n (GPT-NeoX,
LLaMA) or 2i and 2i + 1 (GPT-J); channels from n on are not rotated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import ExportError
from .attention_pattern import Attention
from .decoder_io import PassShape
from .subgraph_runner import SubgraphRunner

Float32Array = npt.NDArray[np.float32]

_CHUNK: Final = 1024
"""Number of positions whose cosines and sines are computed in one run."""
_MAX_CANDIDATES: Final = 4
"""Number of values before the rotated heads that are tried as the unrotated heads."""
_TOLERANCE: Final = 1e-4


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """Cosines and sines by position."""

    cosines: Float32Array
    """[context, pairs]"""
    sines: Float32Array
    """[context, pairs]"""
    interleaved: bool
    """Whether pairs are channels 2i and 2i + 1."""

    @property
    def pairs(self) -> int:
        """Number of pairs of channels that are rotated."""
        return int(self.cosines.shape[1])

    def rotate(self, heads: Float32Array, positions: Sequence[int]) -> Float32Array:
        """Rotate heads [heads, new, head_dim] of tokens at these positions."""
        rotated: Float32Array = heads.copy()
        first, second = _split_pairs(heads, self.pairs, self.interleaved)
        cosines, sines = self.cosines[list(positions)], self.sines[list(positions)]
        rotated_first, rotated_second = _split_pairs(rotated, self.pairs, self.interleaved)
        rotated_first[:] = first * cosines - second * sines
        rotated_second[:] = second * cosines + first * sines
        return rotated


def _split_pairs(heads: Float32Array, pairs: int, interleaved: bool) -> tuple[Float32Array, Float32Array]:
    """Views of the first and second channels of the rotated pairs, [..., pairs] each."""
    if interleaved:
        return heads[..., 0 : 2 * pairs : 2], heads[..., 1 : 2 * pairs : 2]
    return heads[..., :pairs], heads[..., pairs : 2 * pairs]


Rotation = tuple[str, str, RotaryTable]
"""The rotary embedding of one layer: the unrotated queries, [1, heads, new, head_dim] or [1, new, heads, head_dim], the
unrotated keys, likewise, and the table."""


def find_rotation(
    runner: SubgraphRunner, attention: Attention, context: int, known: Iterable[RotaryTable]
) -> Rotation | None:
    """Find how a layer rotates its queries and keys.

    Args:
        runner: runs the graph.
        attention: the layer's attention.
        context: number of positions of the table.
        known: tables of earlier layers; one that fits is reused.

    Returns:
        The rotation; None if there is none, or it is not recognized.
    """
    for source in _candidates(runner, attention.key.new):
        key = _Path(runner, source, attention.key.new, attention.kv_heads, attention.head_dim)
        for table in chain(known, (key.table(context, interleaved) for interleaved in (False, True))):
            if table is None or not key.fits(table):
                continue
            for name in _candidates(runner, attention.query):
                if _Path(runner, name, attention.query, attention.heads, attention.head_dim).fits(table):
                    return name, source, table
            return None
    return None


def _candidates(runner: SubgraphRunner, name: str) -> Iterator[str]:
    """Values from which everything token-dependent in `name` is computed, nearest first."""
    frontier = {name}
    for _ in range(_MAX_CANDIDATES):
        while True:
            computed = {node: each for each in frontier if (node := runner.graph.producer(each)) is not None}
            if not computed:
                return
            latest = max(computed, key=runner.order.__getitem__)
            frontier.remove(computed[latest])
            frontier.update(runner.inputs(latest))
            if len(frontier) == 1:
                break
        yield next(iter(frontier))


class _Path(NamedTuple):
    """What is computed between heads that may be unrotated and the rotated heads."""

    runner: SubgraphRunner
    source: str
    """[1, heads, new, head_dim] or [1, new, heads, head_dim]."""
    rotated: str
    """[1, heads, new, head_dim]."""
    heads: int
    head_dim: int

    def run(self, heads: Float32Array, past: int) -> Float32Array | None:
        """What becomes of unrotated heads [heads, new, head_dim] after `past` tokens; None if that cannot be run."""
        new, shape = heads.shape[1], self.runner.shape(self.source)
        tokens_first = shape == (1, "new", self.heads, self.head_dim)
        if not tokens_first and shape != (1, self.heads, "new", self.head_dim):
            return None
        given = (heads.swapaxes(0, 1) if tokens_first else heads)[None]
        try:
            out = self.runner.run([self.rotated], PassShape(new, past), {self.source: given})[self.rotated]
        except ExportError:
            return None
        return out[0] if out.shape == (1, *heads.shape) else None

    def table(self, context: int, interleaved: bool) -> RotaryTable | None:
        """The result for first channels of 1 and second channels of 0."""
        heads = np.random.default_rng(0).uniform(1, 2, (self.heads, 2, self.head_dim)).astype(np.float32)
        # So late that the slowest pair has turned by more than rounding; channels after the last turned one stay.
        out = self.run(heads, context - 2)
        changed = np.flatnonzero(False if out is None else (out != heads).any(axis=(0, 1)))
        if not changed.size:
            return None
        halves: list[tuple[Float32Array, Float32Array]] = []
        pairs = (int(changed[-1]) + 2) // 2
        for start in range(0, context, _CHUNK):
            heads = np.zeros((self.heads, min(_CHUNK, context - start), self.head_dim), np.float32)
            _split_pairs(heads, pairs, interleaved)[0][:] = 1
            out = self.run(heads, start)
            if out is None:
                return None
            halves.append(_split_pairs(out[0].copy(), pairs, interleaved))
            if start == 0 and not self.fits(RotaryTable(*halves[0], interleaved)):
                return None
        cosines, sines = (np.concatenate(each) for each in zip(*halves, strict=True))
        return RotaryTable(cosines, sines, interleaved)

    def fits(self, table: RotaryTable) -> bool:
        """Whether random heads are rotated as the table says, at its start, its end and in between."""
        context = len(table.cosines)
        random = np.random.default_rng(1)
        starts = {int(each) for each in np.geomspace(1, context, 12)}
        for new, past in [(min(17, context), 0), *((1, start - 1) for start in sorted(starts))]:
            heads = random.standard_normal((self.heads, new, self.head_dim)).astype(np.float32)
            out = self.run(heads, past)
            expected = table.rotate(heads, range(past, past + new))
            if out is None or not np.allclose(out, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
                return False
        return True
