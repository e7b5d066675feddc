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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

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
        first, second = self._split(heads)
        cosines, sines = self.cosines[list(positions)], self.sines[list(positions)]
        rotated_first, rotated_second = self._split(rotated)
        rotated_first[:] = first * cosines - second * sines
        rotated_second[:] = second * cosines + first * sines
        return rotated

    def _split(self, heads: Float32Array) -> tuple[Float32Array, Float32Array]:
        return _split_pairs(heads, self.pairs, self.interleaved)


def _split_pairs(heads: Float32Array, pairs: int, interleaved: bool) -> tuple[Float32Array, Float32Array]:
    """Views of the first and second channels of the rotated pairs, [..., pairs] each."""
    if interleaved:
        return heads[..., 0 : 2 * pairs : 2], heads[..., 1 : 2 * pairs : 2]
    return heads[..., :pairs], heads[..., pairs : 2 * pairs]


@dataclass(frozen=True)
class Rotation:
    """The rotary embedding of one layer."""

    query: str
    """Unrotated queries, [1, heads, new, head_dim] or [1, new, heads, head_dim]."""
    key: str
    """Unrotated keys, likewise."""
    table: RotaryTable


def find_rotation(
    runner: SubgraphRunner, attention: Attention, context: int, known: Sequence[RotaryTable]
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
    found = _find(runner, attention, context, known)
    if found is None:
        return None
    key, table = found
    for query in _candidates(runner, attention.query):
        if _fits(runner, query, attention.query, (attention.heads, attention.head_dim), table):
            return Rotation(query, key, table)
    return None


def _find(
    runner: SubgraphRunner, attention: Attention, context: int, known: Sequence[RotaryTable]
) -> tuple[str, RotaryTable] | None:
    """The keys before the rotation, and its table."""
    rotated, size = attention.key.new, (attention.kv_heads, attention.head_dim)
    for name in _candidates(runner, rotated):
        for table in known:
            if _fits(runner, name, rotated, size, table):
                return name, table
        for interleaved in (False, True):
            found = _table(runner, name, rotated, size, context, interleaved)
            if found is not None and _fits(runner, name, rotated, size, found):
                return name, found
    return None


def _candidates(runner: SubgraphRunner, name: str) -> Iterator[str]:
    """Values from which everything token-dependent in `name` is computed, nearest first."""
    order = runner.order
    frontier = {name}
    for _ in range(_MAX_CANDIDATES):
        while True:
            computed = [(order[node], each) for each in frontier if (node := runner.graph.producer(each)) is not None]
            if not computed:
                return
            latest = max(computed)[1]
            node = runner.graph.producer(latest)
            inputs = () if node is None else node.inputs
            frontier.remove(latest)
            frontier.update(each for each in inputs if each in runner.token_dependent)
            if len(frontier) == 1:
                break
        yield next(iter(frontier))


def _run(runner: SubgraphRunner, name: str, rotated: str, heads: Float32Array, past: int) -> Float32Array | None:
    """What becomes of unrotated heads [heads, new, head_dim] after `past` tokens; None if that cannot be run.

    The value `name` that they replace is [1, heads, new, head_dim] or [1, new, heads, head_dim].
    """
    count, new, width = heads.shape
    tokens_first = runner.shape(name) == (1, "new", count, width)
    given = (heads.swapaxes(0, 1) if tokens_first else heads)[None]
    if not tokens_first and runner.shape(name) != (1, count, "new", width):
        return None
    try:
        out = runner.run([rotated], PassShape(new, past), {name: given})[rotated]
    except ExportError:
        return None
    return out[0] if out.shape == (1, *heads.shape) else None


def _table(
    runner: SubgraphRunner, name: str, rotated: str, size: tuple[int, int], context: int, interleaved: bool
) -> RotaryTable | None:
    """The result for first channels of 1 and second channels of 0; `rotated` is [1, heads, new, head_dim]."""
    cosines: list[Float32Array] = []
    sines: list[Float32Array] = []
    pairs = _pairs(runner, name, rotated, size, context)
    if not pairs:
        return None
    for start in range(0, context, _CHUNK):
        heads = np.zeros((size[0], min(_CHUNK, context - start), size[1]), np.float32)
        _split_pairs(heads, pairs, interleaved)[0][:] = 1
        out = _run(runner, name, rotated, heads, start)
        if out is None:
            return None
        first, second = _split_pairs(out[0], pairs, interleaved)
        cosines.append(first.copy())
        sines.append(second.copy())
        if start == 0 and not _fits(runner, name, rotated, size, RotaryTable(cosines[0], sines[0], interleaved)):
            return None
    return RotaryTable(np.concatenate(cosines), np.concatenate(sines), interleaved)


def _pairs(runner: SubgraphRunner, name: str, rotated: str, size: tuple[int, int], context: int) -> int:
    """Number of pairs of channels that are rotated: channels after the last one that changes are not."""
    heads = np.random.default_rng(0).uniform(1, 2, (size[0], 2, size[1])).astype(np.float32)
    # So late that the slowest pair has turned by more than rounding.
    out = _run(runner, name, rotated, heads, context - 2)
    changed = np.flatnonzero(False if out is None else (out != heads).any(axis=(0, 1)))
    return 0 if not changed.size else (int(changed[-1]) + 2) // 2


def _fits(runner: SubgraphRunner, name: str, rotated: str, size: tuple[int, int], table: RotaryTable) -> bool:
    """Whether random heads are rotated as the table says, at its start, its end and in between, one token or many."""
    context = len(table.cosines)
    random = np.random.default_rng(1)
    starts = {int(each) for each in np.geomspace(1, context, 12)}
    for new, past in [(min(17, context), 0), *((1, start - 1) for start in sorted(starts))]:
        heads = random.standard_normal((size[0], new, size[1])).astype(np.float32)
        out = _run(runner, name, rotated, heads, past)
        expected = table.rotate(heads, range(past, past + new))
        if out is None or not np.allclose(out, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return False
    return True
