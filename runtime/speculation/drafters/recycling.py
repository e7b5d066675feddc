"""Token recycling: the target's top logits after a token, kept as candidates (Luo et al. 2024).

Every forward pass ranks the whole vocabulary at each position, and only the first place is used; the next few places
are good candidates when the same token occurs again. Tokens that have not occurred have no candidates. The table is
small (8 bytes per candidate at most) and can be saved between runs.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ....models.atomic import write_atomically
from ....models.regular_file import read_regular
from ..tree import Source
from .interface import Candidate, Drafter

CANDIDATES: Final = 3
"""Number of best logits of a position that are kept."""
_PARTS: Final = 64
"""Number of parts of the vocabulary whose highest logits are found at once."""
_RECENT: Final = 8192
"""Number of tokens whose candidates are kept as objects."""
_MARGINS: Final = (0.5, 1.0, 2.0, 4.0)
"""Bounds of the classes of logit margins: of the first candidate over the second, of the others below the first."""
_CLASSES: Final = len(_MARGINS) + 1
_NONE: Final = -1
_FORMAT: Final = b"edge-run recycled 1\n"
_HEADER: Final = 2
"""Number of int32 values before the records: the vocabulary size and the number of records."""
_RECORD: Final = np.dtype([("token", "<i4"), ("candidates", "<i4", CANDIDATES), ("buckets", "u1", CANDIDATES)])
_PRIOR: Final[Sequence[float]] = (
    *(0.16, 0.2, 0.25, 0.32, 0.42),  # the first candidate, by its margin over the second
    *(0.12, 0.09, 0.06, 0.03, 0.02),  # the others, by their margin below the first
)


class RecyclingDrafter(Drafter):
    """A `Drafter` over the target's own logits. Its state is the last token.

    Args:
        table: the candidates, which drafters of other sequences may share.
    """

    source = Source.RECYCLED
    prior = _PRIOR
    logits_needed = CANDIDATES

    def __init__(self, table: RecycledTable) -> None:
        self.table: Final = table
        self._last = _NONE

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence, of which only the last token matters."""
        self._last = token_ids[-1] if token_ids else _NONE

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._last = token

    def state(self) -> int:
        """The last token."""
        return self._last

    def after(self, state: int, token: int) -> int:
        """The token."""
        del state
        return token

    def candidates(self, state: int) -> Sequence[Candidate]:
        """The tokens that the target ranked highest after this token."""
        return self.table.candidates(state) if state >= 0 else ()

    def learn(self, token: int, logits: npt.NDArray[np.float32]) -> None:
        """Store the highest logits float32 `[V]` after a token as its candidates."""
        self.table.learn(token, logits)


class RecycledTable:
    """The tokens that the target ranked highest after each token.

    Args:
        vocab_size: vocabulary size of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        self._tokens = np.full((vocab_size, CANDIDATES), _NONE, np.int32)
        self._buckets = np.zeros((vocab_size, CANDIDATES), np.uint8)
        self._part = vocab_size // _PARTS
        """Number of tokens of a part; those behind the last whole one are a part of their own."""
        self._starts = np.arange(_PARTS) * self._part
        self._recent: dict[int, Sequence[Candidate]] = {}
        """Candidates as they were last looked up or learned; the arrays do not have the tokens of `_unwritten` yet."""
        self._unwritten: set[int] = set()
        self.changed = False
        """Whether the table has changed since it was saved."""

    def candidates(self, after: int) -> Sequence[Candidate]:
        """The candidates after a token, best first; none if it has not occurred."""
        known = self._recent.get(after)
        return self._remember(after) if known is None else known

    def learn(self, token: int, logits: npt.NDArray[np.float32]) -> None:
        """Store the highest logits float32 `[V]` after `token` as its candidates."""
        ranked = self._ranked(logits)
        if ranked is None:
            places, values = _ranked_by_sorting(logits)
        else:
            places, values = ranked
        best = values[0]
        # Margins of infinite logits are NaN, which is above every bound.
        margins = [abs(value - best) for value in values]
        classes = [bisect_right(_MARGINS, margins[1 if len(margins) > 1 else 0])]
        classes += [bisect_right(_MARGINS, margin) + _CLASSES for margin in margins[1:]]
        self._make_room()
        self._recent[token] = tuple([Candidate(*each) for each in zip(places, classes, strict=True)])
        self._unwritten.add(token)
        self.changed = True

    def _ranked(self, logits: npt.NDArray[np.float32]) -> tuple[list[int], list[float]] | None:
        """Ids and values of the highest logits, best first, ties to the lowest id; None if there is NaN, or few logits.

        Between two passes the processor's caches hold nothing of this, and the first call of a NumPy function takes
        fifty times as long as in a loop. So this gets by with the one that has just chosen a token, and `take`.
        """
        part = self._part
        if part < CANDIDATES:
            return None
        whole = part * _PARTS
        best_of_parts = logits[:whole].reshape(_PARTS, part).argmax(axis=1)
        best_of_parts += self._starts
        ids, values = best_of_parts.tolist(), logits.take(best_of_parts).tolist()
        if whole < logits.size:
            ids.append(whole + int(logits[whole:].argmax()))
            values.append(logits.item(ids[-1]))
        # A part with NaN gives that, and the sum is NaN then, or where infinite values of both signs are added.
        if math.isnan(sum(values)):
            return None
        places: list[int] = []
        best: list[float] = []
        while True:
            value = max(values)
            number = values.index(value)
            if ids[number] == _NONE:
                return None
            places.append(ids[number])
            best.append(value)
            if len(places) == CANDIDATES:
                return places, best
            ids[number], values[number] = self._next_of_part(logits, number, places)

    def _next_of_part(self, logits: npt.NDArray[np.float32], number: int, without: Sequence[int]) -> tuple[int, float]:
        """Id and value of the highest logit of a part, without some ids; `_NONE` if none is left."""
        start = number * self._part
        end = start + self._part if number < _PARTS else logits.size
        place, value = _NONE, -math.inf
        for stop in (*sorted([each for each in without if start <= each < end]), end):
            if start < stop:
                highest = start + int(logits[start:stop].argmax())
                if place == _NONE or logits.item(highest) > value:
                    place, value = highest, logits.item(highest)
            start = stop + 1
        return place, value

    def _remember(self, token: int) -> Sequence[Candidate]:
        self._make_room()
        found = zip(self._tokens[token].tolist(), self._buckets[token].tolist(), strict=True)
        self._recent[token] = known = tuple(Candidate(*each) for each in found if each[0] >= 0)
        return known

    def _make_room(self) -> None:
        if len(self._recent) >= _RECENT:
            self._write()
            self._recent.clear()

    def _write(self) -> None:
        """Write what was learned to the arrays."""
        while self._unwritten:
            token = self._unwritten.pop()
            known = self._recent.get(token, ())
            self._tokens[token, : len(known)] = [candidate.token for candidate in known]
            self._buckets[token, : len(known)] = [candidate.bucket for candidate in known]

    def save(self, path: Path) -> None:
        """Save the table to a file that only its owner can read.

        Raises:
            OSError: it cannot be written; an older file is unchanged.
        """
        self._write()
        seen = np.flatnonzero(self._tokens[:, 0] >= 0)
        records = np.empty(seen.size, _RECORD)
        records["token"], records["candidates"], records["buckets"] = seen, self._tokens[seen], self._buckets[seen]
        body = np.array([len(self._tokens), seen.size], "<i4").tobytes() + records.tobytes()
        write_atomically(path, _FORMAT + zlib.crc32(body).to_bytes(4, "little") + body, private=True)
        self.changed = False

    def load(self, path: Path) -> bool:
        """Load a saved table; False, without any change, if it is missing, damaged or of another vocabulary."""
        vocab_size = len(self._tokens)
        try:
            stored = read_regular(path, len(_FORMAT) + 4 + 4 * _HEADER + vocab_size * _RECORD.itemsize)
        except OSError:
            return False
        start = len(_FORMAT) + 4
        body = stored[start:]
        if stored[:start] != _FORMAT + zlib.crc32(body).to_bytes(4, "little") or len(body) < 4 * _HEADER:
            return False
        stored_size, count = np.frombuffer(body, "<i4", _HEADER).tolist()
        if stored_size != vocab_size or len(body) != 4 * _HEADER + count * _RECORD.itemsize:
            return False
        records = np.frombuffer(body, _RECORD, offset=4 * _HEADER)
        seen, tokens, buckets = records["token"], records["candidates"], records["buckets"]
        ids = np.append(tokens, seen)
        if ids.min(initial=0) < _NONE or ids.max(initial=0) >= vocab_size or seen.min(initial=0) < 0:
            return False
        if buckets.max(initial=0) >= len(_PRIOR):
            return False
        self._write()
        self._tokens[seen], self._buckets[seen] = tokens, buckets
        self._recent.clear()
        return True


def _ranked_by_sorting(logits: npt.NDArray[np.float32]) -> tuple[list[int], list[float]]:
    """Ids and values of the highest logits, best first, ties to the lowest id, NaN last."""
    places = np.argsort(-logits, kind="stable")[:CANDIDATES]
    return places.tolist(), logits[places].tolist()
