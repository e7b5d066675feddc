"""Token recycling: the target's top logits after a token, kept as candidates (Luo et al. 2024).

Every forward pass ranks the whole vocabulary at each position, and only the first place is used; the next few places
are good candidates when the same token occurs again. Tokens that have not occurred have no candidates. The table is
small (8 bytes per candidate at most) and can be saved between runs.
"""

from __future__ import annotations

import math
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ....models.atomic import write_atomically
from ....models.regular_file import read_regular
from ..tree import Source
from .interface import Candidate, TailDrafter

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


class RecyclingDrafter(TailDrafter):
    """A `Drafter` over the target's own logits.

    Args:
        table: the candidates, which drafters of other sequences may share.
    """

    source = Source.RECYCLE
    prior = _PRIOR
    logits_needed = CANDIDATES
    reach = 1

    def __init__(self, table: RecycledTable) -> None:
        self.table: Final = table

    def candidates(self, state: tuple[int, ...]) -> Sequence[Candidate]:
        """The tokens that the target ranked highest after the last token."""
        return self.table.candidates(state[0]) if state else ()

    def learn(self, token: int, logits: npt.NDArray[np.float32]) -> None:
        """Store the highest logits float32 `[V]` after a token as its candidates."""
        self.table.learn(token, logits)


class RecycledTable:
    """The tokens that the target ranked highest after each token.

    Args:
        vocab_size: vocabulary size of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        # Arrays of Python's own: between two passes, the first call of a NumPy function takes long.
        self._vocab_size: Final = vocab_size
        self._tokens = array("i", [_NONE]) * (vocab_size * CANDIDATES)
        self._buckets = bytearray(vocab_size * CANDIDATES)
        self._part = vocab_size // _PARTS
        """Number of tokens of a part; those behind the last whole one are a part of their own."""
        self._starts = np.arange(_PARTS) * self._part
        self.changed = False
        """Whether the table has changed since it was saved."""
        self._recent: dict[int, Sequence[Candidate]] = {}
        """Candidates that were looked up lately."""

    def candidates(self, after: int) -> Sequence[Candidate]:
        """The candidates after a token, best first; none if it has not occurred."""
        known = self._recent.get(after)
        if known is None:
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            start, end = after * CANDIDATES, (after + 1) * CANDIDATES
            pairs = zip(self._tokens[start:end], self._buckets[start:end], strict=True)
            self._recent[after] = known = tuple(Candidate(*pair) for pair in pairs if pair[0] >= 0)
        return known

    def learn(self, token: int, logits: npt.NDArray[np.float32]) -> None:
        """Store the highest logits float32 `[V]` after `token` as its candidates."""
        places, values = self._ranked(logits) or _ranked_by_sorting(logits)
        # Margins of infinite logits are NaN, which is above every bound.
        margins = [abs(value - values[0]) for value in values]
        classes = [bisect_right(_MARGINS, margins[min(1, len(margins) - 1)])]
        classes += [bisect_right(_MARGINS, margin) + _CLASSES for margin in margins[1:]]
        here = slice(token * CANDIDATES, token * CANDIDATES + len(places))
        self._tokens[here], self._buckets[here] = array("i", places), bytes(classes)
        self._recent.pop(token, None)
        self.changed = True

    def _ranked(self, logits: npt.NDArray[np.float32]) -> tuple[list[int], list[float]] | None:
        """Ids and values of the highest logits, best first, ties to the lowest id; None if there is NaN, or few logits.

        Between two passes the processor's caches hold nothing of this, and the first call of a NumPy function takes
        fifty times as long as in a loop. So this gets by with the one that has just chosen a token, and `take`. The
        three highest logits lie in the three parts with the highest ones, or behind the last whole part.
        """
        part, whole = self._part, self._part * _PARTS
        if part < CANDIDATES:
            return None
        parts, rest = logits[:whole].reshape(_PARTS, part), logits[whole:].tolist()
        values = logits.take(parts.argmax(axis=1) + self._starts).tolist()
        # A part with NaN gives that, and the sum is NaN then, or where infinite values of both signs are added.
        if math.isnan(sum(values) + sum(rest)):
            return None
        numbers = sorted(sorted(range(_PARTS), key=values.__getitem__, reverse=True)[:CANDIDATES])
        highest = parts.take(numbers, axis=0).reshape(-1)
        found = [(-value, whole + place) for place, value in enumerate(rest)]
        for _ in range(CANDIDATES):
            at = int(highest.argmax())
            found.append((-highest.item(at), numbers[at // part] * part + at % part))
            highest[at] = -math.inf
        found = sorted(found)[:CANDIDATES]
        return None if found[-1][0] == math.inf else ([place for _, place in found], [-value for value, _ in found])

    def save(self, path: Path) -> None:
        """Save the table to a file that only its owner can read.

        Raises:
            OSError: it cannot be written; an older file is unchanged.
        """
        tokens, buckets = self._arrays()
        seen = np.flatnonzero(tokens[:, 0] >= 0)
        records = np.empty(seen.size, _RECORD)
        records["token"], records["candidates"], records["buckets"] = seen, tokens[seen], buckets[seen]
        body = np.array([self._vocab_size, seen.size], "<i4").tobytes() + records.tobytes()
        write_atomically(path, _FORMAT + zlib.crc32(body).to_bytes(4, "little") + body, private=True)
        self.changed = False

    def load(self, path: Path) -> bool:
        """Load a saved table; False, without any change, if it is missing, damaged or of another vocabulary."""
        vocab_size = self._vocab_size
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
        tokens, buckets = self._arrays()
        tokens[records["token"]], buckets[records["token"]] = records["candidates"], records["buckets"]
        self._recent.clear()
        return True

    def _arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """The candidates and their buckets `[V, CANDIDATES]`, which share the memory of the table."""
        tokens, buckets = np.frombuffer(self._tokens, np.int32), np.frombuffer(self._buckets, np.uint8)
        return tokens.reshape(-1, CANDIDATES), buckets.reshape(-1, CANDIDATES)


def _ranked_by_sorting(logits: npt.NDArray[np.float32]) -> tuple[list[int], list[float]]:
    """Ids and values of the highest logits, best first, ties to the lowest id, NaN last."""
    places = np.argsort(-logits, kind="stable")[:CANDIDATES]
    return places.tolist(), logits[places].tolist()
