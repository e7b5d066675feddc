"""New sequences continue from the longest prefix that an earlier one shares with them, under a memory budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgerun.runtime.kv.arena import InPlaceArena, KVArena
from edgerun.runtime.kv.buffers import CacheTensorType, NumpyBuffers
from edgerun.runtime.kv.growing import GrowingArena
from edgerun.runtime.kv.prefix_cache import MIN_SHARED, PrefixCache

TENSOR_TYPES = (CacheTensorType(np.dtype(np.float32), (1, 1, 0, 2), 2),) * 2
LIMIT = 512


def new() -> InPlaceArena:
    return InPlaceArena(TENSOR_TYPES, LIMIT)


FIRST = new().nbytes


class Conversation:
    """A sequence that stays with its owner."""

    def __init__(self, arena: KVArena, token_ids: list[int]) -> None:
        self.arena = arena
        self.token_ids = self.cache_ids = token_ids


def run(arena: KVArena, token_ids: list[int]) -> None:
    """Fill the missing slots of an arena as a model would: a slot holds a digest of the tokens up to it."""
    for length in range(arena.length, len(token_ids)):
        arena.reserve(1)
        value = float(hash(tuple(token_ids[: length + 1])) % 1000)
        if isinstance(arena, GrowingArena):
            for past, present in zip(arena.past(), arena.present(1), strict=True):
                present[:, :, :length] = past
                present[:, :, length] = value
            arena.finish_pass(1)
        else:
            buffers = arena.buffers
            assert isinstance(buffers, NumpyBuffers)
            for tensor in buffers.arrays:
                tensor[:, :, length] = value
        arena.commit(1)


def holds(arena: KVArena, token_ids: list[int], tolerance: float = 0.0) -> bool:
    """Whether every slot holds what `run` computes."""
    fresh = new()
    run(fresh, token_ids[: arena.length])
    return all(np.allclose(a, b, 0, tolerance) for a, b in zip(arena.snapshot(), fresh.snapshot(), strict=True))


def kept(cache: PrefixCache, *sequences: list[int]) -> None:
    for sequence in sequences:
        arena = cache.take(sequence)
        run(arena, sequence)
        cache.keep(arena, sequence)


def test_a_continued_sequence_is_taken_over_without_a_copy() -> None:
    cache, first = PrefixCache(new, 10 * FIRST), new()
    run(first, list(range(50)))
    cache.keep(first, list(range(50)))
    assert cache.take([*range(45), 7, 8]) is first
    assert first.length == 45
    assert len(cache) == 0


@pytest.mark.parametrize(("budget", "rest"), [(10, 200), (1, 0)])
def test_the_slots_of_a_shared_beginning_are_copied_where_there_is_room(budget: int, rest: int) -> None:
    """Without room for a copy the old sequence is cut."""
    cache, long = PrefixCache(new, budget * FIRST), list(range(200))
    kept(cache, long)
    arena = cache.take([*long[:60], 999])
    assert arena.length == 60
    assert holds(arena, long)
    assert cache.take([*long, 5]).length == rest


def test_a_conversation_keeps_its_own_slots() -> None:
    cache = PrefixCache(new, 10 * FIRST)
    tokens = list(range(80))
    conversation = Conversation(new(), tokens)
    run(conversation.arena, tokens)
    cache.watch(conversation)
    arena = cache.take([*tokens, 5])
    assert arena is not conversation.arena
    assert arena.length == conversation.arena.length == 80
    del conversation
    assert cache.take([*tokens, 5]).length == 0


def test_a_kept_beginning_of_another_sequence_takes_no_memory() -> None:
    cache, arenas = PrefixCache(new, 10 * FIRST), {length: new() for length in (30, 40, 20)}
    for length, arena in arenas.items():
        run(arena, list(range(length)))
        cache.keep(arena, list(range(length)))
    assert len(cache) == 1
    assert cache.take(list(range(50))) is arenas[40]


def test_a_few_shared_tokens_are_not_worth_it() -> None:
    cache = PrefixCache(new, 10 * FIRST)
    kept(cache, list(range(50)))
    assert cache.take([*range(MIN_SHARED - 1), 99]).length == 0
    assert cache.take([*range(MIN_SHARED), 99]).length == MIN_SHARED


def test_the_least_recently_used_sequence_is_dropped_first() -> None:
    cache = PrefixCache(new, 2 * FIRST)
    kept(cache, [1] * 20, [2] * 20)
    kept(cache, [1] * 30, [3] * 20)
    assert cache.nbytes == 2 * FIRST
    assert [cache.take([first] * 40).length for first in (2, 1, 3)] == [0, 30, 20]


def test_sequences_that_exceed_the_budget_are_parked_before_any_is_dropped() -> None:
    cache, long = PrefixCache(new, 2 * FIRST, parks=True), list(range(200))
    kept(cache, long, [2] * 20, [3] * 20)
    assert len(cache) == 3
    assert 2 * FIRST > cache.nbytes > FIRST
    for shared in (200, 50):  # a sequence that goes on, and one that branches off
        prompt = [*long[:shared], 7, 8]
        arena = cache.take(prompt)
        assert arena.length == shared
        assert holds(arena, prompt, 0.51 * 999 / 127)
        assert not holds(arena, prompt)
        assert arena.plain_length == 0
        assert len(cache) == 3  # the parked one stays until a longer one replaces it
    run(arena := cache.take([*long, 7]), [*long, 7])
    cache.keep(arena, [*long, 7])
    assert len(cache) == 3
    lossless = PrefixCache(new, 2 * FIRST)
    kept(lossless, long, [2] * 20, [3] * 20)
    assert len(lossless) == 2


@pytest.mark.parametrize("parks", [False, True])
@pytest.mark.parametrize("kind", [InPlaceArena, GrowingArena])
@given(data=st.data())
def test_every_taken_slot_is_that_of_the_prompt(kind: type[KVArena], parks: bool, data: st.DataObject) -> None:
    budget = data.draw(st.integers(0, 12), "budget") * FIRST
    cache = PrefixCache(lambda: kind(TENSOR_TYPES, LIMIT), budget, parks=parks)
    tolerance = parks * 8 * 0.51 * 999 / 127  # a slot is rounded each time that it is parked
    written: list[list[int]] = [[]]
    conversations: list[Conversation] = []
    for _ in range(data.draw(st.integers(1, 8), "requests")):
        earlier = data.draw(st.sampled_from(written), "earlier")
        start = earlier[: data.draw(st.integers(0, len(earlier)), "shared")]
        prompt = [*start, *data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=90), "new")]
        arena = cache.take(prompt)
        assert holds(arena, prompt, tolerance)
        assert arena.length <= len(prompt)
        run(arena, prompt)
        if data.draw(st.booleans(), "finished"):
            # A conversation that ended early has tokens that were never run.
            arena.rewind_to(data.draw(st.integers(0, arena.length), "cached"))
            cache.keep(arena, prompt)
        else:
            conversations.append(Conversation(arena, prompt))
            cache.watch(conversations[-1])
        assert cache.nbytes <= cache.max_bytes
        written.append(prompt)
    assert all(holds(each.arena, each.token_ids, tolerance) for each in conversations)
