from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun import ContextError
from edgerun.runtime.kv import KVArena


def filled(rows: int, limit: int = 1000) -> KVArena:
    """An arena whose row at slot s holds the number s everywhere."""
    arena = KVArena(2, 3, limit=limit, head_dim=4)
    arena.reserve(rows)
    arena.data[:] = np.arange(arena.capacity, dtype=np.float32)[:, None]
    arena.commit(rows)
    return arena


def slots(arena: KVArena) -> list[int]:
    """The original slots of the committed rows; every layer, head and kind must agree."""
    rows = arena.data[:, :, :, : arena.length]
    assert (rows == rows[:1, :1, :1, :, :1]).all()
    return rows[0, 0, 0, :, 0].astype(int).tolist()


@given(base=st.integers(0, 50), data=st.data())
def test_compact_keeps_exactly_the_accepted_path(base: int, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 40))
    path = [0, *sorted(data.draw(st.sets(st.integers(1, nodes - 1))))] if nodes > 1 else [0]
    arena = filled(base + nodes)
    arena.rewind_to(base)
    arena.compact(base, path)
    assert slots(arena) == [*range(base), *(base + node for node in path)]


@pytest.mark.parametrize("path", [[], [1], [0, 2, 1], [0, 0], [0, 300]])
def test_compact_refuses_what_is_no_path(path: list[int]) -> None:
    arena = filled(10)
    arena.rewind_to(5)
    with pytest.raises(ValueError, match="path"):
        arena.compact(5, path)
    assert arena.length == 5


def test_growth_doubles_keeps_rows_and_stops_at_the_limit() -> None:
    arena = KVArena(1, 1, 2, limit=700)
    assert arena.capacity == 256
    arena.data[:] = 7
    arena.commit(256)
    before = arena.generation
    arena.reserve(1)
    assert (arena.capacity, arena.generation) == (512, before + 1)
    assert (arena.data[:, :, :, :256] == 7).all()
    arena.reserve(400)
    assert arena.capacity == 700
    with pytest.raises(ContextError, match="701 tokens do not fit the model's context of 700"):
        arena.reserve(445)
    assert arena.length == 256


def test_rewind_moves_only_backwards() -> None:
    arena = filled(10)
    arena.rewind_to(4)
    assert slots(arena) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cannot rewind"):
        arena.rewind_to(5)


def test_commit_never_passes_the_capacity() -> None:
    arena = KVArena(1, 1, 2, limit=5)
    with pytest.raises(ValueError, match="cannot commit"):
        arena.commit(6)


def test_snapshot_restores_into_another_arena() -> None:
    rows = filled(300).snapshot()
    arena = KVArena(2, 3, 4, limit=400)
    arena.restore(rows)
    assert slots(arena) == list(range(300))
    rows[:] = -1
    assert slots(arena) == list(range(300))


def test_restore_refuses_other_shapes() -> None:
    arena = KVArena(2, 3, 4, limit=400)
    with pytest.raises(ValueError, match="expected float32 rows"):
        arena.restore(np.zeros((2, 2, 3, 5, 8), np.float32))
    with pytest.raises(ContextError):
        arena.restore(np.zeros((2, 2, 3, 401, 4), np.float32))
