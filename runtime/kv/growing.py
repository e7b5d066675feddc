"""An arena for graphs that give their cache back longer than they took it: `present` is `past` and the new rows.

Every tensor has two buffers that change places with every pass: the graph reads the past from one and writes the
present into the other. A tensor has no free slots, so forgetting rows lays the remaining ones out anew before the next
pass, which costs about what the graph's own copy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from .arena import Array, KVArena, Rows, TensorForm

_FIRST_CAPACITY: Final = 64


class GrowingArena(KVArena):
    """See the module. `past` and `present` are the arrays of the next pass."""

    def __init__(self, forms: Sequence[TensorForm], limit: int) -> None:
        super().__init__(forms, limit)
        self._capacity = min(_FIRST_CAPACITY, limit)
        self._rows = 0
        """Of the tensors as they lie in their buffers."""
        self._past, self._spare = self._buffers(), self._buffers()

    @property
    def capacity(self) -> int:
        """See `KVArena.capacity`."""
        return self._capacity

    @property
    def written(self) -> int:
        """See `KVArena.written`."""
        return self._rows

    @property
    def nbytes(self) -> int:
        """See `KVArena.nbytes`."""
        return sum(buffer.nbytes for buffer in (*self._past, *self._spare))

    def reserve(self, rows: int) -> None:
        """See `KVArena.reserve`. The capacity doubles up to the limit."""
        needed = self.check_fits(rows)
        if needed <= self._capacity:
            return
        while self._capacity < needed:
            self._capacity *= 2
        self._capacity = min(self._capacity, self.limit)
        self._rows = min(self._rows, self._capacity)
        kept = [_view(buffer, form, self._rows) for buffer, form in zip(self._past, self.forms, strict=True)]
        self._past = self._buffers()
        for old, buffer, form in zip(kept, self._past, self.forms, strict=True):
            _view(buffer, form, self._rows)[...] = old
        self._spare = self._buffers()

    def past(self) -> list[Array]:
        """The committed rows as the graph's inputs."""
        if self._rows != self.length:
            self._lay_out(self.length)
        return [_view(buffer, form, self.length) for buffer, form in zip(self._past, self.forms, strict=True)]

    def present(self, rows: int) -> list[Array]:
        """Where the graph writes the committed rows and `rows` new ones; `wrote` makes them the arena's."""
        total = self.length + rows
        return [_view(buffer, form, total) for buffer, form in zip(self._spare, self.forms, strict=True)]

    def wrote(self, rows: int) -> None:
        """The graph has written `present(rows)`."""
        self._past, self._spare = self._spare, self._past
        self._rows = self.length + rows

    def _buffers(self) -> list[Array]:
        return [np.zeros(int(np.prod(form.sized(self._capacity))), form.dtype) for form in self.forms]

    def _lay_out(self, rows: int) -> None:
        """Make the tensors `rows` rows long; rows there were not are undefined."""
        kept = min(rows, self._rows)
        for old, new, form in zip(self._past, self._spare, self.forms, strict=True):
            index = form.rows(slice(kept))[1:]
            _view(new, form, rows)[index] = _view(old, form, self._rows)[index]
        self._past, self._spare = self._spare, self._past
        self._rows = rows

    def _move(self, sources: npt.NDArray[np.intp], targets: npt.NDArray[np.intp]) -> None:
        for buffer, form in zip(self._past, self.forms, strict=True):
            tensor = _view(buffer, form, self._rows)
            tensor[form.rows(targets)[1:]] = tensor[form.rows(sources)[1:]]

    def _fill(self, start: int, stop: int, value: float) -> None:
        self._lay_out(stop)
        for buffer, form in zip(self._past, self.forms, strict=True):
            _view(buffer, form, stop)[form.rows(slice(start, stop))[1:]] = value

    def _copied(self, rows: int) -> Rows:
        tensors = [_view(buffer, form, self._rows) for buffer, form in zip(self._past, self.forms, strict=True)]
        return tuple(
            np.stack([tensors[member][form.rows(slice(rows))[1:]] for member in members])
            for form, members in self.groups.items()
        )

    def _take(self, rows: Rows, count: int) -> None:
        self._lay_out(count)
        for stack, (form, members) in zip(rows, self.groups.items(), strict=True):
            for member, tensor in zip(members, stack, strict=True):
                _view(self._past[member], form, count)[...] = tensor


def _view(buffer: Array, form: TensorForm, rows: int) -> Array:
    """The beginning of a flat buffer as a tensor of that many rows."""
    shape = form.sized(rows)
    return buffer[: int(np.prod(shape))].reshape(shape)
