"""The n-gram table: counts equal those of a dictionary, files are bounded, damaged files do no harm."""

from __future__ import annotations

import itertools
import random
import struct
import tempfile
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.runtime.speculation.drafters import ngram_counts
from edgerun.runtime.speculation.drafters.interface import Drafter
from edgerun.runtime.speculation.drafters.ngram import (
    MAX_CANDIDATES,
    SMALLEST,
    NgramDrafter,
    NgramTable,
)
from edgerun.runtime.speculation.drafters.ngram_counts import write_table
from edgerun.runtime.speculation.tree import Source
from support.nightly import examples

VOCABULARY = 12
KEY = "a tokenizer"
texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=60), max_size=4)
small_texts = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=4)


def no_warning(line: str) -> None:
    raise AssertionError(line)


def opened(path: Path, key: str = KEY, vocab_size: int = VOCABULARY) -> NgramTable:
    return NgramTable.open(path, vocab_size=vocab_size, key=key, warn=no_warning)


def table_of(sequences: list[list[int]], max_bytes: int = 1 << 20) -> NgramTable:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        write_table(path, sequences, vocab_size=VOCABULARY, key=KEY, max_bytes=max_bytes)
        return opened(path)


def expected(
    sequences: list[list[int]],
) -> tuple[dict[tuple[int, ...], list[tuple[int, float, int]]], set[tuple[int, ...]]]:
    """For every context that is kept: token, probability and occurrences of the context, by plain counting.

    Also the contexts of which the last bit of a probability decides whether they are worth it: what they say is one of
    the equally probable best candidates of a shorter context.
    """
    followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for sequence in sequences:
        for place in range(1, len(sequence)):
            for order in range(1, min(place, 4) + 1):
                followers[tuple(sequence[place - order : place])][sequence[place]] += 1
    tokens = Counter(token for sequence in sequences for token in sequence)

    def probability(context: tuple[int, ...], token: int) -> float:
        if not context:
            return tokens[token] / sum(tokens.values())
        seen = followers[context]
        given = ngram_counts._DISCOUNT * len(seen) + ngram_counts._SHORTER_WEIGHT
        own = seen[token] - ngram_counts._DISCOUNT
        return (own + given * probability(context[1:], token)) / (seen.total() + ngram_counts._SHORTER_WEIGHT)

    kept = {}
    undecided = set()
    for context, seen in followers.items():
        shorter = followers[context[1:]] if len(context) > 1 else None
        if shorter is not None and shorter.total() == 1:
            continue  # the shorter context predicts the same
        likely = sorted(((token, probability(context, token)) for token in seen), key=lambda item: (-item[1], item[0]))
        if seen.total() == 1 and shorter is not None:
            shares = {token: probability(context[1:], token) for token in shorter}
            best = [token for token, share in shares.items() if share > max(shares.values()) - 1e-6]
            if likely[0][0] in best and len(best) > 1:
                undecided.add(context)
            elif likely[0][0] in best:
                continue
        kept[context] = [(token, share, seen.total()) for token, share in likely[:3] if share * 64 >= 1]
    return {context: entries for context, entries in kept.items() if entries}, undecided


@settings(max_examples=examples(150))
@given(st.one_of(texts, small_texts))
def test_counts_equal_those_of_a_dictionary(sequences: list[list[int]]) -> None:
    table = table_of(sequences)
    wanted, undecided = expected(sequences)
    max_entries = sum(map(len, wanted.values()))
    assert max_entries - len(undecided & wanted.keys()) <= len(table) <= max_entries
    for context, entries in wanted.items():
        found = table.find(context)[-1]
        if context in undecided and not found:
            continue
        shares = {token: share for token, share, _ in entries}
        assert len(found) == len(entries)
        for value, (_, share, times) in zip(found, entries, strict=True):
            # Equally likely tokens may change places over the last bit of a probability.
            assert shares[value >> 8] == pytest.approx(share, abs=1e-5)
            assert (value >> 2 & 63) / 64 - 1e-5 <= share <= ((value >> 2 & 63) + 1) / 64 + 1e-5
            assert value & 3 == (times >= 2) + (times >= 4) + (times >= 16)


@settings(max_examples=examples(50))
@given(small_texts)
def test_counting_in_parts_gives_the_same_table(sequences: list[list[int]]) -> None:
    whole = table_of(sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_counts, "_PART", 7)
        parts = table_of(sequences)
    for sequence in sequences:
        for place in range(len(sequence)):
            context = sequence[max(0, place - 4) : place]
            assert parts.find(context) == whole.find(context)


@settings(max_examples=examples(60))
@given(texts, st.integers(SMALLEST, 1500))
def test_tables_stay_within_max_bytes(sequences: list[list[int]], max_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        written = write_table(path, sequences, vocab_size=VOCABULARY, key=KEY, max_bytes=max_bytes)
        assert path.stat().st_size == written <= max_bytes
        opened(path)


def test_a_smaller_table_keeps_the_most_valuable_entries() -> None:
    chance = random.Random(0)
    often = [1, 2, 3, 4, 5, 6] * 50
    once = [chance.randrange(VOCABULARY) for _ in range(300)]
    table = table_of([often, once], SMALLEST + 200)
    assert len(table) > 10
    drafter = NgramDrafter(table)
    for place in range(1, 6):
        drafter.reset(often[:place])
        assert drafter.candidates(drafter.state())[0].token == often[place]


@pytest.mark.parametrize("sequences", [[], [[]], [[3]], [[3], [], [4]], [np.array([], np.int64)]])
def test_a_table_of_nothing_has_no_candidates(sequences: list[list[int]]) -> None:
    table = table_of(sequences)
    assert len(table) == 0
    drafter = NgramDrafter(table)
    for text in ([], [3], [3, 4, 5, 6, 7]):
        drafter.reset(text)
        assert drafter.candidates(drafter.state()) == []


@settings(max_examples=examples(100))
@given(small_texts, st.lists(st.integers(0, VOCABULARY - 1), max_size=8))
def test_candidates_keep_the_drafter_interface(sequences: list[list[int]], text: list[int]) -> None:
    drafter: Drafter = NgramDrafter(table_of(sequences))
    assert drafter.source is Source.NGRAM
    assert all(0 < share < 1 for share in drafter.prior)
    drafter.reset(text)
    candidates = drafter.candidates(drafter.state())
    assert len(candidates) <= MAX_CANDIDATES
    assert len({candidate.token for candidate in candidates}) == len(candidates)
    assert all(0 <= candidate.bucket < len(drafter.prior) for candidate in candidates)
    assert all(0 <= candidate.token < VOCABULARY for candidate in candidates)
    # Appended, followed or reached from a state: the same place.
    grown: Drafter = NgramDrafter(table_of(sequences))
    state = grown.state()
    for token in text:
        state = grown.after(state, token)
    assert grown.state() == ()
    for token in text:
        grown.append(token)
    assert grown.state() == state == drafter.state()


def test_longer_contexts_win() -> None:
    drafter = NgramDrafter(table_of([[1, 2, 3], [4, 2, 5]] * 5))
    drafter.reset([1, 2])
    assert [candidate.token for candidate in drafter.candidates(drafter.state())] == [3, 5]
    drafter.reset([4, 2])
    assert [candidate.token for candidate in drafter.candidates(drafter.state())] == [5, 3]


def sound_table(path: Path) -> bytes:
    chance = random.Random(1)
    write_table(path, [[chance.randrange(VOCABULARY) for _ in range(500)]], vocab_size=VOCABULARY, key=KEY)
    return path.read_bytes()


def damage_is_harmless(path: Path, data: bytes) -> bool:
    """Whether the file was set aside; one that still opens proposes no token outside the vocabulary."""
    path.write_bytes(data)
    lines: list[str] = []
    table = NgramTable.open(path, vocab_size=VOCABULARY, key=KEY, warn=lines.append)
    if table is not None:
        for context in itertools.product(range(VOCABULARY), repeat=2):
            assert all(value >> 8 < VOCABULARY for values in table.find(context) for value in values)
        return False
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert not path.exists()
    assert path.with_name(path.name + ".damaged").read_bytes() == data
    return True


def test_a_file_with_a_flipped_bit_is_set_aside(tmp_path: Path) -> None:
    data = sound_table(tmp_path / "table")
    chance = random.Random(2)
    places = [*range(80 * 8), *chance.sample(range(80 * 8, len(data) * 8), 300)]
    for place in places:
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        assert damage_is_harmless(tmp_path / "table", bytes(flipped))


def test_a_truncated_or_extended_file_is_set_aside(tmp_path: Path) -> None:
    data = sound_table(tmp_path / "table")
    for length in [*range(0, len(data), 97), len(data) - 1]:
        assert damage_is_harmless(tmp_path / "table", data[:length])
    assert damage_is_harmless(tmp_path / "table", data + b"\0")
    assert not damage_is_harmless(tmp_path / "table", data)


@settings(max_examples=examples(100))
@given(st.binary(max_size=300))
def test_any_other_file_is_set_aside(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert damage_is_harmless(Path(folder) / "table", data)


def test_a_table_of_another_model_is_not_used_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "table"
    data = sound_table(path)
    for key, vocab_size in (("another", VOCABULARY), (KEY, VOCABULARY + 1)):
        lines: list[str] = []
        assert NgramTable.open(path, vocab_size=vocab_size, key=key, warn=lines.append) is None
        assert len(lines) == 1
        assert "another model" in lines[0]
        assert path.read_bytes() == data
    opened(path)


def test_a_later_format_and_what_cannot_be_read_stay(tmp_path: Path) -> None:
    path = tmp_path / "table"
    header = bytearray(sound_table(path)[:64])
    struct.pack_into("<I", header, 8, 2)
    struct.pack_into("<I", header, 60, zlib.crc32(header[:60]))
    path.write_bytes(bytes(header) + b"what later versions write")
    for place in (path, tmp_path):  # a folder cannot be read
        lines: list[str] = []
        assert NgramTable.open(place, vocab_size=VOCABULARY, key=KEY, warn=lines.append) is None
        assert len(lines) == 1
        assert place.exists()
    assert NgramTable.open(tmp_path / "missing", vocab_size=VOCABULARY, key=KEY, warn=no_warning) is None
