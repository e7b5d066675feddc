"""Counts n-grams into a table: what follows one to four tokens, with which probability.

Every context of one to four tokens keeps its most probable continuations, each with a probability that mixes its own
counts with those of the shorter contexts (interpolated absolute discounting: Ney, Essen and Kneser, "On structuring
probabilistic dependences in stochastic language modelling", 1994). A continuation that a shorter context predicts as
well is not kept, and when there is too little room the entries whose loss costs the fewest correct candidates are
dropped first (after Seymore and Rosenfeld, "Scalable backoff language models", 1996).

Positions are counted in parts that share the token before them. All contexts of a position, and the shorter ones behind
them, end with that token, so no count spans two parts, and memory use is bounded by the size of a part.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ....models.atomic import write_atomically
from ....models.bundle import Bundle
from .ngram import (
    BUCKET,
    FORMAT,
    HASH_FACTOR,
    HASH_START,
    HEADER,
    LOW,
    MAGIC,
    MAX_BUNDLE_BYTES,
    MAX_ORDER,
    PROBABILITY_STEPS,
    SMALLEST,
    bundle_table_file,
    tokenizer_digest,
)

CONTINUATIONS: Final = 3
"""Maximum number of continuations kept for a context."""
_DISCOUNT: Final = 0.75
"""Absolute discount: taken from every count and given to the shorter context's probability."""
_SHORTER_WEIGHT: Final = 3.0
"""Weight of the shorter context in every context, in occurrences: later text is not the text that was counted."""
_PART: Final = 1 << 19
"""Approximate number of positions counted at a time; a very frequent token makes a larger part."""
_BREAK: Final = -1
"""Separates sequences."""

Ids: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
Hashes: TypeAlias = npt.NDArray[np.uint64]


class Entries(NamedTuple):
    """`n` continuations of contexts, in any order; within a context in descending probability."""

    hashes: Hashes
    """uint64 `[n]`: hash of the context."""
    values: npt.NDArray[np.uint32]
    """uint32 `[n]`: token * 256 + probability step * 4 + count class of the context."""
    value: Floats
    """float32 `[n]`: approximate number of correct candidates in the counted text that the entry adds."""

    def kept(self, which: Ids) -> Entries:
        """The entries with these indices."""
        return Entries(self.hashes[which], self.values[which], self.value[which])


def write_bundle_table(bundle: Bundle, sequences: Iterable[npt.ArrayLike], vocab_size: int) -> int:
    """Count token sequences into the table of a bundle's tokenizer, replacing an older one; returns its bytes.

    Raises:
        OSError: the file cannot be written.
    """
    path, key = bundle_table_file(bundle), tokenizer_digest(bundle)
    return write_table(path, sequences, vocab_size=vocab_size, key=key, max_bytes=MAX_BUNDLE_BYTES)


def write_table(
    path: Path,
    sequences: Iterable[npt.ArrayLike],
    *,
    vocab_size: int,
    key: str,
    max_bytes: int = 16 << 20,
) -> int:
    """Count token sequences and write a table of at most `max_bytes`; returns the bytes written.

    Args:
        path: file to write; replaced whole or not at all.
        sequences: one-dimensional sequences of token ids.
        vocab_size: vocabulary size of the model; ids are below it.
        key: identifies the tokenizer; the table can only be opened with the same key.
        max_bytes: maximum size of the file, at least `SMALLEST`; the least valuable entries are left out.

    Raises:
        OSError: the file cannot be written.
    """
    # Of n entries the buckets take 4 * (n // 6 + 2) bytes, the entries 8 * n.
    max_entries = (max_bytes - SMALLEST) * BUCKET // (8 * BUCKET + 4)
    data = _packed(count_entries(sequences, vocab_size, max_entries), vocab_size, key)
    write_atomically(path, data)
    return len(data)


def _packed(entries: Entries, vocab_size: int, key: str) -> bytes:
    """The contents of the file."""
    buckets = len(entries.hashes) // BUCKET + 1
    bucket = (entries.hashes >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)
    fingerprint = (entries.hashes & np.uint64(LOW)).astype("<u4")
    order = np.lexsort((fingerprint, bucket))  # stable: the entries of a context keep their order
    starts = np.searchsorted(bucket[order], np.arange(buckets + 1, dtype=np.uint64)).astype("<u4")
    body: bytes = starts.tobytes() + fingerprint[order].tobytes() + entries.values[order].astype("<u4").tobytes()
    digest = hashlib.sha256(key.encode()).digest()
    header = bytearray(HEADER.pack(MAGIC, FORMAT, vocab_size, digest, buckets, len(order), zlib.crc32(body), 0))
    struct.pack_into("<I", header, HEADER.size - 4, zlib.crc32(header[:-4]))
    return bytes(header) + body


def count_entries(sequences: Iterable[npt.ArrayLike], vocab_size: int, max_entries: int) -> Entries:
    """Count token sequences (texts, or a model's own outputs) and keep the most valuable entries.

    Args:
        sequences: one-dimensional sequences of token ids; contexts do not span two sequences.
        vocab_size: vocabulary size; ids are below it.
        max_entries: maximum number of entries returned.
    """
    token_ids = _joined(sequences)
    last = token_ids[:-1]
    countable = (token_ids[1:] != _BREAK) & (last != _BREAK)
    places = np.count_nonzero(countable)
    kept = Entries(np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.float32))
    if places == 0 or max_entries <= 0:
        return kept
    unigrams = np.bincount(token_ids[token_ids != _BREAK], minlength=vocab_size).astype(np.float32)
    unigrams /= unigrams.sum()
    parts = places // _PART + 1
    for part in range(parts):
        found = _count_part(token_ids, np.flatnonzero(countable & (last % parts == part)) + 1, unigrams)
        hashes, packed, value = zip(kept, *found, strict=True)
        kept = Entries(np.concatenate(hashes), np.concatenate(packed), np.concatenate(value))
        if len(kept.value) > max_entries:
            # A stable sort keeps the order within a context.
            kept = kept.kept(np.sort(np.argsort(-kept.value, kind="stable")[:max_entries]))
    return kept


def _joined(sequences: Iterable[npt.ArrayLike]) -> npt.NDArray[np.int32]:
    """The sequences with a break after each, after as many breaks as the longest context has tokens."""
    pieces = [np.full(MAX_ORDER, _BREAK, np.int32)]
    for sequence in sequences:
        tokens = np.asarray(sequence)
        if tokens.size:
            pieces += [tokens.astype(np.int32), pieces[0][:1]]
    return np.concatenate(pieces)


def _grouped(keys: Ids) -> tuple[Ids, Ids, Ids]:
    """The group of each key, the number of keys of each group, and the index of one key of each group."""
    _, index, of, size = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    return of, size, index


def _count_part(token_ids: npt.NDArray[np.int32], positions: Ids, unigrams: Floats) -> list[Entries]:
    """The entries of all contexts before the given positions, one order at a time."""
    found = []
    hashes = np.full(len(positions), HASH_START, np.uint64)
    context = np.zeros(len(positions), np.int64)
    shorter = unigrams[token_ids[positions]]  # probability given the context one token shorter
    shorter_best = np.full(len(positions), _BREAK, np.int64)
    for order in range(1, MAX_ORDER + 1):
        if len(positions) == 0:
            break
        before = token_ids[positions - order].astype(np.int64)
        hashes = (hashes ^ before.astype(np.uint64)) * np.uint64(HASH_FACTOR)
        hashes ^= hashes >> np.uint64(32)  # as in `NgramTable.find`
        context_of, context_size, _ = _grouped(context << 24 | before)
        token = token_ids[positions].astype(np.int64)
        gram_of, gram_size, gram = _grouped(context_of << 24 | token)
        owner = context_of[gram]
        kinds = np.bincount(owner)
        mass = gram_size - _DISCOUNT + (_DISCOUNT * kinds[owner] + _SHORTER_WEIGHT) * shorter[gram]
        probability = (mass / (context_size[owner] + _SHORTER_WEIGHT)).astype(np.float32)

        # The n-grams of a context by descending probability, ties by token id, so that the order of the text does not
        # change the table.
        ranked = np.lexsort((token[gram], -probability, owner))
        first = np.concatenate(([0], np.cumsum(kinds)))[:-1]
        best = token[gram[ranked[first]]]
        place = np.arange(len(ranked)) - np.repeat(first, kinds)
        total = context_size[owner[ranked]]
        member = gram[ranked]
        step = np.minimum(probability[ranked] * PROBABILITY_STEPS, PROBABILITY_STEPS - 1).astype(np.uint32)
        repeats = (total == 1) & (token[member] == shorter_best[member])
        chosen = np.flatnonzero((place < CONTINUATIONS) & (step > 0) & ~repeats)
        member = member[chosen]
        count_class = np.digitize(total[chosen], (2, 4, 16)).astype(np.uint32)
        values = token[member].astype(np.uint32) << 8 | step[chosen] << 2 | count_class
        gained = np.maximum(probability[ranked[chosen]] - shorter[member], 0)
        found.append(Entries(hashes[member], values, (gram_size[ranked[chosen]] * gained).astype(np.float32)))

        # A context seen once has one continuation, which a longer context could only repeat.
        longer = (context_size[context_of] > 1) & (token_ids[positions - order] != _BREAK)
        if order < MAX_ORDER:
            longer &= token_ids[positions - order - 1] != _BREAK
        positions, hashes, context = positions[longer], hashes[longer], context_of[longer]
        shorter, shorter_best = probability[gram_of[longer]], best[context]
    return found
