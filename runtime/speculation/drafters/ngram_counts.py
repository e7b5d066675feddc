"""Counting short token sequences: what followed the last one to four tokens, and how surely.

Every context of one to four tokens keeps its likeliest continuations, each with a probability that mixes its own counts
with those of the shorter contexts (interpolated absolute discounting: Ney, Essen and Kneser, "On structuring
probabilistic dependences in stochastic language modelling", 1994). What a shorter context says as well is not kept, and
when there is too little room the entries go first whose loss costs the fewest right guesses (after Seymore and
Rosenfeld, "Scalable backoff language models", 1996).

Positions are counted in parts that share the token before them. All contexts of a position, and the shorter ones behind
them, end with that token, so no count spans two parts, and memory is bounded by the part, not by the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

MOST_ORDER: Final = 4
"""Tokens of the longest context."""
MOST_TOKENS: Final = 1 << 24
"""The largest vocabulary: an entry holds a token in 24 bits."""
CONTINUATIONS: Final = 3
"""Kept for a context at most."""
PROBABILITY_STEPS: Final = 64
COUNT_CLASSES: Final = 4
"""A context was seen once, 2 or 3 times, 4 to 15 times, or more often."""

HASH_START: Final = 0x9E3779B97F4A7C15
HASH_FACTOR: Final = 0xD6E8FEB86659FD93
"""A context's hash takes its tokens last one first, so that of a longer context begins with that of the shorter."""

_DISCOUNT: Final = 0.75
"""Taken from every count and given to what the shorter context says."""
_DOUBT: Final = 3.0
"""Weight of the shorter context in every context, in times seen: the text to come is not the text counted."""
_PART: Final = 1 << 19
"""Positions counted at a time, about: a token met more often makes a larger part."""
_BREAK: Final = -1
"""Stands between sequences."""

Ids: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
Hashes: TypeAlias = npt.NDArray[np.uint64]


class Entries(NamedTuple):
    """`n` continuations of contexts; those of one context follow each other in no particular place, likeliest first."""

    hashes: Hashes
    """uint64 `[n]`: of the context."""
    values: npt.NDArray[np.uint32]
    """uint32 `[n]`: token * 256 + probability step * 4 + count class of the context."""
    worth: Floats
    """float32 `[n]`: right guesses lost in the text counted, about, if the entry were not there."""

    def kept(self, which: Ids) -> Entries:
        """Some of them."""
        return Entries(self.hashes[which], self.values[which], self.worth[which])


class _Groups(NamedTuple):
    """Equal keys grouped."""

    of: Ids
    """The group of each key."""
    size: Ids
    """How many keys each group has."""
    member: Ids
    """The place of one key of each group."""


def count_entries(sequences: Iterable[npt.ArrayLike], vocab_size: int, most: int) -> Entries:
    """The `most` entries that are worth most, of token sequences: texts, or a model's own outputs.

    Args:
        sequences: token ids, each one-dimensional; contexts do not reach from one into the next.
        vocab_size: ids are below it.
        most: entries returned at most.

    Raises:
        ValueError: a sequence is not one of token ids below `vocab_size`, or the vocabulary is too large.
    """
    if not 0 < vocab_size <= MOST_TOKENS:
        raise ValueError(f"a vocabulary of {vocab_size} tokens; 1 to {MOST_TOKENS} were expected")
    text = _joined(sequences, vocab_size)
    last = text[:-1]
    countable = (text[1:] != _BREAK) & (last != _BREAK)
    places = np.count_nonzero(countable)
    kept = Entries(np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.float32))
    if places == 0 or most <= 0:
        return kept
    unigrams = np.bincount(text[text != _BREAK], minlength=vocab_size).astype(np.float32)
    unigrams /= unigrams.sum()
    parts = places // _PART + 1
    for part in range(parts):
        found = _count_part(text, np.flatnonzero(countable & (last % parts == part)) + 1, unigrams)
        hashes, values, worth = zip(kept, *found, strict=True)
        kept = Entries(np.concatenate(hashes), np.concatenate(values), np.concatenate(worth))
        if len(kept.worth) > most:
            # A stable choice keeps the order within a context.
            kept = kept.kept(np.sort(np.argsort(-kept.worth, kind="stable")[:most]))
    return kept


def mixed(hashes: Any, tokens: Any) -> Any:
    """Hashes of the contexts one token longer; uint64 arrays. `ngram_table` has the same for one context."""
    product = (hashes ^ tokens) * np.uint64(HASH_FACTOR)
    return product ^ (product >> np.uint64(32))


def _joined(sequences: Iterable[npt.ArrayLike], vocab_size: int) -> npt.NDArray[np.int32]:
    """The sequences with a break after each, and as many in front as a context has tokens."""
    pieces = [np.full(MOST_ORDER, _BREAK, np.int32)]
    for sequence in sequences:
        tokens = np.asarray(sequence)
        if tokens.size == 0:
            continue
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"a sequence of shape {tokens.shape} and type {tokens.dtype}; token ids were expected")
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise ValueError(f"token ids from {tokens.min()} to {tokens.max()}; 0 to {vocab_size - 1} were expected")
        pieces += [tokens.astype(np.int32), pieces[0][:1]]
    return np.concatenate(pieces)


def _grouped(keys: Ids) -> _Groups:
    order = np.argsort(keys)
    ordered = keys[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    size = np.diff(starts, append=len(keys))
    of = np.empty(len(keys), np.int64)
    of[order] = np.repeat(np.arange(len(starts)), size)
    return _Groups(of, size, order[starts])


def _count_part(text: npt.NDArray[np.int32], positions: Ids, unigrams: Floats) -> list[Entries]:
    """The entries of all contexts before the given positions, an order at a time."""
    found = []
    hashes = np.full(len(positions), HASH_START, np.uint64)
    context = np.zeros(len(positions), np.int64)
    shorter = unigrams[text[positions]]  # what the context one token shorter makes of what did follow
    shorter_best = np.full(len(positions), _BREAK, np.int64)
    for order in range(1, MOST_ORDER + 1):
        if len(positions) == 0:
            break
        before = text[positions - order].astype(np.int64)
        hashes = mixed(hashes, before.astype(np.uint64))
        contexts = _grouped(context << 24 | before)
        token = text[positions].astype(np.int64)
        grams = _grouped(contexts.of << 24 | token)
        owner = contexts.of[grams.member]
        kinds = np.bincount(owner)
        mass = grams.size - _DISCOUNT + (_DISCOUNT * kinds[owner] + _DOUBT) * shorter[grams.member]
        probability = (mass / (contexts.size[owner] + _DOUBT)).astype(np.float32)

        # The grams of a context, likeliest first; of equally likely ones the lower token, so that any order of the
        # same text gives the same table.
        ranked = np.lexsort((token[grams.member], -probability, owner))
        first = np.concatenate(([0], np.cumsum(kinds)))[:-1]
        best = token[grams.member[ranked[first]]]
        place = np.arange(len(ranked)) - np.repeat(first, kinds)
        total = contexts.size[owner[ranked]]
        member = grams.member[ranked]
        step = np.minimum(probability[ranked] * PROBABILITY_STEPS, PROBABILITY_STEPS - 1).astype(np.uint32)
        repeats = (total == 1) & (token[member] == shorter_best[member])
        chosen = np.flatnonzero((place < CONTINUATIONS) & (step > 0) & ~repeats)
        member = member[chosen]
        count_class = np.digitize(total[chosen], (2, 4, 16)).astype(np.uint32)
        values = token[member].astype(np.uint32) << 8 | step[chosen] << 2 | count_class
        gained = np.maximum(probability[ranked[chosen]] - shorter[member], 0)
        found.append(Entries(hashes[member], values, (grams.size[ranked[chosen]] * gained).astype(np.float32)))

        # A context seen once has one continuation, and a longer one could only repeat it.
        longer = (contexts.size[contexts.of] > 1) & (text[positions - order] != _BREAK)
        if order < MOST_ORDER:
            longer &= text[positions - order - 1] != _BREAK
        positions, hashes, context = positions[longer], hashes[longer], contexts.of[longer]
        shorter, shorter_best = probability[grams.of[longer]], best[context]
    return found
