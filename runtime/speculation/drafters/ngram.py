"""Candidates from n-gram counts of other texts, and the table of these counts on disk.

They do not depend on the conversation, and help where nothing repeats: within words, after common beginnings, along
phrases. Most of these candidates are weak, so the evidence bucket of each says how weak: it stands for the
interpolated probability and for the number of context tokens that it was computed from.

The table is one file, looked up by the hash of a context. Entries lie in buckets chosen by the upper half of the
context's hash; `starts` is where each bucket begins. The lower half is the entry's fingerprint, so about one in a
billion lookups of a context that is not in the table finds another one, which costs a wrong draft token and nothing
more. All numbers are little-endian:

    header        see `HEADER`
    starts        uint32 [buckets + 1]
    fingerprints  uint32 [entries]
    values        uint32 [entries]      token * 256 + probability step * 4 + count class

A token has 24 bits. The file holds nothing that cannot be counted again: a damaged one is set aside and never an error.
Models with the same tokenizer share a table. It is read into memory, not mapped: Windows refuses to replace a file that
any process has mapped.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ....models.bundle import Bundle, digest_file
from ....models.regular_file import read_regular
from ....models.user_folders import cache_folder
from ..tree import Source
from .interface import Candidate, TailDrafter

MAX_ORDER: Final = 4
"""Number of tokens of the longest context."""
PROBABILITY_STEPS: Final = 64
HASH_START: Final = 0x9E3779B97F4A7C15
HASH_FACTOR: Final = 0xD6E8FEB86659FD93
"""Factor of the context hash. It takes the tokens from the last to the first, so the hash of a longer context continues
the hash of the shorter one."""
HEADER: Final = struct.Struct("<8s I I 32s I I I I")
"""Magic, format version, vocabulary size, SHA-256 of the key, buckets, entries, CRC-32 of what follows the header, and
of the header before this field."""
MAGIC: Final = b"edgengrm"
FORMAT: Final = 1
BUCKET: Final = 6
"""Average number of entries of a bucket."""
LOW: Final = 0xFFFFFFFF
_WHOLE: Final = 0xFFFFFFFFFFFFFFFF
SMALLEST: Final = HEADER.size + 8
"""Bytes of a table without entries."""
_TOKENIZER: Final = "tokenizer.json"
MAX_BUNDLE_BYTES: Final = 64 << 20
"""Size of the largest table of a bundle; larger files are not read."""
MAX_CANDIDATES: Final = 3
"""Maximum number of candidates at one place."""
_CLASS_STARTS: Final = (0.02, 0.05, 0.1, 0.15, 0.25, 0.36, 0.5, 0.65, 0.75)
"""Lower bounds of the second and later probability classes."""
_CLASSES: Final = len(_CLASS_STARTS) + 1
_PRIOR: Final = (
    (0.007, 0.028, 0.054, 0.063, 0.107, 0.185, 0.203, 0.257, 0.453, 0.422),
    (0.007, 0.015, 0.044, 0.080, 0.114, 0.201, 0.292, 0.358, 0.396, 0.711),
    (0.008, 0.011, 0.031, 0.058, 0.099, 0.173, 0.212, 0.303, 0.399, 0.681),
    (0.007, 0.022, 0.022, 0.057, 0.104, 0.150, 0.287, 0.372, 0.452, 0.740),
)
"""Prior acceptance rates by number of context tokens and class of the probability. Measured on the recorded answers of
one 8B model, with tables of foreign text, with and without that model's other answers."""
_LEFT: Final = (0.95, 0.85, 0.7, 0.4)
"""By how often a context was seen: the share of the probability left to continuations of shorter contexts only."""
_STEP: Final = 1 / PROBABILITY_STEPS


def bundle_table_file(bundle: Bundle) -> Path:
    """The cached table of a bundle's tokenizer; it may not exist."""
    digest = hashlib.sha256(tokenizer_digest(bundle).encode()).hexdigest()
    return cache_folder() / "ngram" / f"{digest[:32]}.bin"


def open_bundle_table(bundle: Bundle, vocab_size: int, warn: Callable[[str], None]) -> NgramTable | None:
    """The table of a bundle's tokenizer; None if there is none. A damaged one is set aside with a warning."""
    path = bundle_table_file(bundle)
    if not path.is_file():
        return None
    return NgramTable.open(path, vocab_size=vocab_size, key=tokenizer_digest(bundle), warn=warn)


def tokenizer_digest(bundle: Bundle) -> str:
    """SHA-256 of the tokenizer of a bundle, which a table belongs to."""
    known = bundle.manifest.files.get(_TOKENIZER) if bundle.manifest is not None and bundle.tokenizer is None else None
    return (known or digest_file(bundle.file(_TOKENIZER) or bundle.folder / _TOKENIZER)).sha256


class NgramTable:
    """An open table. Lookups take a microsecond or two, and are safe from several threads."""

    def __init__(self, data: bytes) -> None:
        """Wrap the contents of a file that was checked; see `open`."""
        self._buckets, entries = HEADER.unpack_from(data)[4:6]
        body = memoryview(data)[HEADER.size :].cast("I")
        self._starts = body[: self._buckets + 1]
        self._fingerprints = body[self._buckets + 1 : self._buckets + 1 + entries]
        self._values = body[self._buckets + 1 + entries :]

    @classmethod
    def open(cls, path: Path, *, vocab_size: int, key: str, warn: Callable[[str], None]) -> NgramTable | None:
        """Open the table at `path`; None if there is none for this model.

        A damaged file is renamed to `*.damaged`. A table of another model or version of edge-run stays where it is.
        Both are reported to `warn`.

        Args:
            path: as given to `write_table`.
            vocab_size: as given to `write_table`.
            key: as given to `write_table`.
            warn: called with a message of one line.
        """
        try:
            data = read_regular(path, MAX_BUNDLE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:  # a problem of the disk or of permissions; the file itself may be valid
            warn(f"the n-gram table {path} cannot be read ({error.strerror})")
            return None
        if damage := _damage(data):
            moved = ""
            with suppress(OSError):
                path.replace(path.with_name(path.name + ".damaged"))
                moved = f"; it was renamed to {path.name}.damaged"
            warn(f"the n-gram table {path} cannot be read ({damage}){moved}")
            return None
        version, vocabulary, digest = HEADER.unpack_from(data)[1:4]
        if (version, vocabulary, digest) != (FORMAT, vocab_size, hashlib.sha256(key.encode()).digest()):
            warn(f"the n-gram table {path} belongs to another model or version and is not used")
            return None
        return cls(data)

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._values)

    def find(self, context: Sequence[int]) -> list[list[int]]:
        """Continuations of the last token of `context`, of the last two tokens, and so on, shortest first.

        Each item lists the values of the continuations, most probable first: token * 256 + probability step * 4 +
        count class. It is empty where no continuation was kept.
        """
        found: list[list[int]] = []
        hashed = HASH_START
        buckets, starts, fingerprints = self._buckets, self._starts, self._fingerprints
        for token in reversed(context):
            hashed = (hashed ^ token) * HASH_FACTOR & _WHOLE
            upper = hashed >> 32
            hashed ^= upper
            bucket = upper * buckets >> 32
            start = starts[bucket]
            here = fingerprints[start : starts[bucket + 1]].tolist()
            fingerprint = hashed & LOW
            if fingerprint in here:
                start += here.index(fingerprint)
                found.append(self._values[start : start + here.count(fingerprint)].tolist())
            else:
                found.append([])
        return found


def _damage(data: bytes) -> str:
    """What is wrong with the file; empty if nothing."""
    if len(data) < SMALLEST:
        return "it is too short"
    magic, version, _, _, buckets, entries, body_sum, header_sum = HEADER.unpack_from(data)
    if magic != MAGIC or zlib.crc32(data[: HEADER.size - 4]) != header_sum:
        return "its header is damaged"
    if version != FORMAT:
        return ""  # the caller refuses other versions
    if len(data) != HEADER.size + 4 * (buckets + 1 + 2 * entries):
        return "its length is not what its header says"
    return "" if zlib.crc32(memoryview(data)[HEADER.size :]) == body_sum else "its contents are damaged"


class NgramDrafter(TailDrafter):
    """Proposes the continuations that a table of n-grams has of the last tokens."""

    source = Source.NGRAM
    prior = tuple(rate for rates in _PRIOR for rate in rates)
    reach = MAX_ORDER

    def __init__(self, table: NgramTable) -> None:
        self._table = table

    def candidates(self, state: tuple[int, ...]) -> list[Candidate]:
        """Up to `MAX_CANDIDATES` continuations of the longest known context and shorter ones, most probable first."""
        best: dict[int, tuple[float, int]] = {}
        found = self._table.find(state)
        left = _STEP
        for order in range(len(found), 0, -1):
            values = found[order - 1]
            for value in values:
                token = value >> 8
                probability = ((value >> 2 & 63) + 0.5) * left
                if token not in best or probability > best[token][0]:
                    best[token] = (probability, order)
            if values:
                left *= _LEFT[values[0] & 3]
        ranked = sorted(best.items(), key=lambda item: -item[1][0])[:MAX_CANDIDATES]
        return [
            Candidate(token, (order - 1) * _CLASSES + bisect_right(_CLASS_STARTS, probability))
            for token, (probability, order) in ranked
        ]
