"""Token recycling: what the target thought would follow a token the last time it saw it (Luo et al. 2024).

Every verified row of logits ranks the whole vocabulary, and all but the first place is thrown away; kept by token, the
next few places are good guesses when the token comes again. Tokens never seen have no guesses. The table is small
(8 bytes a guess at most) and can be kept between runs.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ....models.atomic import write_atomically
from ..tree import Source
from .interface import Candidate

_KEPT: Final = 3
_GROUP: Final = 64
_MARGINS: Final = (0.5, 1.0, 2.0, 4.0)
"""Edges, in logits, of the classes of a guess's distance: the first's from the second, the others' from the first."""
_CLASSES: Final = len(_MARGINS) + 1
_NOTHING: Final = -1
_FORMAT: Final = b"edge-run recycled 1\n"
_HEAD: Final = 2
"""Numbers before the rows: of tokens in the vocabulary, and of rows."""
_ROW: Final = np.dtype([("token", "<i4"), ("guesses", "<i4", _KEPT), ("buckets", "u1", _KEPT)])


class RecyclingDrafter:
    """A `Drafter` over the target's own logits. Its state is the last token."""

    source: Final = Source.RECYCLED
    prior: Final[Sequence[float]] = (
        *(0.16, 0.2, 0.25, 0.32, 0.42),  # first place, by its distance from the second
        *(0.12, 0.09, 0.06, 0.03, 0.02),  # lower places, by their distance from the first
    )

    def __init__(self, vocab_size: int) -> None:
        self._tokens = np.full((vocab_size, _KEPT), _NOTHING, np.int32)
        self._buckets = np.zeros((vocab_size, _KEPT), np.uint8)
        self._last = _NOTHING
        self.changed = False
        """Whether there is something to save."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Only the last token matters."""
        self._last = tokens[-1] if tokens else _NOTHING

    def append(self, token: int) -> None:
        """Let the text grow by one token."""
        self._last = token

    def state(self) -> int:
        """The last token."""
        return self._last

    def after(self, state: int, token: int) -> int:
        """The token itself."""
        del state
        return token

    def candidates(self, state: int) -> Sequence[Candidate]:
        """What the target ranked highest after this token."""
        if state < 0:
            return ()
        return [
            Candidate(token, bucket)
            for token, bucket in zip(self._tokens[state].tolist(), self._buckets[state].tolist(), strict=True)
            if token >= 0
        ]

    def learn(self, token: int, logits: npt.NDArray[np.float32]) -> None:
        """Remember the highest places of the logits `[V]` that followed `token`."""
        groups = logits.size // _GROUP
        members = np.arange(groups * _GROUP, logits.size)
        if groups < _KEPT:
            members = np.arange(logits.size)
        else:
            # The highest places lie in the groups with the highest maxima; only those few are looked at one by one.
            maxima = logits[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
            # Not "reaches the bound": what is no number would be in no group.
            best = np.flatnonzero(~(maxima < np.partition(maxima, groups - _KEPT)[groups - _KEPT]))
            members = np.concatenate([(best + np.arange(_GROUP)[:, None] * groups).ravel(), members])
        places = members[np.argsort(-logits[members], kind="stable")[:_KEPT]]
        values = logits[places]
        with np.errstate(invalid="ignore"):
            distances = np.abs(values[[1, *range(1, len(values))]] - values[0]) if len(values) > 1 else np.zeros(1)
        classes = np.searchsorted(_MARGINS, distances, side="right")
        classes[1:] += _CLASSES
        self._tokens[token, : len(places)] = places
        self._buckets[token, : len(places)] = classes
        self.changed = True

    def save(self, path: Path) -> None:
        """Write the table to a file.

        Raises:
            OSError: it cannot be written; an older one is as it was.
        """
        seen = np.flatnonzero(self._tokens[:, 0] >= 0)
        rows = np.empty(seen.size, _ROW)
        rows["token"], rows["guesses"], rows["buckets"] = seen, self._tokens[seen], self._buckets[seen]
        body = np.array([len(self._tokens), seen.size], "<i4").tobytes() + rows.tobytes()
        write_atomically(path, _FORMAT + zlib.crc32(body).to_bytes(4, "little") + body)
        self.changed = False

    def load(self, path: Path) -> bool:
        """Take over a saved table; False, and nothing changes, when it is missing, damaged or of another vocabulary."""
        vocab_size = len(self._tokens)
        try:
            stored = path.read_bytes()
        except OSError:
            return False
        start = len(_FORMAT) + 4
        body = stored[start:]
        if stored[:start] != _FORMAT + zlib.crc32(body).to_bytes(4, "little") or len(body) < 4 * _HEAD:
            return False
        stored_size, count = np.frombuffer(body, "<i4", _HEAD).tolist()
        if stored_size != vocab_size or len(body) != 4 * _HEAD + count * _ROW.itemsize:
            return False
        rows = np.frombuffer(body, _ROW, offset=4 * _HEAD)
        seen, tokens, buckets = rows["token"], rows["guesses"], rows["buckets"]
        ids = np.append(tokens, seen)
        if ids.min(initial=0) < _NOTHING or ids.max(initial=0) >= vocab_size or seen.min(initial=0) < 0:
            return False
        if buckets.max(initial=0) >= len(self.prior):
            return False
        self._tokens[seen], self._buckets[seen] = tokens, buckets
        return True
