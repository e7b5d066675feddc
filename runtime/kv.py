"""The KV arena: one array for the keys and values of every layer, kept in place by the graph.

Rewinding moves an integer and accepting a branch of a token tree is one indexed copy, which is what makes drafts cheap
to be wrong about. NumPy only: the session wraps slices of `data` without copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from ..edge.errors import ContextError

_FIRST_CAPACITY: Final = 256


class KVArena:
    """Cache rows of one token sequence.

    `data` is float32 `[2, layers, kv_heads, capacity, head_dim]`, keys at index 0 (already rotated for their
    positions) and values at 1. Rows `0 .. length-1` are committed; what lies beyond is scratch for the next pass.
    `data` is replaced when the arena grows, and `generation` counts the replacements so that a holder of slices knows
    to take new ones.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, limit: int) -> None:
        if min(layers, kv_heads, head_dim, limit) < 1:
            raise ValueError(f"arena dimensions must be positive: {(layers, kv_heads, head_dim, limit)}")
        self.limit: Final = limit
        """Most rows the model's context allows."""
        self.length = 0
        """Committed rows."""
        self.plain = 0
        """Leading rows that are plain decoding's to the last bit: those before the first written with guesses."""
        self.generation = 0
        capacity = min(_FIRST_CAPACITY, limit)
        self.data: npt.NDArray[np.float32] = np.zeros((2, layers, kv_heads, capacity, head_dim), np.float32)

    @property
    def capacity(self) -> int:
        """Rows that fit before the next growth."""
        return int(self.data.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return int(self.data.nbytes)

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows after the committed ones, doubling up to the limit.

        Raises:
            ContextError: they do not fit the context.
        """
        needed = self.length + rows
        if needed <= self.capacity:
            return
        if needed > self.limit:
            raise ContextError(
                f"{needed} tokens do not fit the model's context of {self.limit}", "shorten the conversation"
            )
        capacity = self.capacity
        while capacity < needed:
            capacity *= 2
        capacity = min(capacity, self.limit)
        shape = (*self.data.shape[:3], capacity, self.data.shape[4])
        grown = np.zeros(shape, np.float32)
        grown[:, :, :, : self.length] = self.data[:, :, :, : self.length]
        self.data = grown
        self.generation += 1

    def commit(self, rows: int) -> None:
        """Count the `rows` rows that a pass over the text has just written after the committed ones."""
        if not 0 <= rows <= self.capacity - self.length:
            raise ValueError(f"cannot commit {rows} rows at {self.length} of {self.capacity}")
        if self.plain == self.length:
            self.plain += rows
        self.length += rows

    def rewind_to(self, length: int) -> None:
        """Forget the rows from `length` on; the next pass overwrites them."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind from {self.length} rows to {length}")
        self.length = length
        self.plain = min(self.plain, length)

    def compact(self, base: int, path: Sequence[int]) -> None:
        """Keep, of the tree rows written from slot `base` on, those of the accepted `path`, in consecutive slots.

        `path` holds ascending node indices, the anchor (0) first; afterwards `length == base + len(path)`.
        """
        if base != self.length or not path or path[0] != 0 or any(after <= node for node, after in pairwise(path)):
            raise ValueError(f"path {list(path)} at {base} does not start a branch at slot {self.length}")
        if base + path[-1] >= self.capacity:
            raise ValueError(f"path {list(path)} leaves the arena of {self.capacity} rows")
        if path[-1] >= len(path):
            nodes = np.asarray(path, np.intp)
            moved = np.flatnonzero(nodes != np.arange(nodes.size))
            # The right-hand side is gathered before anything is written, so overlapping slots are safe.
            self.data[:, :, :, base + moved] = self.data[:, :, :, base + nodes[moved]]
        self.length = base + len(path)

    def snapshot(self) -> npt.NDArray[np.float32]:
        """A copy of the committed rows, float32 `[2, layers, kv_heads, length, head_dim]`."""
        rows: npt.NDArray[np.float32] = self.data[:, :, :, : self.length].copy()
        return rows

    def restore(self, rows: npt.NDArray[np.float32]) -> None:
        """Take over the rows of a `snapshot`, replacing what was committed.

        Raises:
            ValueError: the rows are of another model's shape.
            ContextError: there are more than the context allows.
        """
        expected = (*self.data.shape[:3], "length", self.data.shape[4])
        if rows.ndim != 5 or rows.shape[:3] != expected[:3] or rows.shape[4] != expected[4] or rows.dtype != np.float32:
            raise ValueError(f"expected float32 rows {list(expected)}, found {rows.dtype} {list(rows.shape)}")
        self.length = 0
        self.reserve(rows.shape[3])
        self.data[:, :, :, : rows.shape[3]] = rows
        self.length = self.plain = int(rows.shape[3])
