"""Drafts of the target itself over few of its cache slots, for long contexts.

A pass after a long context reads all of its keys and values. A pass of the same graph over about a thousand of them
takes the time of a short context and mostly finds the same token, so it drafts, and the whole cache verifies. Nothing
is trained and no other graph is loaded: slots are copied from the target's cache to a small one. Keys have their
rotation and the positions of new tokens are an input, so the slots may be any.

Kept are the first slots, which attention falls back on (StreamingLLM: Xiao et al. 2024), the recent ones, and the
blocks that have most in common with the recent text: where a passage is copied or a question answered, its words are
what the two share (SentenceKV: Zhu et al. 2025, with tokens in place of vectors). The choice is made again every few
tokens. In between, slots of accepted tokens are copied as the target computed them (Recycled Attention: Xu et al.
2024).

A sampled target draws its tokens with random numbers that follow from their positions. The same number drawn from the
nearly equal distribution of the draft is mostly the same token.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ...devices.providers import CPU_PROVIDER
from ...graph.bound_graph import BoundGraph
from ...graph.graph_io import CacheMode, InputRole
from ...graph.session import DecoderGraph
from ...kv.arena import InPlaceArena, KVArena
from ...kv.buffers import NumpyBuffers
from ...long_context.long_graph import LongContextGraph
from ...sampling.sampler import Sampler, SamplingParams
from ..pass_cost import PassCost
from ..tree import Source
from .draft_model import DraftModel, Floats, Int32
from .interface import Candidate, Path

LONG_CONTEXT: Final = 16384
"""Number of tokens of a prompt from which these drafts are tried: after 8,192 they gain too little for what it costs to
find out whether they do (docs/log.md, "Drafts over few cache slots")."""
BLOCK: Final = 32
"""Number of slots that are chosen together."""
_KEPT_BLOCKS: Final = 32
"""Number of blocks that are copied."""
_RECENT_BLOCKS: Final = 12
"""Number of these that hold the most recent tokens."""
_REFRESH: Final = 32
"""Number of accepted tokens after which blocks are chosen again."""
_RECENT_TEXT: Final = 48
"""Number of tokens at the end of the text whose occurrences are looked up."""
_REHEARSED: Final = 4
"""Number of tokens of an answer on which it is tried whether the draft is right, before it drafts."""
_REHEARSAL: Final = 2.5
"""What a rehearsal takes, in draft passes over as many tokens: slots are chosen and copied for it."""
_ANSWER_SHARE: Final = 1 / 128
"""Largest part of an answer's time that a rehearsal may take which no earlier draft has paid for."""
_ALLOWED_SHARE: Final = 1 / 256
"""Part of the time that drafts may take which gain nothing."""
_MOST_SAVED: Final = 8.0
"""Tokens that may be left of what they have gained: more than the longest one costs."""
_SCRATCH: Final = 256
"""Number of slots for draft tokens."""


def load_sparse_draft(graph: DecoderGraph, cost: PassCost) -> Callable[[], SparseCacheDraft] | str:
    """What makes drafts of a graph over a part of its cache for one more sequence; or why nothing can.

    Args:
        graph: the target.
        cost: cost of its passes, refined by those over few slots too.
    """
    graph_io = graph.graph_io
    if graph_io.states:
        return "the model has layers without attention, whose states cannot be taken apart"
    if graph.config.device.provider != CPU_PROVIDER or graph_io.cache_mode is not CacheMode.IN_PLACE:
        return "the cache is not extended in place in the memory of the CPU"
    if graph_io.window_biases:
        return "the model has layers with a sliding window, which copied slots lie outside of"
    if InputRole.POSITIONS not in graph_io.inputs:
        return "the graph takes the position of a token from its cache slot"
    slots = _KEPT_BLOCKS * BLOCK + _REFRESH + _SCRATCH
    return lambda: SparseCacheDraft(graph.bind(graph.arena(slots)), cost)


class SparseCacheDraft(DraftModel):
    """A `DraftModel` that is the target over a part of the cache that `attach` names.

    To the draft model the sequence is what its arena holds: one token for every copied slot, then those that the target
    has not run.

    Args:
        bound: the target's graph over an arena of its own.
        cost: as for `load_sparse_draft`.
    """

    source = Source.SPARSE

    def __init__(self, bound: BoundGraph, cost: PassCost) -> None:
        super().__init__(bound, cost, bound.graph_io.vocab_size)
        bound.preferred = LongContextGraph.name
        self._target: Callable[[], KVArena | None] = lambda: None
        self._text: list[int] = []
        self._copied = 0
        """Number of tokens at the beginning of the text of which slots were chosen; 0 to choose again."""
        self._offset = 0
        """Position of a token less its slot, behind the copied ones."""
        self._prompt_tokens = 0
        """Number of tokens before the answer; 0 after a rehearsal on what the target wrote."""
        self._left = 0.0
        """Tokens of plain decoding whose time may be spent."""
        self.start(SamplingParams())

    def start(self, params: SamplingParams) -> None:
        """Draft for a target that is sampled with `params` from now on."""
        super().start(params)
        self._sampler = Sampler(params, self.head)

    def attach(self, arena: KVArena) -> None:
        """Copy slots of the target's `arena`, which holds the sequence from now on, without keeping it alive."""
        self._target, self._copied, self._stale = weakref.ref(arena), 0, True

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._text, self._copied, self._stale = list(token_ids), 0, True
        self._prompt_tokens = len(self._text)
        self._sampler = Sampler(self._sampler.params, self.head)
        self._sampler.observe_prompt(self._text)

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._text.append(token)
        self._left += _ALLOWED_SHARE
        self._sampler.observe((token,))
        self._stale = True

    def candidates(self, state: Path) -> Sequence[Candidate]:
        """The most probable next tokens, and in place of the first one what the target's random number there draws.

        An answer is begun with a rehearsal instead: what is right beyond half of it may be staked.
        """
        if self._available and self._prompt_tokens:
            self._left += max(2 * self._rehearse() - _REHEARSED, 0)
            return ()
        found = super().candidates(state)
        if (logits := self._logits.get(state)) is None or not found:
            return found
        with self._sampler.rollback():
            self._sampler.observe(state)
            token = self._sampler.choose(logits, len(self._text) + len(state))
        return [Candidate(token, found[0].bucket), *(each for each in found[1:] if each.token != token)]

    def seconds(self, path: Path) -> float:
        """Expected seconds of `candidates(path)`; infinite where nothing may be spent, or there is no answer yet."""
        if self._left < len(path) or (self._prompt_tokens and not self._pays_to_rehearse):
            return math.inf
        return super().seconds(path)

    def settle(self, gained: float) -> None:
        """Spend what drafts cost, and save what they gain."""
        self._left = min(self._left + gained, _MOST_SAVED)

    @property
    def _pays_to_rehearse(self) -> bool:
        """Whether earlier drafts have gained what a rehearsal takes, or it is little beside the answer so far."""
        written, slots = len(self._text) - self._prompt_tokens, _KEPT_BLOCKS * BLOCK
        takes = _REHEARSAL * self.cost.seconds(_REHEARSED, slots) / self.cost.seconds(1, len(self._text))
        return written >= _REHEARSED and (self._left >= takes or written * _ANSWER_SHARE >= takes)

    def _rehearse(self) -> int:
        """How many of the last tokens the draft would have found, which takes one pass; nothing of it is kept."""
        started, text = time.perf_counter(), self._text
        self._text, self._prompt_tokens, self._copied = text[:-_REHEARSED], 0, 0
        self._copy_slots()
        inputs, positions = self._own(text[-_REHEARSED - 1 : -1]), self._copied + np.arange(_REHEARSED)
        logits = self._bound.forward(inputs, logits_for=range(_REHEARSED), positions=positions)
        self._text = text
        self._spent += time.perf_counter() - started
        return int((logits.argmax(axis=1) == text[-_REHEARSED:]).sum())

    @property
    def pending(self) -> int:
        """Number of tokens of the sequence that neither the target nor the draft model has run."""
        end = self._available
        return len(self._token_ids) - self._arena.length if end == self._copied else len(self._text) - end

    @property
    def _available(self) -> int:
        """Number of tokens of the sequence whose slots the target has: at least the last one is not among them."""
        target = self._target()
        return 0 if target is None else min(target.length, len(self._text) - 1)

    def _commit_accepted(self) -> None:
        """Forget draft tokens once the sequence has grown: the target has slots of those that were accepted."""
        if self._stale:
            self._drop_draft()
            self._stale = False

    def _run_path(self, path: Path) -> None:
        if self._available:
            self._copy_slots()
            super()._run_path(path)

    def _copy_slots(self) -> None:
        """Copy the slots of what was accepted since the last time, or those of a new choice."""
        arena, target, end = self._arena, self._target(), self._available
        if end == self._copied:
            return
        slots, held = np.arange(self._copied, end), self._copied - self._offset
        if not self._copied or held + slots.size > _KEPT_BLOCKS * BLOCK + _REFRESH:
            slots, held = chosen_slots(np.array(self._text, np.int64), end), 0
        arena.rewind_to(held)
        arena.reserve(arena.limit - held)
        assert isinstance(target, InPlaceArena)  # noqa: S101  `load_sparse_draft` checks it
        # The graph that verifies: threads of the model's own one would spin beside its passes for up to 60 ms.
        self._bound.prefers_base = target.is_plain
        assert isinstance(target.buffers, NumpyBuffers)  # noqa: S101  so too
        assert isinstance(arena.buffers, NumpyBuffers)  # noqa: S101  so too
        pairs = zip(target.buffers.arrays, arena.tensor_types, strict=True)
        arena.buffers.write_new(held, [array[kind.index(slots)] for array, kind in pairs], slots.size)
        arena.commit(slots.size)
        self._copied, self._offset = end, end - arena.length
        self._token_ids = [0] * arena.length + self._text[end:]

    def _forward(
        self,
        tokens: Int32,
        positions: npt.NDArray[np.int64] | None = None,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> Floats:
        if positions is None:
            positions = self._arena.length + len(self._scratch) + np.arange(tokens.size)
        return super()._forward(tokens, positions + self._offset, mask)


def chosen_slots(text: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.intp]:
    """The slots to draft from, ascending: whole blocks but for the last one.

    Args:
        text: int64, the token ids of the sequence.
        end: number of its tokens that have slots.
    """
    scores = overlap(text, end)
    scores[0] = np.inf
    scores[-_RECENT_BLOCKS:] = np.inf
    chosen = np.sort(np.argsort(scores, kind="stable")[-_KEPT_BLOCKS:])
    slots = (chosen[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    return slots[slots < end]


def overlap(text: npt.NDArray[np.int64], end: int) -> npt.NDArray[np.float64]:
    """How much the blocks of the first `end` tokens have in common with the end of a text, float64 `[blocks]`.

    Of every pair of tokens at the end of the text, all earlier places together count one: what occurs everywhere says
    nothing. What follows a place is needed as much, so a place counts for the next block too.
    """
    pairs = text[:-1] << 32 | text[1:]
    places = np.flatnonzero(np.isin(pairs[: end - 1], pairs[-_RECENT_TEXT:]))
    _, which, counts = np.unique(pairs[places], return_inverse=True, return_counts=True)
    found = np.zeros(-(-end // BLOCK))
    np.add.at(found, places // BLOCK, 1 / counts[which])
    found[1:] += found[:-1]
    return found
