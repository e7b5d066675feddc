"""Token recycling: the target's top logits after a token, kept as candidates (Luo et al. 2024).

Every forward pass ranks the whole vocabulary at each position, and only the first place is used; the next few places
are good candidates when the same token occurs again. Tokens that have not occurred have no candidates. The table is
small (8 bytes per candidate at most) and can be saved between runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ....models.atomic import write_atomically
from ....models.regular_file import read_regular
from ..tree import Source
from .interface import Candidate

_CANDIDATES: Final = 3
_GROUP: Final = 64
_MARGINS: Final = (0.5, 1.0, 2.0, 4.0)
"""Bounds of the classes of logit margins: of the first candidate over the second, of the others below the first."""
_CLASSES: Final = len(_MARGINS) + 1
_NONE: Final = -1
_FORMAT: Final = b"edge-run recycled 1\n"
_HEADER: Final = 2
"""Number of int32 values before the records: the vocabulary size and the number of records."""
_RECORD: Final = np.dtype([("token", "<i4"), ("candidates", "<i4", _CANDIDATES), ("buckets", "u1", _CANDIDATES)])
_PRIOR: Final[Sequence[float]] = (
    *(0.16, 0.2, 0.25, 0.32, 0.42),  # the first candidate, by its margin over the second
    *(0.12, 0.09, 0.06, 0.03, 0.02),  # the others, by their margin below the first
)


class RecyclingDrafter:
    """A `Drafter` over the target's own logits. Its state is the last token.

    Args:
        table: the candidates, which drafters of other sequences may share.
    """

    source: Final = Source.RECYCLED
    prior: Final = _PRIOR

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


class RecycledTable:
    """The tokens that the target ranked highest after each token.

    Args:
        vocab_size: vocabulary size of the target.
    """

    def __init__(self, vocab_size: int) -> None:
        self._tokens = np.full((vocab_size, _CANDIDATES), _NONE, np.int32)
        self._buckets = np.zeros((vocab_size, _CANDIDATES), np.uint8)
        self.changed = False
        """Whether the table has changed since it was saved."""

    def candidates(self, after: int) -> list[Candidate]:
        """The candidates after a token, best first; none if it has not occurred."""
        return [
            Candidate(token, bucket)
            for token, bucket in zip(self._tokens[after].tolist(), self._buckets[after].tolist(), strict=True)
            if token >= 0
        ]

    def learn(self, token: int, logits: npt.NDArray[np.float32]) -> None:
        """Store the highest logits float32 `[V]` after `token` as its candidates."""
        groups = logits.size // _GROUP
        members = np.arange(groups * _GROUP, logits.size)
        if groups < _CANDIDATES:
            members = np.arange(logits.size)
        else:
            # The highest logits lie in the groups with the highest maxima; only those few are examined one by one.
            maxima = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
            # NaN compares false with every bound, so "not below" keeps its group and "at least" would drop it.
            best = np.flatnonzero(~(maxima < np.partition(maxima, groups - _CANDIDATES)[groups - _CANDIDATES]))
            members = np.concatenate([(best + np.arange(_GROUP)[:, None] * groups).ravel(), members])
        places = members[np.argsort(-logits[members], kind="stable")[:_CANDIDATES]]
        values = logits[places]
        with np.errstate(invalid="ignore"):
            margins = np.abs(values[[1, *range(1, len(values))]] - values[0]) if len(values) > 1 else np.zeros(1)
        classes = np.searchsorted(_MARGINS, margins, side="right")
        classes[1:] += _CLASSES
        self._tokens[token, : len(places)] = places
        self._buckets[token, : len(places)] = classes
        self.changed = True

    def save(self, path: Path) -> None:
        """Save the table to a file.

        Raises:
            OSError: it cannot be written; an older file is unchanged.
        """
        seen = np.flatnonzero(self._tokens[:, 0] >= 0)
        records = np.empty(seen.size, _RECORD)
        records["token"], records["candidates"], records["buckets"] = seen, self._tokens[seen], self._buckets[seen]
        body = np.array([len(self._tokens), seen.size], "<i4").tobytes() + records.tobytes()
        write_atomically(path, _FORMAT + zlib.crc32(body).to_bytes(4, "little") + body)
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
        self._tokens[seen], self._buckets[seen] = tokens, buckets
        return True
