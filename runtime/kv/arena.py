"""The KV arena: the cache rows of one token sequence, whatever tensors a graph keeps them in.

Rewinding moves an integer and accepting a branch of a token tree is one indexed copy, which is what makes drafts cheap
to be wrong about. NumPy only: the session wraps the arrays without copying.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import ContextError

Array: TypeAlias = npt.NDArray[Any]
Rows: TypeAlias = tuple[Array, ...]
"""Cache rows put aside: of every form of tensor one array `[tensors, ...]`, with its rows along the form's axis + 1."""

_FIRST_CAPACITY: Final = 256


@dataclass(frozen=True)
class TensorForm:
    """Type and shape of a cache tensor, of which dimension `axis` counts rows; what `shape` has there means nothing."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    axis: int

    def sized(self, rows: int) -> tuple[int, ...]:
        """The shape of a tensor of that many rows."""
        return (*self.shape[: self.axis], rows, *self.shape[self.axis + 1 :])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.sized(1))) * self.dtype.itemsize

    def rows(self, which: slice | npt.NDArray[np.intp]) -> tuple[slice | npt.NDArray[np.intp], ...]:
        """An index of the rows `which` in a stack of such tensors."""
        return (*[slice(None)] * (self.axis + 1), which)


def groups_of(forms: Sequence[TensorForm]) -> dict[TensorForm, list[int]]:
    """Positions in `forms` by form, in order of appearance: tensors of one form are stacked in one array."""
    groups: dict[TensorForm, list[int]] = {}
    for position, form in enumerate(forms):
        groups.setdefault(form, []).append(position)
    return groups


class KVArena(ABC):
    """Cache rows of one token sequence.

    Rows `0 .. length-1` are committed; what lies beyond was written by the last pass and is overwritten by the next.
    Keys are rotated for their positions already.

    Args:
        forms: of the graph's cache tensors.
        limit: most rows the model's context allows.
    """

    def __init__(self, forms: Sequence[TensorForm], limit: int) -> None:
        if not forms or limit < 1 or any(min(form.sized(1)) < 1 for form in forms):
            raise ValueError(f"arena dimensions must be positive: {forms}, {limit}")
        self.limit: Final = limit
        """Most rows the model's context allows."""
        self.forms: Final = tuple(forms)
        self.groups: Final = groups_of(forms)
        self.length = 0
        """Committed rows."""
        self.plain = 0
        """Leading rows that are plain decoding's to the last bit: those before the first written with guesses."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Rows that fit before the next growth."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held now."""

    @abstractmethod
    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows after the committed ones.

        Raises:
            ContextError: they do not fit the context.
        """

    @property
    @abstractmethod
    def written(self) -> int:
        """Rows that may be committed: those before hold what passes wrote, as far as they wrote."""

    def commit(self, rows: int) -> None:
        """Count the `rows` rows that a pass over the text has just written after the committed ones."""
        if not 0 <= rows <= self.written - self.length:
            raise ValueError(f"cannot commit {rows} rows at {self.length} of {self.written}")
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
        if base + path[-1] >= self.written:
            raise ValueError(f"path {list(path)} leaves the arena of {self.written} rows")
        if path[-1] >= len(path):
            nodes = np.asarray(path, np.intp)
            moved = np.flatnonzero(nodes != np.arange(nodes.size))
            self._move(base + nodes[moved], base + moved)
        self.length = base + len(path)

    def pad_to(self, length: int, value: float) -> None:
        """Commit rows of arbitrary content up to `length`, for measuring.

        Raises:
            ContextError: they do not fit the context.
        """
        self.reserve(length - self.length)
        self._fill(self.length, length, value)
        self.length = length

    def snapshot(self) -> Rows:
        """A copy of the committed rows."""
        return self._copied(self.length)

    def restore(self, rows: Rows) -> None:
        """Take over the rows of a `snapshot`, replacing what was committed.

        Raises:
            ValueError: the rows are of another model's shape.
            ContextError: there are more than the context allows.
        """
        if len(rows) != len(self.groups):
            raise ValueError(f"expected rows of {len(self.groups)} kinds of tensors, found {len(rows)}")
        axis = next(iter(self.groups)).axis + 1
        count = rows[0].shape[axis] if rows[0].ndim > axis else 0
        for array, (form, members) in zip(rows, self.groups.items(), strict=True):
            expected = (len(members), *form.sized(count))
            if array.shape != expected or array.dtype != form.dtype:
                raise ValueError(
                    f"expected {form.dtype} rows {list(expected)}, found {array.dtype} {list(array.shape)}"
                )
        self.length = 0
        self.reserve(count)
        self._take(rows, count)
        self.length = self.plain = count

    def check_fits(self, rows: int) -> int:
        """The rows there would be with `rows` more.

        Raises:
            ContextError: they do not fit the context.
        """
        needed = self.length + rows
        if needed > self.limit:
            raise ContextError(
                f"{needed} tokens do not fit the model's context of {self.limit}", "shorten the conversation"
            )
        return needed

    @abstractmethod
    def _move(self, sources: npt.NDArray[np.intp], targets: npt.NDArray[np.intp]) -> None:
        """Copy rows of all tensors to other slots, as if all were read before any is written."""

    @abstractmethod
    def _fill(self, start: int, stop: int, value: float) -> None:
        """Write rows of one value; there is room for them."""

    @abstractmethod
    def _copied(self, rows: int) -> Rows:
        """Copies of the first rows."""

    @abstractmethod
    def _take(self, rows: Rows, count: int) -> None:
        """Write the first `count` rows; there is room for them."""


class InPlaceArena(KVArena):
    """An arena whose tensors the graph extends in place: past and present are one buffer of `capacity` rows.

    `data` holds an array `[tensors, *shape]` for every form of tensor. The arrays are replaced when the arena grows,
    and `generation` counts the replacements so that a holder of slices knows to take new ones. With a fixed `capacity`,
    the graph's own, they are of that size from the start.
    """

    def __init__(self, forms: Sequence[TensorForm], limit: int, capacity: int | None = None) -> None:
        super().__init__(forms, limit if capacity is None else min(limit, capacity))
        self.generation = 0
        self._capacity = min(_FIRST_CAPACITY, limit) if capacity is None else capacity
        self.data: Rows = self._empty()

    @property
    def capacity(self) -> int:
        """See `KVArena.capacity`."""
        return self._capacity

    @property
    def written(self) -> int:
        """See `KVArena.written`."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """See `KVArena.nbytes`."""
        return sum(array.nbytes for array in self.data)

    def tensors(self) -> list[Array]:
        """The buffer of every cache tensor, in the order of the forms."""
        buffers: dict[int, Array] = {}
        for array, members in zip(self.data, self.groups.values(), strict=True):
            buffers.update(zip(members, array, strict=True))
        return [buffers[position] for position in range(len(buffers))]

    def reserve(self, rows: int) -> None:
        """See `KVArena.reserve`. The capacity doubles up to the limit."""
        needed = self.length + rows
        if needed <= self._capacity and needed <= self.limit:
            return
        self.check_fits(rows)
        while self._capacity < needed:
            self._capacity *= 2
        self._capacity = min(self._capacity, self.limit)
        grown = self._empty()
        for new, old, form in zip(grown, self.data, self.groups, strict=True):
            # Rows beyond the committed ones may be a borrower's.
            had = form.rows(slice(old.shape[form.axis + 1]))
            new[had] = old
        self.data = grown
        self.generation += 1

    def _empty(self) -> Rows:
        return tuple(
            np.zeros((len(members), *form.sized(self._capacity)), form.dtype) for form, members in self.groups.items()
        )

    def _move(self, sources: npt.NDArray[np.intp], targets: npt.NDArray[np.intp]) -> None:
        for array, form in zip(self.data, self.groups, strict=True):
            # The right-hand side is gathered before anything is written, so overlapping slots are safe.
            array[form.rows(targets)] = array[form.rows(sources)]

    def _fill(self, start: int, stop: int, value: float) -> None:
        for array, form in zip(self.data, self.groups, strict=True):
            array[form.rows(slice(start, stop))] = value

    def _copied(self, rows: int) -> Rows:
        return tuple(array[form.rows(slice(rows))].copy() for array, form in zip(self.data, self.groups, strict=True))

    def _take(self, rows: Rows, count: int) -> None:
        for array, form, new in zip(self.data, self.groups, rows, strict=True):
            array[form.rows(slice(count))] = new
