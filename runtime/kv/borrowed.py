"""Rows of another arena: the cache of a draft that is the target without some of its parts.

The tensors are the owner's, of which the borrower knows some. It reads the owner's committed rows and writes behind
them, where the owner's next pass writes anew; its own length says how far it has got. So a text that the target has
read needs no reading by the draft, and nothing that the draft writes lasts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .arena import Array, InPlaceArena, KVArena, Rows, TensorForm


class BorrowedArena(KVArena):
    """Some tensors of the arena that `borrow` named last, with a length of its own.

    Args:
        forms: of the borrower's cache tensors.
        places: of these, in order, which of the owner's they are.
        limit: most rows the context allows.
    """

    def __init__(self, forms: Sequence[TensorForm], places: Sequence[int], limit: int) -> None:
        super().__init__(forms, limit)
        self._places = tuple(places)
        self._owner: weakref.ref[InPlaceArena] | None = None
        self._of_owner = -1
        self._generation = 0

    def borrow(self, owner: InPlaceArena) -> None:
        """Take the tensors of `owner`, which is not kept alive by that, from now on.

        Raises:
            ValueError: they are of other forms.
        """
        if [owner.forms[place] for place in self._places] != list(self.forms):
            raise ValueError(f"the owner's tensors are {owner.forms}, not {self.forms}")
        if self._owner is None or self._owner() is not owner:
            self._owner = weakref.ref(owner)
            self._of_owner = owner.generation
            self._generation += 1
        self.length = owner.length

    def follow(self, most: int) -> None:
        """Go to where the owner is, though not beyond `most` rows: what was written since is not to be read."""
        self.length = min(self._lender().length, most)

    @property
    def generation(self) -> int:
        """Counts how often the tensors were replaced by others."""
        current = self._lender().generation
        if current != self._of_owner:
            self._of_owner = current
            self._generation += 1
        return self._generation

    def tensors(self) -> list[Array]:
        """The buffer of every cache tensor, in the order of the forms."""
        theirs = self._lender().tensors()
        return [theirs[place] for place in self._places]

    @property
    def capacity(self) -> int:
        """See `KVArena.capacity`."""
        return self._lender().capacity

    @property
    def written(self) -> int:
        """See `KVArena.written`."""
        return self.capacity

    @property
    def nbytes(self) -> int:
        """Nothing: see the owner's."""
        return 0

    def reserve(self, rows: int) -> None:
        """See `KVArena.reserve`; it is the owner that grows."""
        owner = self._lender()
        owner.reserve(self.check_fits(rows) - owner.length)

    def _move(self, sources: npt.NDArray[np.intp], targets: npt.NDArray[np.intp]) -> None:
        for form, tensor in zip(self.forms, self.tensors(), strict=True):
            tensor[form.rows(targets)[1:]] = tensor[form.rows(sources)[1:]]

    def _fill(self, start: int, stop: int, value: float) -> None:
        for form, tensor in zip(self.forms, self.tensors(), strict=True):
            tensor[form.rows(slice(start, stop))[1:]] = value

    def _copied(self, rows: int) -> Rows:
        tensors = self.tensors()
        return tuple(
            np.stack([tensors[member] for member in members])[form.rows(slice(rows))]
            for form, members in self.groups.items()
        )

    def _take(self, rows: Rows, count: int) -> None:
        tensors = self.tensors()
        for (form, members), new in zip(self.groups.items(), rows, strict=True):
            for member, each in zip(members, new, strict=True):
                tensors[member][form.rows(slice(count))[1:]] = each

    def _lender(self) -> InPlaceArena:
        owner = None if self._owner is None else self._owner()
        if owner is None:
            raise ValueError("there is no arena to borrow from")
        return owner
