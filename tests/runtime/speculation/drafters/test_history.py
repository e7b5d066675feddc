from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgerun.models.file_system import locked
from edgerun.runtime.speculation.drafters import history_store
from edgerun.runtime.speculation.drafters.history_index import NEIGHBOURS, REACH, Covered, HistoryIndex, encode
from edgerun.runtime.speculation.drafters.history_store import HistoryDrafter, HistoryStore
from edgerun.runtime.speculation.drafters.interface import Agreement, Candidate, Drafter, bucket
from support.processes import started

MIN_BYTES = 64 << 10
VOCABULARY = 4
ANY = st.booleans()
SEQUENCES = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=30), max_size=6)

# Sequence `n` of process `p`: both numbers, then tokens computed from `n`, so that a reader can check it.
APPEND = """
import sys
from pathlib import Path
from edgerun.runtime.speculation.drafters.history_store import HistoryStore
folder, process, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = HistoryStore(folder, 1 << 20, print)
print("ready", flush=True)
for number in range(count):
    size = number * 7919 % 3000
    kept = store.append([process, number, *((number + at) % 1000 for at in range(size))])
    while not kept:
        kept = store.append([process, number, *((number + at) % 1000 for at in range(size))])
    if number % 5 == 4:
        store.reindex()
"""


def unexpected(text: str) -> None:
    pytest.fail(text)


def stored(folder: Path, *sequences: Sequence[int], warn: Callable[[str], None] = unexpected) -> HistoryStore:
    store = HistoryStore(folder, MIN_BYTES, warn)
    for sequence in sequences:
        assert store.append(sequence)
    return store


def with_history(folder: Path, *sequences: list[int]) -> HistoryDrafter:
    store = stored(folder, *sequences)
    store.reindex()
    return HistoryDrafter(store, 100)


def kept(folder: Path) -> list[list[int]]:
    """The stored sequences, oldest first."""
    with closing(sqlite3.connect(folder / "history.db")) as database:
        return [np.frombuffer(row[0], "<u4").tolist() for row in database.execute("SELECT tokens FROM sequences")]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def appending(folder: Path, process: int, count: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", APPEND, str(folder), str(process), str(count)]
    return started(command, stdout=subprocess.PIPE)


def check_whole(sequences: list[list[int]]) -> None:
    for _, number, *rest in sequences:
        assert rest == [(number + at) % 1000 for at in range(number * 7919 % 3000)]


def test_sequences_are_kept_in_order(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path / "model", MIN_BYTES, unexpected)
    assert (store.unindexed_tokens(), store.reindex()) == (0, True)
    assert not (tmp_path / "model").exists()
    stored(tmp_path / "model", [1, 2, 3], [], range(5))
    assert kept(tmp_path / "model") == [[1, 2, 3], [0, 1, 2, 3, 4]]


def test_an_index_is_up_to_date_until_a_sequence_is_added(tmp_path: Path) -> None:
    store = stored(tmp_path, [1, 2, 3])
    assert store.unindexed_tokens()
    assert store.reindex()
    assert store.unindexed_tokens() == 0
    again = HistoryStore(tmp_path, MIN_BYTES, unexpected)
    assert again.unindexed_tokens() == 0
    again.append([4])
    assert store.unindexed_tokens()
    assert len(store.index) == 2


@settings(max_examples=20)
@example(MIN_BYTES, [*[0] * 16, 2037, 1986, 5])
@given(st.integers(MIN_BYTES, 3 * MIN_BYTES), st.lists(st.integers(0, 12_000), min_size=5, max_size=40))
def test_the_oldest_are_deleted_and_the_folder_stays_within_its_limit(max_bytes: int, sizes: list[int]) -> None:
    with TemporaryDirectory() as place:
        folder = Path(place)
        store = HistoryStore(folder, max_bytes, lambda _: None)
        all_of_them = [[number, *range(size)] for number, size in enumerate(sizes)]
        for number, sequence in enumerate(all_of_them):
            if number % 7 == 4:  # its header
                flip(folder / "history.db", 0)
            assert store.append(sequence)
            if number % 4 == 0:
                assert store.reindex()
            assert size_of(folder) <= max_bytes
        assert kept(folder)[-1] == sequence[-len(kept(folder)[-1]) :]
        store.reindex()
        assert size_of(folder) <= max_bytes


def test_a_lower_limit_is_applied(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path, 4 * MIN_BYTES, unexpected)
    for number in range(30):
        store.append([number] * 120)
    smaller = HistoryStore(tmp_path, MIN_BYTES, unexpected)
    smaller.reindex()
    assert size_of(tmp_path) <= MIN_BYTES
    numbers = [sequence[0] for sequence in kept(tmp_path)]
    assert numbers == list(range(30 - len(numbers), 30))
    assert len(numbers) > 3


def test_operations_without_the_lock_are_skipped(tmp_path: Path) -> None:
    warnings: list[str] = []
    store = HistoryStore(tmp_path, MIN_BYTES, warnings.append)
    store.append([1, 2])
    with locked(tmp_path / "lock", 1.0):
        assert not store.append([3])
        assert not store.reindex()
    assert len(warnings) == 2
    assert kept(tmp_path) == [[1, 2]]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    warnings: list[str] = []
    store = HistoryStore(tmp_path / "file" / "model", MIN_BYTES, warnings.append)
    assert not store.append([1, 2])
    assert len(warnings) == 1


@pytest.mark.parametrize("processes", [3, pytest.param(15, marks=pytest.mark.nightly)])
def test_a_process_killed_at_any_moment_leaves_a_readable_store(tmp_path: Path, processes: int) -> None:
    draw = random.Random(0)
    numbers: list[int] = []
    for process in range(processes):
        with appending(tmp_path, process, 10_000) as running:
            try:
                assert running.stdout.readline().strip() == b"ready"
                time.sleep(draw.uniform(0, 0.08))
            finally:
                running.kill()
        store = HistoryStore(tmp_path, 1 << 20, unexpected)
        sequences = kept(tmp_path)
        check_whole(sequences)
        mine = [number for owner, number, *_ in sequences if owner == process]
        assert mine == list(range(min(mine, default=0), max(mine, default=-1) + 1))
        numbers += mine
        assert store.append([process, 0])
        assert kept(tmp_path)[-1] == [process, 0]
        assert store.reindex()
        assert size_of(tmp_path) <= 1 << 20
    assert numbers or processes < 15


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    with appending(tmp_path, 0, 20) as first, appending(tmp_path, 1, 20) as second:
        first.communicate()
        second.communicate()
    sequences = kept(tmp_path)
    check_whole(sequences)
    for process in (0, 1):
        assert [number for owner, number, *_ in sequences if owner == process] == list(range(20))


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


@given(SEQUENCES, st.lists(st.integers(0, 1 << 16), max_size=3), st.binary(max_size=40), st.integers(0, 1 << 14), ANY)
def test_a_damaged_database_stays_usable(
    sequences: list[list[int]], bits: list[int], junk: bytes, end: int, index_first: bool
) -> None:
    """Nothing is proposed that was not stored, and everything works from now on."""
    with TemporaryDirectory() as place:
        path = Path(place) / "history.db"
        store = stored(Path(place), *sequences, [1 << 30, 1, 2], warn=lambda _: None)
        for bit in bits:
            flip(path, bit)
        path.write_bytes(path.read_bytes()[:end] + junk)
        if index_first:
            store.reindex()
        assert store.append([3, 2, 1])
        assert store.reindex()
        followers = {pair for sequence in [*sequences, [1, 2], [3, 2, 1]] for pair in pairwise(sequence)}
        drafter = HistoryDrafter(store, VOCABULARY)
        found = {(token, each.token) for token in range(VOCABULARY) for each in drafter.candidates((token,))}
        assert kept(Path(place))[-1] == [3, 2, 1]
        assert found <= followers


def test_a_damaged_sequence_is_left_out_and_a_damaged_database_is_set_aside(tmp_path: Path) -> None:
    warnings: list[str] = []
    store = stored(tmp_path, [1, 2, 3], [7, 8, 9], [4, 5, 6], warn=warnings.append)
    path = tmp_path / "history.db"
    flip(path, 8 * path.read_bytes().index(np.array([7, 8, 9], "<u4").tobytes()))
    assert store.reindex()
    drafter = HistoryDrafter(store, 20)
    assert [len(drafter.candidates((token,))) for token in (1, 4, 8)] == [1, 1, 0]
    assert not warnings
    flip(path, 0)
    damaged = path.read_bytes()
    assert store.append([1, 2])
    assert kept(tmp_path) == [[1, 2]]
    assert (tmp_path / "history.db.damaged").read_bytes() == damaged
    assert [warning.partition(" (")[0] for warning in warnings] == [f"{path} is damaged"]


@given(SEQUENCES, st.integers(0, 1 << 14), st.lists(st.integers(0, VOCABULARY - 1), max_size=20), ANY)
def test_a_damaged_index_is_not_used(sequences: list[list[int]], bit: int, text: list[int], cut: bool) -> None:
    with TemporaryDirectory() as place:
        folder = Path(place)
        store = stored(folder, *sequences, [0, 1, 2, 0, 1])
        store.reindex()
        if cut:
            path = folder / "index"
            path.write_bytes(path.read_bytes()[: bit % path.stat().st_size])
        else:
            flip(folder / "index", bit)
        # The index that was read before is still good.
        drafter = HistoryDrafter(store, VOCABULARY)
        for size in range(len(text) + 1):
            drafter.reset(text[:size])
            assert all(0 <= candidate.token < VOCABULARY for candidate in drafter.candidates(drafter.state()))
        warnings: list[str] = []
        later = HistoryStore(folder, MIN_BYTES, warnings.append)
        assert later.index is None
        assert len(warnings) == 1
        assert HistoryDrafter(later, VOCABULARY).candidates((0, 1)) == []
        assert later.reindex()
        assert HistoryDrafter(later, VOCABULARY).candidates((0, 1)) != []


def held_by_this_process(folder: Path) -> list[str]:
    """Files of a folder that are open or mapped."""
    descriptors = [path.readlink().as_posix() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    mapped = [line.partition("/")[2] for line in Path("/proc/self/maps").read_text("utf-8").splitlines()]
    return [path for path in [*descriptors, *(f"/{path}" for path in mapped)] if path.startswith(folder.as_posix())]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux lists the files that a process has mapped")
def test_no_file_stays_open_or_mapped(tmp_path: Path) -> None:
    store = stored(tmp_path, [1, 2, 3])
    store.reindex()
    again = HistoryStore(tmp_path, MIN_BYTES, unexpected)
    assert None not in (store.index, again.index)
    assert held_by_this_process(tmp_path) == []


def test_an_index_that_another_process_reads_is_replaced_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows refuses to remove it meanwhile."""
    store, unlink = stored(tmp_path, [1, 2, 3]), os.unlink
    assert store.reindex()
    (tmp_path / f"index-{'0' * 32}-7").write_bytes(b"of an earlier version")
    store.append([4, 5, 6])

    def refusing(path: Path) -> None:
        if path.name == "index":
            raise PermissionError(13, "The process cannot access the file", str(path))
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refusing)
        assert not store.reindex()
    assert HistoryStore(tmp_path, MIN_BYTES, unexpected).unindexed_tokens() == 3
    assert store.reindex()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["history.db", "index", "lock"]
    assert store.unindexed_tokens() == 0


def test_a_little_of_much_is_not_indexed_at_the_end_but_by_a_later_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_store, "_FEW_TOKENS", 100)
    for first, left in ((0, 0), (1990, 10), (1700, 0)):
        store = HistoryStore(tmp_path, 1 << 20, unexpected)
        store.append(range(first, 2000))
        store.index_rest()
        assert store.unindexed_tokens() == left


def test_a_drafter_keeps_its_index_until_the_next_answer(tmp_path: Path) -> None:
    store = HistoryStore(tmp_path, 1 << 20, unexpected)
    drafter = HistoryDrafter(store, 100)
    drafter.reset([1, 2])
    store.append([1, 2, 3])
    store.reindex()
    assert drafter.candidates(drafter.state()) == []
    drafter.reset([1, 2])
    assert [candidate.token for candidate in drafter.candidates(drafter.state())] == [3]


def test_an_index_of_another_database_is_not_used(tmp_path: Path) -> None:
    store = stored(tmp_path, [1, 2, 3])
    store.reindex()
    (tmp_path / "history.db").unlink()
    store = stored(tmp_path, [4, 5, 6])
    assert store.index is None
    store.reindex()
    (tmp_path / "history.db").unlink()
    assert store.reindex()
    assert store.index is None


def test_an_index_that_another_process_made_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (HistoryStore(tmp_path, MIN_BYTES, unexpected) for _ in range(2))
    one.append([1, 2, 3])
    other.append([4, 5, 6])
    assert one.reindex()
    with monkeypatch.context() as patch:
        patch.setattr(history_store, "encode", lambda *_: pytest.fail("indexed twice"))
        assert other.reindex()
    assert other.unindexed_tokens() == 0
    assert HistoryDrafter(other, 10).candidates((1, 2)) != []


def test_an_index_never_replaces_one_that_has_more(tmp_path: Path) -> None:
    one, other = (HistoryStore(tmp_path, MIN_BYTES, unexpected) for _ in range(2))
    one.append([1, 2, 3])
    grown = []

    def other_is_faster() -> None:
        if not grown:
            grown.append(other.append([4, 5, 6]) and other.reindex())

    assert one.reindex(other_is_faster)
    assert grown == [True]
    assert one.unindexed_tokens() == other.unindexed_tokens() == 0
    assert HistoryStore(tmp_path, MIN_BYTES, unexpected).unindexed_tokens() == 0


def test_the_store_can_be_used_between_the_steps_of_indexing(tmp_path: Path) -> None:
    store, other = (HistoryStore(tmp_path, 1 << 20, unexpected) for _ in range(2))
    for number in range(300):
        store.append([number, number + 1])
    steps = []

    def pause() -> None:
        steps.append(other.append([7, 8, 9]))

    assert store.reindex(pause)
    assert len(steps) > 6
    assert all(steps)
    assert store.unindexed_tokens() == 3 * len(steps)
    assert len(store.index) == 300


def test_indexing_that_is_stopped_changes_nothing(tmp_path: Path) -> None:
    store = stored(tmp_path, [1, 2, 3])
    store.reindex()
    store.append([4, 5, 6])
    index, files = store.index, sorted(tmp_path.iterdir())
    for steps in range(6):
        with pytest.raises(StopIteration):
            store.reindex(partial(next, iter(range(steps))))
        assert store.index is index
        assert sorted(tmp_path.iterdir()) == files
    assert kept(tmp_path) == [[1, 2, 3], [4, 5, 6]]


def test_sequences_deleted_while_they_are_indexed_are_not_indexed(tmp_path: Path) -> None:
    store, other = (HistoryStore(tmp_path, MIN_BYTES, unexpected) for _ in range(2))
    store.append([1, 2, 3])

    def fill() -> None:
        for number in range(12):
            other.append([number] * 400)

    assert not store.reindex(fill)
    assert store.index is None
    assert store.reindex()
    assert size_of(tmp_path) <= MIN_BYTES
    assert HistoryDrafter(store, 10).candidates((1, 2)) == []


def agreeing(context: list[int], before: list[int]) -> int:
    """Number of tokens at the end of two contexts that agree, of the last `REACH`."""
    pairs = list(zip(reversed(context[-REACH:]), reversed(before), strict=False))
    return next((size for size, (mine, other) in enumerate(pairs) if mine != other), len(pairs))


@given(SEQUENCES, st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20))
def test_an_index_finds_the_longest_matches(sequences: list[list[int]], context: list[int]) -> None:
    index = HistoryIndex(encode([np.array(sequence, np.uint32) for sequence in sequences], Covered(b"\0" * 16, 0)))
    found = index.find(context[-REACH:])
    assert len(index) == sum(max(0, len(sequence) - 1) for sequence in sequences)
    places = [
        (agreeing(context, sequence[:at]), sequence[at]) for sequence in sequences for at in range(1, len(sequence))
    ]
    wanted = Counter(agreed for agreed, _ in places if agreed)
    got = Counter(min(len(context), REACH) - missing for missing, _, _ in found)
    assert len(found) <= 2 * NEIGHBOURS
    assert all((min(len(context), REACH) - missing, token) in places for missing, _, token in found)
    assert len({age for _, age, _ in found}) == len(found)
    if wanted:
        longest = max(wanted)
        assert max(got) == longest
        assert got[longest] == wanted[longest] or got[longest] >= NEIGHBOURS
    else:
        assert not found


def test_candidates_followed_the_longest_match(tmp_path: Path) -> None:
    made: Drafter = with_history(tmp_path, [1, 2, 3, 4, 5], [9, 3, 8], [2, 3, 6])
    made.reset([7, 1, 2, 3])
    assert made.candidates(made.state()) == [
        Candidate(4, bucket(3, Agreement.ONCE, 0)),
        Candidate(6, bucket(2, Agreement.SPLIT, 1)),
        Candidate(8, bucket(1, Agreement.SPLIT, 2)),
    ]
    assert made.candidates(made.after(made.state(), 4)) == [Candidate(5, bucket(4, Agreement.ONCE, 0))]
    assert made.candidates(made.after(made.state(), 77)) == []
    made.append(4)
    assert made.candidates(made.state()) == [Candidate(5, bucket(4, Agreement.ONCE, 0))]


def test_the_most_frequent_candidate_is_first_and_of_equals_the_latest(tmp_path: Path) -> None:
    made = with_history(tmp_path, [1, 2], [1, 3], [1, 3], [1, 4], [1, 3])
    assert made.candidates((1,)) == [
        Candidate(3, bucket(1, Agreement.MOSTLY, 0)),
        Candidate(4, bucket(1, Agreement.MOSTLY, 1)),
        Candidate(2, bucket(1, Agreement.MOSTLY, 2)),
    ]
    assert with_history(tmp_path / "b", [5, 6], [5, 6]).candidates((5,)) == [
        Candidate(6, bucket(1, Agreement.ALWAYS, 0))
    ]


def test_tokens_outside_the_vocabulary_are_not_proposed(tmp_path: Path) -> None:
    made = with_history(tmp_path, [1, 2, 500], [1, 2, 600], [2, 7])
    assert [candidate.token for candidate in made.candidates((1, 2))] == [7]
