"""Recycled candidates: what is kept of logits, and files that were not always written by us."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgerun.runtime.speculation.drafters.recycling import RecycledTable, RecyclingDrafter
from support.nightly import examples

KEPT = 3


def proposed(table: RecycledTable, token: int) -> list[int]:
    return [candidate.token for candidate in table.candidates(token)]


def ranked(logits: np.ndarray) -> list[int]:
    """The highest places, ties to the lowest id, by sorting everything."""
    return sorted(range(logits.size), key=lambda place: (-logits[place], place))[:KEPT]


@given(st.integers(0, 10_000), st.sampled_from([1, 2, 3, 5, 64, 191, 192, 193, 255, 300, 1000]), st.integers(1, 9))
@settings(max_examples=examples(150))
def test_the_highest_logits_are_kept_and_ties_go_to_the_lowest_id(seed: int, size: int, values: int) -> None:
    logits = np.random.default_rng(seed).integers(0, values, size).astype(np.float32)
    table = RecycledTable(size)
    table.learn(0, logits)
    assert proposed(table, 0) == ranked(logits)


@pytest.mark.parametrize("wild", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [5, 300])
@pytest.mark.parametrize("share", [0.1, 0.9, 1.0])
def test_nan_logits_do_no_harm(wild: float, size: int, share: float) -> None:
    random = np.random.default_rng(1)
    logits = random.standard_normal(size).astype(np.float32)
    logits[random.random(size) < share] = wild
    table = RecycledTable(size)
    table.learn(0, logits)
    for candidate in table.candidates(0):
        assert 0 <= candidate.token < size
        assert 0 <= candidate.bucket < len(RecyclingDrafter.prior)


def test_tokens_that_have_not_occurred_have_no_candidates() -> None:
    table = RecycledTable(300)
    drafter = RecyclingDrafter(table)
    assert drafter.candidates(drafter.state()) == ()
    drafter.reset([])
    assert drafter.candidates(drafter.state()) == ()
    drafter.reset([4, 299])
    assert list(drafter.candidates(drafter.state())) == []
    table.learn(5, np.arange(300, dtype=np.float32))
    assert list(drafter.candidates(drafter.state())) == []
    state = drafter.after(drafter.state(), 5)
    drafter.append(5)
    assert drafter.state() == state
    assert [candidate.token for candidate in drafter.candidates(state)] == [299, 298, 297]
    # What was last seen counts.
    table.learn(5, -np.arange(300, dtype=np.float32))
    assert proposed(table, 5) == [0, 1, 2]


@pytest.mark.parametrize(
    ("first", "second", "classes"),
    [(0.0, 0.0, (0, 5, 5)), (0.6, 1.0, (1, 6, 7)), (1.5, 3.0, (2, 7, 8)), (3.0, 3.5, (3, 8, 8)), (9.0, 9.0, (4, 9, 9))],
)
def test_a_candidates_bucket_is_the_class_of_its_margin(first: float, second: float, classes: tuple[int, ...]) -> None:
    logits = np.full(300, -50, np.float32)
    logits[[7, 3, 9]] = 0, -first, -second
    table = RecycledTable(300)
    table.learn(1, logits)
    assert sorted(candidate.bucket for candidate in table.candidates(1)) == sorted(classes)
    assert len(RecyclingDrafter.prior) == 10


def filled(vocab_size: int = 40, tokens: int = 9) -> RecycledTable:
    table, random = RecycledTable(vocab_size), np.random.default_rng(2)
    for token in random.permutation(vocab_size)[:tokens].tolist():
        table.learn(token, random.standard_normal(vocab_size).astype(np.float32) * 3)
    return table


def everything(table: RecycledTable, vocab_size: int = 40) -> list[list[tuple[int, int]]]:
    return [[tuple(candidate) for candidate in table.candidates(token)] for token in range(vocab_size)]


def test_saved_tables_can_be_loaded(tmp_path: Path) -> None:
    table, path = filled(), tmp_path / "deep" / "recycled"
    path.parent.mkdir()
    assert table.changed
    table.save(path)
    assert not table.changed
    other = RecycledTable(40)
    assert other.load(path)
    assert everything(other) == everything(table)
    assert not other.changed
    assert [entry.name for entry in path.parent.iterdir()] == ["recycled"]


def test_missing_files_folders_and_other_files_are_refused(tmp_path: Path) -> None:
    table = RecycledTable(40)
    np.save(tmp_path / "array.npy", np.arange(4))
    np.savez(tmp_path / "arrays.npz", seen=np.arange(4))
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not a table", encoding="utf-8")
    filled(60).save(tmp_path / "another vocabulary")
    for name in ("missing", ".", "array.npy", "arrays.npz", "empty", "text", "another vocabulary"):
        assert not table.load(tmp_path / name), name
    assert everything(table) == [[]] * 40


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recycled") / "table"
    filled().save(path)
    return path.read_bytes()


@given(data=st.data())
@settings(max_examples=examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_do_no_harm(saved: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(saved)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(damaged) * 8 - 1))
        damaged[at // 8] ^= 1 << at % 8
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged))) :]
    path = tmp_path / "damaged"
    path.write_bytes(damaged)
    table = RecycledTable(40)
    loaded = table.load(path)
    candidates = everything(table)
    assert all(0 <= token < 40 and 0 <= bucket < 10 for row in candidates for token, bucket in row)
    assert candidates == [[]] * 40 if not loaded else bytes(damaged) == saved
