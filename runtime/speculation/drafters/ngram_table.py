"""The n-gram table on disk: one memory-mapped file, looked up by the hash of a context.

Entries lie in buckets chosen by the upper half of the context's hash; `starts` says where a bucket begins. The lower
half is the entry's fingerprint, so a context that is not in the table is taken for one that is about once in a billion
lookups, which costs a wrong guess and nothing more. All numbers are little-endian:

    header        see `_HEADER`
    starts        uint32 [buckets + 1]
    fingerprints  uint32 [entries]
    values        uint32 [entries]      token * 256 + probability step * 4 + count class

The file holds nothing that cannot be counted again: a damaged one is set aside, never an error.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ....models.atomic import write_atomically
from .ngram_counts import HASH_FACTOR, HASH_START, MOST_TOKENS, Entries, count_entries

_HEADER: Final = struct.Struct("<8s I I 32s I I I I")
"""Magic, format version, vocabulary size, SHA-256 of the key, buckets, entries, CRC-32 of what follows the header, and
of the header before this field."""
_MAGIC: Final = b"edgengrm"
_FORMAT: Final = 1
_BUCKET: Final = 6
"""Entries a bucket holds on average."""
_LOW: Final = 0xFFFFFFFF
_WHOLE: Final = 0xFFFFFFFFFFFFFFFF
OUTPUT_WEIGHT: Final = 3
"""Measured on recorded answers, beside foreign text: 19.4 % of first guesses come true, 18.3 % if they count once."""
SMALLEST: Final = _HEADER.size + 8
"""Bytes of a table without entries."""


def write_table(
    path: Path,
    texts: Iterable[npt.ArrayLike],
    outputs: Sequence[npt.ArrayLike] = (),
    *,
    vocab_size: int,
    key: str,
    max_bytes: int = 16 << 20,
) -> int:
    """Count token sequences and write the table that takes at most `max_bytes`; returns the bytes written.

    Args:
        path: replaced whole or not at all.
        texts: of any origin: token ids, each one-dimensional.
        outputs: what the model itself has written, in the same form. A token of it says more than one of foreign text,
            and counts `OUTPUT_WEIGHT` times.
        vocab_size: the model's; ids are below it.
        key: what the ids mean, such as a fingerprint of the tokenizer; only who knows it can open the table.
        max_bytes: what the file may take, `SMALLEST` at least; the entries worth least are left out.

    Raises:
        ValueError: see `count_entries`; or `max_bytes` is below `SMALLEST`.
        OSError: the file cannot be written.
    """
    if max_bytes < SMALLEST:
        raise ValueError(f"a table of at most {max_bytes} bytes; no table takes fewer than {SMALLEST}")
    # Of n entries the buckets take 4 * (n // 6 + 2) bytes, the entries 8 * n.
    most = (max_bytes - SMALLEST) * _BUCKET // (8 * _BUCKET + 4)
    counted = itertools.chain(texts, *[outputs] * OUTPUT_WEIGHT)
    data = _packed(count_entries(counted, vocab_size, most), vocab_size, key)
    write_atomically(path, data)
    return len(data)


def _packed(entries: Entries, vocab_size: int, key: str) -> bytes:
    """The file's bytes."""
    buckets = len(entries.hashes) // _BUCKET + 1
    bucket = (entries.hashes >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)
    fingerprint = (entries.hashes & np.uint64(_LOW)).astype("<u4")
    order = np.lexsort((fingerprint, bucket))  # stable: a context's entries stay in their order
    starts = np.searchsorted(bucket[order], np.arange(buckets + 1, dtype=np.uint64)).astype("<u4")
    body: bytes = starts.tobytes() + fingerprint[order].tobytes() + entries.values[order].astype("<u4").tobytes()
    digest = hashlib.sha256(key.encode()).digest()
    header = bytearray(_HEADER.pack(_MAGIC, _FORMAT, vocab_size, digest, buckets, len(order), zlib.crc32(body), 0))
    struct.pack_into("<I", header, _HEADER.size - 4, zlib.crc32(header[:-4]))
    return bytes(header) + body


class NgramTable:
    """An open table. Lookups take a microsecond or two, and are safe from several threads."""

    def __init__(self, mapping: mmap.mmap) -> None:
        """The table in a file that was checked; see `open`."""
        self._buckets, entries = _HEADER.unpack_from(mapping)[4:6]
        body = memoryview(mapping)[_HEADER.size :].cast("I")
        self._starts = body[: self._buckets + 1]
        self._fingerprints = body[self._buckets + 1 : self._buckets + 1 + entries]
        self._values = body[self._buckets + 1 + entries :]

    @classmethod
    def open(cls, path: Path, *, vocab_size: int, key: str, warn: Callable[[str], None]) -> NgramTable | None:
        """The table at `path`, or None if there is none for this model.

        A damaged file is renamed to `*.damaged`; that, and a table of another model or version of edge-run, which stays
        where it is, is told to `warn` in one line.

        Args:
            path: as given to `write_table`.
            vocab_size: as given to `write_table`.
            key: as given to `write_table`.
            warn: called with one line.
        """
        try:
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return None
        except OSError as error:  # of the disk or of rights; the file itself may be sound
            warn(f"the n-gram table {path} cannot be read ({error.strerror})")
            return None
        except ValueError:
            _set_aside(path, "it is empty", warn)
            return None
        damage = _damage(mapping)
        if damage:
            mapping.close()
            _set_aside(path, damage, warn)
            return None
        version, vocabulary, digest = _HEADER.unpack_from(mapping)[1:4]
        if (version, vocabulary, digest) != (_FORMAT, vocab_size, hashlib.sha256(key.encode()).digest()):
            mapping.close()
            warn(f"the n-gram table {path} is of another model or version, and is not used")
            return None
        return cls(mapping)

    def __len__(self) -> int:
        """Entries."""
        return len(self._values)

    def find(self, context: Sequence[int]) -> list[list[int]]:
        """What followed the last token of `context`, the last two, and so on: an item for each, shortest first.

        An item is the values of the continuations, likeliest first: token * 256 + probability step * 4 + count class;
        it is empty where none were kept.
        """
        found: list[list[int]] = []
        hash_ = HASH_START
        buckets, starts, fingerprints = self._buckets, self._starts, self._fingerprints
        for token in reversed(context):
            hash_ = (hash_ ^ token) * HASH_FACTOR & _WHOLE
            upper = hash_ >> 32
            hash_ ^= upper
            bucket = upper * buckets >> 32
            start = starts[bucket]
            here = fingerprints[start : starts[bucket + 1]].tolist()
            fingerprint = hash_ & _LOW
            if fingerprint in here:
                start += here.index(fingerprint)
                found.append(self._values[start : start + here.count(fingerprint)].tolist())
            else:
                found.append([])
        return found


def _damage(mapping: mmap.mmap) -> str:
    """What is wrong with the file, if anything; every lookup in a file that passes stays within it."""
    if len(mapping) < SMALLEST:
        return "it is too short"
    magic, version, vocabulary, _, buckets, entries, body_sum, header_sum = _HEADER.unpack_from(mapping)
    if magic != _MAGIC or zlib.crc32(mapping[: _HEADER.size - 4]) != header_sum:
        return "its header is damaged"
    if version != _FORMAT:
        return ""  # sound for all that is known, and refused by its version
    if len(mapping) != _HEADER.size + 4 * (buckets + 1 + 2 * entries) or not 0 < vocabulary <= MOST_TOKENS:
        return "its length is not what its header says"
    with memoryview(mapping) as whole, whole[_HEADER.size :] as body:
        if zlib.crc32(body) != body_sum:
            return "its contents are damaged"
        numbers = np.frombuffer(body, "<u4")
        starts, values = numbers[: buckets + 1], numbers[buckets + 1 + entries :]
        sound = (
            starts[0] == 0
            and starts[-1] == entries
            and bool((starts[1:] >= starts[:-1]).all())
            and (entries == 0 or int(values.max()) >> 8 < vocabulary)
        )
        del numbers, starts, values
    return "" if sound else "its contents are damaged"


def _set_aside(path: Path, damage: str, warn: Callable[[str], None]) -> None:
    try:
        path.replace(path.with_name(path.name + ".damaged"))
        warn(f"the n-gram table {path} cannot be read ({damage}); it was renamed to {path.name}.damaged")
    except OSError:
        warn(f"the n-gram table {path} cannot be read ({damage})")
