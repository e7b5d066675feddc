"""All arenas hold the same slots after any sequence of commits, rewinds and compactions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun import ContextError
from edgerun.runtime.kv.arena import InPlaceArena, KVArena
from edgerun.runtime.kv.buffers import CacheTensorType, NumpyBuffers
from edgerun.runtime.kv.device_buffers import DeviceBuffers, SlotGraphs
from edgerun.runtime.kv.growing import GrowingArena

FLOAT32_4D = CacheTensorType(np.dtype(np.float32), (1, 3, 0, 4), 2)
FLOAT16_5D = CacheTensorType(np.dtype(np.float16), (2, 1, 3, 0, 4), 3)
INT8_TRANSPOSED = CacheTensorType(np.dtype(np.int8), (1, 3, 4, 0), 3)
TENSOR_TYPES = (FLOAT32_4D, FLOAT32_4D, FLOAT16_5D, INT8_TRANSPOSED)


GRAPHS = SlotGraphs(("cpu", 0), lambda _: ["CPUExecutionProvider"])


def on_device(tensor_types: tuple[CacheTensorType, ...], limit: int) -> InPlaceArena:
    """A device's arena whose device is the CPU: its slots are moved and copied by graphs."""
    return InPlaceArena(tensor_types, limit, new_buffers=GRAPHS.new_buffers)


def static(tensor_types: tuple[CacheTensorType, ...], limit: int) -> InPlaceArena:
    """An arena of the graphs of three capacities."""
    return InPlaceArena(tensor_types, limit, capacities=(16, 100, 1000))


ARENAS: tuple[Callable[[tuple[CacheTensorType, ...], int], KVArena], ...] = (
    *(InPlaceArena, GrowingArena, on_device, static),
)


def write(arena: KVArena, numbers: npt.NDArray[np.int64]) -> None:
    """Write uncommitted slots that hold these numbers everywhere, as a pass would."""
    arena.reserve(numbers.size)
    if isinstance(arena, InPlaceArena):
        buffers = arena.buffers
        assert isinstance(buffers, NumpyBuffers | DeviceBuffers)
        copied = isinstance(buffers, DeviceBuffers)
        tensors = [value.numpy() for value in buffers.values] if copied else buffers.arrays
        for index, (tensor, tensor_type) in enumerate(zip(tensors, arena.tensor_types, strict=True)):
            slots = np.moveaxis(tensor, tensor_type.axis, -1)
            slots[..., arena.length : arena.length + numbers.size] = numbers
            if copied:
                buffers.values[index].update_inplace(tensor)
    elif isinstance(arena, GrowingArena):
        for past, present, tensor_type in zip(
            arena.past(), arena.present(numbers.size), arena.tensor_types, strict=True
        ):
            slots = np.moveaxis(present, tensor_type.axis, -1)
            slots[..., : arena.length] = np.moveaxis(past, tensor_type.axis, -1)
            slots[..., arena.length :] = numbers
        arena.finish_pass(numbers.size)


def filled(kind: Callable[..., KVArena], length: int, limit: int = 1000) -> KVArena:
    """An arena whose slot s holds the number s % 100 everywhere (int8 allows no more)."""
    arena = kind(TENSOR_TYPES, limit)
    write(arena, np.arange(length) % 100)
    arena.commit(length)
    return arena


def contents(arena: KVArena) -> list[int]:
    """The numbers in the committed slots, which must be the same in every tensor."""
    found = []
    for stack, tensor_type in zip(arena.snapshot(), arena.groups, strict=True):
        slots = np.moveaxis(stack, tensor_type.axis + 1, 0).reshape(arena.length, stack.size // max(arena.length, 1))
        assert (slots == slots[:, :1]).all()
        found.append(slots[:, :1].astype(int).ravel().tolist())
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("kind", ARENAS)
@given(data=st.data())
def test_slots_behave_like_a_list(kind: Callable[..., KVArena], data: st.DataObject) -> None:
    arena = kind(TENSOR_TYPES, 400)
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
        assert contents(arena) == model
        if len(model) == 400:
            break


@pytest.mark.parametrize("kind", ARENAS)
def test_what_does_not_fit_the_slots_is_refused(kind: Callable[..., KVArena]) -> None:
    arena = filled(kind, 10)
    with pytest.raises(ValueError, match="cannot rewind"):
        arena.rewind_to(11)
    arena.rewind_to(5)
    for path in ([], [1], [0, 2, 1], [0, 0], [0, 300]):
        with pytest.raises(ValueError, match="path"):
            arena.compact(5, path)
    assert contents(arena) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="cannot commit"):
        kind(TENSOR_TYPES, 5).commit(6)


@pytest.mark.parametrize("kind", [InPlaceArena, on_device])
def test_growth_doubles_the_capacity_up_to_the_limit(kind: Callable[..., InPlaceArena]) -> None:
    arena = kind(TENSOR_TYPES, 700)
    assert arena.capacity == 256
    write(arena, np.arange(256) % 100)
    arena.commit(256)
    before = arena.generation
    arena.reserve(1)
    assert (arena.capacity, arena.generation) == (512, before + 1)
    assert contents(arena) == [slot % 100 for slot in range(256)]
    arena.reserve(400)
    assert arena.capacity == 700
    with pytest.raises(ContextError, match="context full: 701 of 700 tokens"):
        arena.reserve(445)
    assert arena.length == 256


def test_a_long_prompt_and_the_beginning_of_its_answer_take_one_growth() -> None:
    arena = InPlaceArena(TENSOR_TYPES, 20_000)
    arena.expect(9000)
    write(arena, np.arange(9000) % 100)
    arena.commit(9000)
    for _ in range(10):
        write(arena, np.zeros(100, np.int64))
        arena.commit(100)
    assert (arena.generation, arena.capacity) == (1, 10_240)
    arena.expect(240)
    assert arena.generation == 1, "there is room"


def test_a_growth_that_is_interrupted_leaves_an_empty_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = filled(InPlaceArena, 250)
    moved: list[object] = []

    def interrupt(array: object) -> None:
        moved.append(array)
        if len(moved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("edgerun.runtime.kv.buffers.drop_array_pages", interrupt)
        with pytest.raises(KeyboardInterrupt):
            arena.reserve(10)
    assert (arena.length, arena.plain_length, arena.capacity) == (0, 0, 256)
    write(arena, np.arange(300) % 100)
    arena.commit(300)
    assert contents(arena) == [slot % 100 for slot in range(300)]


@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is returned on Linux")
def test_a_growth_does_not_hold_the_slots_twice() -> None:
    """In a process of its own: 256 MiB of slots grow by an eighth."""
    program = """
import resource
import numpy as np
from edgerun.runtime.kv.arena import InPlaceArena
from edgerun.runtime.kv.buffers import CacheTensorType
arena = InPlaceArena((CacheTensorType(np.dtype(np.float32), (1, 2, 0, 64), 2),) * 64, 20_000)
arena.pad_to(8192, 1.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
arena.reserve(1000)
assert all((array[:, :, :8192] == 1).all() and not array[:, :, 8192:].any() for array in arena.buffers.arrays)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    environment = {**os.environ, "PYTHONWARNDEFAULTENCODING": ""}
    grown = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, encoding="utf-8", env=environment
    )
    assert int(grown.stdout) < 96 << 10, "KiB: the new slots, and two arrays"


def test_a_large_arena_grows_in_small_steps_and_one_of_a_fixed_capacity_not_at_all() -> None:
    arena = InPlaceArena(TENSOR_TYPES, 10_000)
    capacities = []
    for tokens in (1500, 2048, 2049, 5000, 5100, 9999):
        arena.reserve(tokens)
        capacities.append(arena.capacity)
    assert capacities == [2048, 2048, 2304, 5120, 5120, 10_000]
    arena = InPlaceArena(TENSOR_TYPES, 3000)
    arena.expect(4000)
    assert arena.capacity == 3000, "a prompt that does not fit is refused by its passes"
    for context, limit in ((1000, 64), (10, 10)):
        arena = InPlaceArena(TENSOR_TYPES, context, capacities=(64,))
        assert (arena.capacity, arena.limit) == (64, limit)
        with pytest.raises(ContextError, match=f"context full: {limit + 1} of {limit} tokens"):
            arena.reserve(limit + 1)


@pytest.mark.parametrize("kind", ARENAS)
@pytest.mark.parametrize("other", ARENAS)
def test_slots_are_copied_from_another_arena_and_restored(
    kind: Callable[..., KVArena], other: Callable[..., KVArena]
) -> None:
    source, arena = filled(kind, 300), filled(other, 20, 400)
    source.plain_length = 250
    for slots in (0, 270, 240):
        arena.copy_from(source, slots)
        assert contents(arena) == [slot % 100 for slot in range(slots)]
        assert arena.plain_length == min(slots, 250)
    snapshot = source.snapshot()
    source.restore(filled(kind, 3).snapshot())
    assert contents(arena) == [slot % 100 for slot in range(240)]
    with pytest.raises(ValueError, match="cannot copy 4 of 3 slots"):
        arena.copy_from(source, 4)
    arena.restore(snapshot)
    for array in snapshot:
        array[:] = -1
    assert contents(arena) == [slot % 100 for slot in range(300)]


@pytest.mark.parametrize("kind", ARENAS)
def test_padding_commits_slots_without_a_pass(kind: Callable[..., KVArena]) -> None:
    arena = filled(kind, 3)
    arena.pad_to(70, 1.0)
    assert contents(arena) == [0, 1, 2, *[1] * 67]
    arena.rewind_to(0)
    arena.pad_to(5, 2.0)
    assert contents(arena) == [2] * 5


@pytest.mark.parametrize("kind", ARENAS)
def test_restore_rejects_other_shapes(kind: Callable[..., KVArena]) -> None:
    arena = kind((FLOAT32_4D, FLOAT32_4D), 400)
    for wrong in (
        (np.zeros((2, 1, 3, 5, 8), np.float32),),
        (np.zeros((2, 1, 3, 5, 4), np.int8),),
        (np.zeros((3, 1, 3, 5, 4), np.float32),),
        (np.zeros(2, np.float32),),
    ):
        with pytest.raises(ValueError, match="expected float32 slots"):
            arena.restore(wrong)
    with pytest.raises(ValueError, match="1 types of tensors, found 0"):
        arena.restore(())
    with pytest.raises(ContextError):
        arena.restore((np.zeros((2, 1, 3, 401, 4), np.float32),))


@pytest.mark.parametrize("kind", ARENAS)
def test_floats_of_another_type_are_converted(kind: Callable[..., KVArena]) -> None:
    slots = np.random.default_rng(0).normal(size=(2, 1, 3, 5, 4))
    arena = kind((FLOAT32_4D, FLOAT32_4D), 400)
    arena.restore((slots.astype(np.float16),))
    assert (arena.length, arena.plain_length) == (5, 0)
    np.testing.assert_array_equal(arena.snapshot()[0], slots.astype(np.float16))
    half = CacheTensorType(np.dtype(np.float16), (1, 3, 0, 4), 2)
    arena = kind((half, half), 400)
    arena.restore((slots.astype(np.float32),))
    np.testing.assert_array_equal(arena.snapshot()[0], slots.astype(np.float16))
    with pytest.raises(ValueError, match="too large for float16"):
        arena.restore((slots.astype(np.float32) * 1e6,))


def test_a_static_arena_has_the_smallest_capacity_that_fits() -> None:
    arena = static(TENSOR_TYPES, 500)
    assert (arena.capacity, arena.limit) == (16, 500)
    write(arena, np.arange(90))
    arena.commit(90)
    assert (arena.capacity, arena.generation) == (100, 1)
    arena.reserve(10)
    assert arena.capacity == 100
    arena.reserve(11)
    assert arena.capacity == 1000
    assert contents(arena) == list(range(90))
    arena.rewind_to(50)
    arena.reserve(1)
    assert arena.capacity == 1000, "a sequence whose end moves back and forth keeps its capacity"
    arena.rewind_to(49)
    arena.reserve(1)
    assert (arena.capacity, contents(arena)) == (100, list(range(49)))
    with pytest.raises(ContextError, match="context full: 501 of 500 tokens"):
        arena.reserve(452)
    assert static(TENSOR_TYPES, 5000).limit == 1000
