"""A suffix array over token sequences, searched by bisection.

The file holds the sequences in reverse, so that the tokens before a place read forwards from it, and big-endian, so
that comparing bytes compares tokens. Then follow all places, sorted by the sixteen tokens before them (a suffix array
of the reversed sequences, built by doubling: Manber and Myers 1990). The places that share most of a context are
neighbours of where it would be inserted. A place costs eight bytes. The file is read into memory, not mapped: Windows
refuses to remove a mapped file, so every process that drafts from an outdated index would keep its file alive.
"""

from __future__ import annotations

import struct
import sys
import zlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

REACH: Final = 16
"""Maximum number of tokens of a context."""
NEIGHBOURS: Final = 6
"""Number of places examined on either side of where a context would be inserted."""
WORD: Final = 4
"""Bytes of a token and of a place."""
_GAP: Final = 0xFFFFFFFF
"""Separates sequences."""
TOKEN_LIMIT: Final = 2**31 - 2
"""Token ids are below this."""
_MAGIC: Final = b"edgehix1" if sys.byteorder == "little" else b"edgehiX1"
_HEADER: Final = struct.Struct("=8s16sQIII")
"""Magic, the log's identity and length, tokens with gaps, places, and the CRC-32 of this (as 0) and the rest."""
_KEYS: Final = tuple(struct.Struct(f">{size}I") for size in range(REACH + 1))

HEADER_BYTES: Final = _HEADER.size


Tokens: TypeAlias = npt.NDArray[np.uint32]

Found: TypeAlias = tuple[int, int, int]
"""A place whose context ends like the one searched for: number of context tokens that do not match, distance in tokens
from the end of the newest sequence, and the token at the place. The best match sorts first."""


class Covered(NamedTuple):
    """What an index was made from."""

    identity: bytes
    """Sixteen bytes that name the log."""
    end: int
    """How many bytes of it."""


def encode(sequences: Sequence[Tokens], covered: Covered, pause: Callable[[], None] = lambda: None) -> bytes:
    """Make the index file of some sequences, oldest first: about 0.5 s and 50 MB of memory for a million tokens.

    Args:
        sequences: token ids below `TOKEN_LIMIT`.
        covered: what the sequences were read from.
        pause: called between steps that take about a seventh of the time each; may wait, or raise an error to stop.
    """
    backward = np.full(sum(len(sequence) + 1 for sequence in sequences) + 1, _GAP, np.uint32)
    at = len(backward) - 1
    for sequence in sequences:
        backward[at - len(sequence) : at] = sequence[::-1]
        at -= len(sequence) + 1
    places = _sorted_places(backward, pause)
    pause()
    body = backward.astype(">u4").tobytes() + places.astype("=u4").tobytes()
    parts = (_MAGIC, covered.identity, covered.end, len(backward), len(places))
    return _HEADER.pack(*parts, zlib.crc32(body, zlib.crc32(_HEADER.pack(*parts, 0)))) + body


def _sorted_places(backward: Tokens, pause: Callable[[], None]) -> npt.NDArray[np.intp]:
    """The places that have a token on either side, sorted by the bytes that follow them; ties keep their order."""
    rank = np.minimum(backward, TOKEN_LIMIT).astype(np.int64) + 1  # 0 stands for the end
    order = np.arange(len(backward))
    width = 1
    while width < REACH:
        pause()
        shifted = np.zeros_like(rank)
        shifted[:-width] = rank[width:]
        key = rank << 31 | shifted
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        rank = np.empty_like(rank)
        rank[order] = np.cumsum(np.concatenate(([1], ordered[1:] != ordered[:-1])))
        width *= 2
    inside = backward != _GAP
    inside[1:] &= backward[:-1] != _GAP
    places: npt.NDArray[np.intp] = order[inside[order]]
    return places


class HistoryIndex:
    """An index in memory.

    Args:
        data: contents of its file.

    Raises:
        ValueError: they are damaged, or not an index of this version and byte order.
    """

    def __init__(self, data: bytes) -> None:
        if len(data) < HEADER_BYTES:
            raise ValueError("the file is too short")
        magic, identity, end, tokens, places, checksum = _HEADER.unpack_from(data)
        if magic != _MAGIC or len(data) != HEADER_BYTES + WORD * (tokens + places):
            raise ValueError("the file is not an index of this version")
        head = zlib.crc32(_HEADER.pack(magic, identity, end, tokens, places, 0))
        if zlib.crc32(memoryview(data)[HEADER_BYTES:], head) != checksum:
            raise ValueError("the checksum is wrong")
        self._data = data
        self.covered = Covered(identity, end)
        self._places = memoryview(data)[HEADER_BYTES + WORD * tokens :].cast("I")

    def __len__(self) -> int:
        """Number of places."""
        return len(self._places)

    def find(self, context: Sequence[int]) -> list[Found]:
        """Some of the places whose contexts share the most with `context`, the longest match among them.

        Args:
            context: the last tokens of a sequence, up to `REACH`.
        """
        data, places, size = self._data, self._places, WORD * len(context)
        key = _KEYS[len(context)].pack(*reversed(context))
        low = bisect_left(places, key, key=lambda place: data[(start := HEADER_BYTES + WORD * place) : start + size])
        wanted = int.from_bytes(key, "big")
        found: list[Found] = []
        for side in (range(low, min(low + NEIGHBOURS, len(places))), range(low - 1, max(low - 1 - NEIGHBOURS, -1), -1)):
            for index in side:
                start = HEADER_BYTES + WORD * places[index]
                here = data[start : start + size].ljust(size, b"\xff")
                missing = ((int.from_bytes(here, "big") ^ wanted).bit_length() + 8 * WORD - 1) // (8 * WORD)
                if missing == len(context):
                    break
                found.append((missing, places[index], int.from_bytes(data[start - WORD : start], "big")))
        return found
