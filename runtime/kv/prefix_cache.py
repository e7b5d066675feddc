"""The prefix cache: KV caches of finished sequences, from which new sequences continue.

A stateless request repeats its whole conversation, and conversations often share a system prompt. The slots of a token
depend on the tokens before it only, so a new sequence takes over those of the longest prefix that it shares with an
earlier one, and only the rest of its prompt is computed. Chosen prefixes are also kept on disk (`prefix_files.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ...models.progress import Progress, silent
from ..graph.bound_graph import BoundGraph, ImagesOfText, Steering, keyed_ids
from .arena import KVArena, shared_tokens
from .parked_cache import ParkedCache, can_park
from .prefix_files import MIN_SHARED, PrefixFiles, TokenIds, common_prefix

_KEPT_BRANCH: Final = 32
"""Number of slots above which a kept sequence is worth a copy of the slots that a new sequence shares with it: copying
a thousand slots takes less time than computing ten."""


@dataclass(eq=False)
class CachedSequence:
    """A token sequence and its KV cache, which never has more slots than there are tokens."""

    bound: BoundGraph
    token_ids: list[int] = field(default_factory=list)
    """Tokens whose slots are in the cache, and those after them that have not run yet."""
    progress: Progress = silent
    """Receives the progress of reading long prompts."""
    prefixes: PrefixCache | None = None
    """Receives the KV cache after one answer; None for a sequence of `LoadedModel.new_sequence`, whose
    caller keeps it."""

    @property
    def cache_ids(self) -> Sequence[int]:
        """The tokens as they are compared with those of other sequences: images by their content."""
        return keyed_ids(self.token_ids, self.bound.images)

    @property
    def arena(self) -> KVArena:
        """The KV cache."""
        return self.bound.arena

    @contextmanager
    def lent_to_prefixes(self, kept_tokens: Callable[[Sequence[int]], int]) -> Iterator[None]:
        """Let other sequences copy from a single answer's cache during the block, and hand it on afterwards.

        Of nested blocks, the outermost one does this.

        Args:
            kept_tokens: says of how many of the sequence's first tokens the slots are to be kept on disk.
        """
        prefixes, self.prefixes = self.prefixes, None
        if prefixes is None:
            yield
            return
        prefixes.watch(self)
        try:
            yield
        finally:
            prefixes.unwatch(self)
            prefixes.keep(self.arena, self.cache_ids, kept_tokens(self.token_ids))

    def steer(self, steering: Steering | None) -> None:
        """Let passes have an adapter or a control vector from now on; slots that were computed otherwise are dropped.

        Raises:
            EdgeError: the graph that takes them cannot be loaded.
        """
        if steering != self.bound.steering:
            self.arena.rewind_to(0)
            self.bound.steered(steering)

    def continue_with(self, prompt_ids: Sequence[int], images: ImagesOfText | None = None) -> int:
        """Replace the sequence by `prompt_ids`, which have `images` among them; keep and count the cached slots of
        their common prefix."""
        kept = shared_tokens(self.cache_ids[: self.arena.length], keyed_ids(prompt_ids, images))
        self.arena.rewind_to(kept if images is None else images.whole(kept))
        self.token_ids, self.bound.images = list(prompt_ids), images
        return self.arena.length


@dataclass(frozen=True, eq=False)
class _Kept:
    """A finished sequence."""

    cache: KVArena | ParkedCache
    token_ids: TokenIds
    """The tokens of its slots."""
    content: bytes
    """Their bytes. Comparing the beginnings of two of these takes a fiftieth of the time of comparing arrays, and most
    kept sequences are of other conversations."""
    owner: PrefixCache
    """The cache that keeps it, of those with one budget."""

    def arena(self) -> KVArena:
        """Its arena, restored where it is parked."""
        cache = self.cache
        return cache.restored(self.owner._new_arena) if isinstance(cache, ParkedCache) else cache

    def parked(self) -> _Kept:
        """The same sequence, parked if it can be."""
        if isinstance(self.cache, ParkedCache) or not can_park(self.cache.tensor_types):
            return self
        return replace(self, cache=ParkedCache.of(self.cache))


class PrefixCache:
    """Keeps the KV caches of finished sequences under a memory budget, the least recently used are dropped first.

    Args:
        new_arena: makes an empty arena.
        max_bytes: maximum size of the buffers of all kept sequences together, of a draft model too; 0 keeps
            none.
        files: where chosen prefixes are kept besides memory; None for nowhere.
        parks: whether sequences that exceed the budget are parked, before any is dropped.
    """

    def __init__(
        self,
        new_arena: Callable[[], KVArena],
        max_bytes: int,
        files: PrefixFiles | None = None,
        *,
        parks: bool = False,
    ) -> None:
        self.max_bytes: Final = max_bytes
        self.parks: Final = parks
        self._files: Final = files or PrefixFiles(str, 0)
        self._new_arena = new_arena
        self._kept: list[_Kept] = []
        """The sequences of all caches with one budget, the least recently used first."""
        self._by_key: weakref.WeakValueDictionary[Hashable, PrefixCache] = weakref.WeakValueDictionary()
        self._open: weakref.WeakSet[CachedSequence] = weakref.WeakSet()
        self._open_lock = threading.Lock()

    def beside(self, new_arena: Callable[[], KVArena]) -> PrefixCache:
        """A cache for sequences whose slots differ, of a draft model or an adapter, within the budget of this one and
        in memory alone."""
        cache = PrefixCache(new_arena, self.max_bytes, parks=self.parks)
        cache._kept = self._kept
        return cache

    def of(self, key: Hashable | None) -> PrefixCache:
        """The cache for sequences with that key, whose slots differ; None for this one."""
        # It lives as long as a sequence that it keeps or that is in use.
        return self if key is None else self._by_key.setdefault(key, self.beside(self._new_arena))

    def __len__(self) -> int:
        """Number of kept sequences."""
        return sum(kept.owner is self for kept in self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all kept sequences, of a draft model too."""
        return sum(kept.cache.nbytes for kept in self._kept)

    def watch(self, sequence: CachedSequence) -> None:
        """Let new sequences copy from a sequence that is in use, for as long as it lives or until `unwatch`."""
        with self._open_lock:
            self._open.add(sequence)

    def unwatch(self, sequence: CachedSequence) -> None:
        """Copy no more from a sequence."""
        with self._open_lock:
            self._open.discard(sequence)

    def take(self, token_ids: Sequence[int]) -> KVArena:
        """Return an arena with the slots of the longest known prefix of `token_ids`, to be continued by the caller.

        A kept sequence that the new one continues, or leaves only near its end, is taken over as it is. From others,
        and from those that are in use, the shared slots are copied, if the budget allows both. Where a file has more of
        them, they are read from there.

        Where `token_ids` is a prompt that was answered before, the slots of its last prefill pass are left out. That
        pass runs again as it ran then, so that the same logits come out, to the last bit, and the same answer.
        """
        wanted = np.asarray(token_ids, np.int64)
        content = wanted.tobytes()
        shared, source = 0, None
        for kept in self._kept:
            # Of equal prefixes the most recently used is taken.
            least = wanted.itemsize * max(shared, MIN_SHARED)
            if kept.owner is self and len(content) >= least and kept.content.startswith(content[:least]):
                shared, source = common_prefix(kept.token_ids, wanted), kept
        owned_shared, owner = 0, None
        with self._open_lock:
            open_sequences = tuple(self._open)
        for sequence in open_sequences:
            cached = np.asarray(sequence.cache_ids[: sequence.arena.length], np.int64)
            if (length := common_prefix(cached, wanted)) > owned_shared:
                owned_shared, owner = length, sequence.arena
        if (stored := self._files.restored(wanted, max(shared, owned_shared), self._new_arena)) is not None:
            return stored
        if owner is not None and owned_shared > shared and owned_shared >= MIN_SHARED:
            return self._copy(owner, _reusable(owner, owned_shared, wanted), wanted.size)
        if source is None:
            return self._new_arena()
        arena = source.arena()
        shared = _reusable(arena, shared, wanted)
        if arena is source.cache:
            branches = arena.length - shared > _KEPT_BRANCH
            if self._files.reads(arena) or (branches and self._has_room_beside(source)):
                return self._copy(arena, shared, wanted.size)
            self._kept.remove(source)
        arena.rewind_to(shared)
        return arena

    def longest(self, token_ids: Sequence[int]) -> tuple[KVArena, TokenIds] | None:
        """The kept sequence with the longest prefix of `token_ids`, whole, and its tokens; it stays as it is."""
        wanted = np.asarray(token_ids, np.int64)
        mine = [kept for kept in self._kept if kept.owner is self and common_prefix(kept.token_ids, wanted)]
        found = max(mine, key=lambda kept: common_prefix(kept.token_ids, wanted), default=None)
        return None if found is None else (found.arena(), found.token_ids)

    def keep(self, arena: KVArena, token_ids: Sequence[int], on_disk: int = 0) -> None:
        """Keep a finished sequence; the caller no longer uses its arena.

        Args:
            arena: the cache.
            token_ids: the tokens of its slots, and perhaps further ones.
            on_disk: number of tokens, from the first on, whose slots are to be kept on disk too.
        """
        kept_ids = np.array(token_ids[: arena.length], np.int64)
        new = _Kept(arena, kept_ids, kept_ids.tobytes(), self)
        if on_disk:
            self._files.keep(arena, kept_ids[:on_disk])
        mine = [kept for kept in self._kept if kept.owner is self]
        if any(kept.content.startswith(new.content) for kept in mine):
            return
        for kept in mine:
            if new.content.startswith(kept.content):
                self._kept.remove(kept)
        self._kept.append(new)
        self._evict(self.max_bytes)

    def exchange(self, arena: KVArena, token_ids: Sequence[int], wanted: Sequence[int]) -> KVArena:
        """Keep a sequence that is finished, as `keep` does, and return an arena for the next one, as `take` does."""
        arena.hold_from(None)
        self.keep(arena, token_ids)
        return self.take(wanted)

    def wait(self) -> None:
        """Wait until the prefixes that are being kept on disk are written."""
        self._files.wait()

    def clear(self) -> None:
        """Drop all kept sequences in memory, of a draft model too."""
        self._kept.clear()

    def _copy(self, source: KVArena, slots: int, expected: int) -> KVArena:
        """A new arena with the first slots of another, and room for `expected` slots."""
        arena = self._new_arena()
        arena.expect(expected)
        arena.copy_from(source, slots)
        return arena

    def _has_room_beside(self, source: _Kept) -> bool:
        """Make `source` the most recently used, and evict others until a copy of it fits; False if it cannot."""
        self._kept.remove(source)
        self._kept.append(source)
        if 2 * source.cache.nbytes > self.max_bytes:
            return False
        self._evict(self.max_bytes - source.cache.nbytes)
        return True

    def _evict(self, max_bytes: int) -> None:
        """Park or drop the least recently used sequences until all that are kept fit `max_bytes`."""
        total = self.nbytes
        for index, kept in enumerate(self._kept if self.parks else ()):
            if total > max_bytes:
                self._kept[index] = kept.parked()
                total += self._kept[index].cache.nbytes - kept.cache.nbytes
        while total > max_bytes:
            total -= self._kept.pop(0).cache.nbytes


def _reusable(arena: KVArena, shared: int, wanted: TokenIds) -> int:
    """Number of slots to reuse of the `shared` ones, without the last prefill pass of the same prompt."""
    start, end = arena.last_prefill
    return start if shared == end == wanted.size else shared
