"""All arenas keep the same rows whatever is committed, rewound and compacted; they differ in where."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun import ContextError
from edgerun.runtime.kv.arena import CacheTensorType, InPlaceArena, KVArena
from edgerun.runtime.kv.borrowed import BorrowedArena
from edgerun.runtime.kv.growing import GrowingArena

FLOAT = np.dtype(np.float32)
USUAL = CacheTensorType(FLOAT, (1, 3, 0, 4), 2)
FUSED = CacheTensorType(np.dtype(np.float16), (2, 1, 3, 0, 4), 3)
TURNED = CacheTensorType(np.dtype(np.int8), (1, 3, 4, 0), 3)
FORMS = (USUAL, USUAL, FUSED, TURNED)


class Lent(BorrowedArena):
    """All but the first of the tensors of an arena that nobody else uses."""

    def __init__(self, forms: tuple[CacheTensorType, ...], limit: int) -> None:
        super().__init__(forms, range(1, len(forms) + 1), limit)
        self.owner = InPlaceArena((USUAL, *forms), limit)
        self.borrow(self.owner)


ARENAS: tuple[Callable[[tuple[CacheTensorType, ...], int], KVArena], ...] = (InPlaceArena, GrowingArena, Lent)


def write(arena: KVArena, numbers: npt.NDArray[np.int64]) -> None:
    """What a pass does: write rows that hold these numbers everywhere after the committed ones, uncommitted."""
    arena.reserve(numbers.size)
    if isinstance(arena, InPlaceArena | BorrowedArena):
        for tensor, form in zip(arena.tensors(), arena.tensor_types, strict=True):
            rows = np.moveaxis(tensor, form.axis, -1)
            rows[..., arena.length : arena.length + numbers.size] = numbers
    elif isinstance(arena, GrowingArena):
        for past, present, form in zip(arena.past(), arena.present(numbers.size), arena.tensor_types, strict=True):
            rows = np.moveaxis(present, form.axis, -1)
            rows[..., : arena.length] = np.moveaxis(past, form.axis, -1)
            rows[..., arena.length :] = numbers
        arena.finish_pass(numbers.size)


def filled(kind: Callable[..., KVArena], rows: int, limit: int = 1000) -> KVArena:
    """An arena whose row at slot s holds the number s (below 100 for int8) everywhere."""
    arena = kind(FORMS, limit)
    write(arena, np.arange(rows) % 100)
    arena.commit(rows)
    return arena


def held(arena: KVArena) -> list[int]:
    """The numbers of the committed rows; every tensor has to agree."""
    found = []
    for stack, form in zip(arena.snapshot(), arena.groups, strict=True):
        rows = np.moveaxis(stack, form.axis + 1, 0).reshape(arena.length, stack.size // max(arena.length, 1))
        assert (rows == rows[:, :1]).all()
        found.append(rows[:, :1].astype(int).ravel().tolist())
    assert all(rows == found[0] for rows in found)
    return found[0]


@pytest.mark.parametrize("kind", ARENAS)
@given(data=st.data())
def test_rows_are_those_of_a_list(kind: Callable[..., KVArena], data: st.DataObject) -> None:
    arena = kind(FORMS, 400)
    model: list[int] = []
    for step in range(data.draw(st.integers(1, 8), "steps")):
        width = data.draw(st.integers(1, min(90, 400 - len(model))), "width")
        new = (np.arange(width) * 3 + step) % 100
        write(arena, new)
        match data.draw(st.sampled_from(["commit", "compact", "rewind"]), "then"):
            case "commit":
                kept = data.draw(st.integers(0, width), "kept")
                arena.commit(kept)
                model += new[:kept].tolist()
            case "compact":
                path = [0, *sorted(data.draw(st.sets(st.integers(1, width - 1))))] if width > 1 else [0]
                arena.compact(len(model), path)
                model += new[path].tolist()
            case _:
                length = data.draw(st.integers(0, len(model)), "length")
                arena.rewind_to(length)
                del model[length:]
        assert held(arena) == model
        if len(model) == 400:
            break


@pytest.mark.parametrize("kind", ARENAS)
@pytest.mark.parametrize("path", [[], [1], [0, 2, 1], [0, 0], [0, 300]])
def test_compact_refuses_what_is_no_path(kind: Callable[..., KVArena], path: list[int]) -> None:
    arena = filled(kind, 10)
    arena.rewind_to(5)
    with pytest.raises(ValueError, match="path"):
        arena.compact(5, path)
    assert arena.length == 5


def test_growth_doubles_keeps_rows_and_stops_at_the_limit() -> None:
    arena = InPlaceArena(FORMS, 700)
    assert arena.capacity == 256
    write(arena, np.arange(256) % 100)
    arena.commit(256)
    before = arena.generation
    arena.reserve(1)
    assert (arena.capacity, arena.generation) == (512, before + 1)
    assert held(arena) == [slot % 100 for slot in range(256)]
    arena.reserve(400)
    assert arena.capacity == 700
    with pytest.raises(ContextError, match="701 tokens do not fit the model's context of 700"):
        arena.reserve(445)
    assert arena.length == 256


def test_a_cache_of_fixed_size_is_that_large_from_the_start_and_limits_the_text() -> None:
    arena = InPlaceArena(FORMS, 1000, 64)
    assert (arena.capacity, arena.limit) == (64, 64)
    with pytest.raises(ContextError, match="65 tokens do not fit the model's context of 64"):
        arena.reserve(65)
    short = InPlaceArena(FORMS, 10, 64)
    assert (short.capacity, short.limit) == (64, 10)
    with pytest.raises(ContextError):
        short.reserve(11)


def test_a_growing_arena_keeps_rows_as_it_grows() -> None:
    arena = filled(GrowingArena, 60)
    arena.rewind_to(50)
    write(arena, np.arange(200) % 100)
    arena.commit(200)
    assert arena.capacity == 256
    assert held(arena) == [*range(50), *(slot % 100 for slot in range(200))]
    with pytest.raises(ContextError, match="1001 tokens do not fit"):
        arena.reserve(751)


@pytest.mark.parametrize("kind", ARENAS)
def test_rewind_moves_only_backwards(kind: Callable[..., KVArena]) -> None:
    arena = filled(kind, 10)
    arena.rewind_to(4)
    assert held(arena) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="cannot rewind"):
        arena.rewind_to(5)


@pytest.mark.parametrize("kind", ARENAS)
def test_commit_never_passes_what_was_written(kind: Callable[..., KVArena]) -> None:
    arena = kind(FORMS, 5)
    with pytest.raises(ValueError, match="cannot commit"):
        arena.commit(6)


@pytest.mark.parametrize("kind", ARENAS)
@pytest.mark.parametrize("other", ARENAS)
def test_snapshot_restores_into_another_arena(kind: Callable[..., KVArena], other: Callable[..., KVArena]) -> None:
    rows = filled(kind, 300).snapshot()
    arena = other(FORMS, 400)
    arena.restore(rows)
    assert held(arena) == [slot % 100 for slot in range(300)]
    for array in rows:
        array[:] = -1
    assert held(arena) == [slot % 100 for slot in range(300)]


@pytest.mark.parametrize("kind", ARENAS)
def test_padding_makes_rows_without_a_pass(kind: Callable[..., KVArena]) -> None:
    arena = filled(kind, 3)
    arena.pad_to(70, 1.0)
    assert held(arena) == [0, 1, 2, *[1] * 67]


@pytest.mark.parametrize("kind", ARENAS)
def test_restore_refuses_other_shapes(kind: Callable[..., KVArena]) -> None:
    arena = kind((USUAL, USUAL), 400)
    for wrong in (
        (np.zeros((2, 1, 3, 5, 8), np.float32),),
        (np.zeros((2, 1, 3, 5, 4), np.float16),),
        (np.zeros((3, 1, 3, 5, 4), np.float32),),
        (np.zeros(2, np.float32),),
    ):
        with pytest.raises(ValueError, match="expected float32 slots"):
            arena.restore(wrong)
    with pytest.raises(ValueError, match="1 types of tensors, found 0"):
        arena.restore(())
    with pytest.raises(ContextError):
        arena.restore((np.zeros((2, 1, 3, 401, 4), np.float32),))
