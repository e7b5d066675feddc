"""Hidden states of the target at the last tokens of a sequence, for draft heads (docs/decisions/0077).

Every pass of a target with a draft head returns the features of its new tokens, which lie here by cache slot like keys
and values: rewinding leaves them, the next pass overwrites them, and the accepted path of a tree is moved together.
Only the last few are kept. Where they are unknown, as after a restored snapshot, a head begins with later tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Features: TypeAlias = npt.NDArray[np.float32]

FEATURE_WINDOW: Final = 2048
"""Number of tokens before the last one whose features are kept: published heads were trained on texts of that length,
and a head that has to start afresh reads no more than these."""
_FIRST_ROWS: Final = 256


class FeatureSlots:
    """Features by cache slot, known from `start` up to `end`.

    Slots from the committed length of the arena on were written by the last pass, accepted or not.

    Args:
        size: number of features of a token.
        window: number of slots before a pass that are kept.
    """

    def __init__(self, size: int, window: int = FEATURE_WINDOW) -> None:
        self.size: Final = size
        self.window: Final = window
        self.start = 0
        """First slot whose features are known."""
        self.end = 0
        """The slot after the last one whose features are known."""
        self._rows: Features = np.empty((_FIRST_ROWS, size), np.float32)
        self._first = 0
        """Slot of the first row."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._rows.nbytes

    def write(self, slot: int, features: Features) -> None:
        """Store the features float32 `[n, size]` of the slots from `slot` on, which a pass computed."""
        if self.start == self.end or not self.start <= slot <= self.end:
            self.start = self._first = slot
        if slot + len(features) - self._first > len(self._rows):
            self._make_room(slot, len(features))
        self.end = slot + len(features)
        self._rows[slot - self._first : self.end - self._first] = features

    def forget(self, slot: int) -> None:
        """Forget the features from `slot` on: a pass has written these slots and did not compute their features."""
        self.end = max(self.start, min(self.end, slot))

    def compact(self, base: int, path: Sequence[int]) -> None:
        """Move the features of an accepted path together; arguments as for `KVArena.compact`."""
        if not self.start <= base or base + path[-1] >= self.end:
            self.forget(base)
            return
        if path[-1] >= len(path):
            first = base - self._first
            self._rows[first : first + len(path)] = self._rows[[first + node for node in path]]
        self.end = base + len(path)

    def read(self, first: int, last: int) -> Features:
        """Features float32 `[last - first, size]` of known slots, valid until the next pass."""
        if not self.start <= first <= last <= self.end:
            raise ValueError(f"features of slots {first} to {last} are not known, but {self.start} to {self.end}")
        return self._rows[first - self._first : last - self._first]

    def copy_from(self, source: FeatureSlots | None, slots: int) -> None:
        """Replace everything by what another arena has of its first `slots` slots; None for nothing."""
        self.start = self.end = self._first = slots
        if source is not None and source.size == self.size and source.start < (end := min(source.end, slots)):
            first = max(source.start, end - self.window)
            self.write(first, source.read(first, end))

    def _make_room(self, slot: int, count: int) -> None:
        """Drop what lies before the window, and let the buffer grow to twice what is left at most."""
        kept = max(self.start, slot - self.window)
        rows = self._rows[kept - self._first : slot - self._first].copy()
        needed = len(rows) + count
        if 2 * needed > len(self._rows):
            self._rows = np.empty((2 * needed, self.size), np.float32)
        self._rows[: len(rows)] = rows
        self.start = self._first = kept
