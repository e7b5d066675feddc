"""Decodes blocks of masked tokens (block diffusion): a pass may find several tokens of a block.

A block begins with its masks. Within it every token attends to every other one, and to all tokens before the block.
After each pass every masked position has a candidate, and a rule says which of them to keep; the others stay masked.
The slots of a block are valid once all its tokens are known and have run once more, which they do in the first pass of
the next block. Source: block diffusion (Arriola et al. 2025, arXiv 2503.09573), in the order of SDAR (arXiv 2510.06303)
and, where logits are shifted, of Fast-dLLM v2 (arXiv 2509.26328).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...models.block_diffusion import BlockDiffusion
from ..decode import DecodeLimits, FinishReason, Step, check_prompt_fits
from ..graph.bound_graph import BoundGraph
from ..graph.graph_io import Floats
from ..prefill import PREFILL_TOKENS, READING_PROMPT, Cancelled
from ..sampling.logit_stage import Logits
from ..sampling.logprobs import LogSoftmax, PositionLogprobs
from ..sampling.sampler import Sampler
from ..speculation.rounds import DraftOrigin, OriginKind
from .commit_rules import Candidates, CommitRule, most_confident

_DRAWS: Final = 1 << 64
"""Distance of the random numbers of two passes: more than a text has positions."""


class _Candidate(NamedTuple):
    """What a pass found for a masked position."""

    token: int
    confidence: float
    gap: float
    entropy: float
    logprobs: PositionLogprobs | None


@dataclass
class _Block:
    """The block that is being filled."""

    start: int
    """Position of its first token in the text."""
    cells: npt.NDArray[np.int64]
    """Its token ids; those that are not known are the mask's."""
    known: npt.NDArray[np.bool_]
    steady: npt.NDArray[np.int64]
    """For each position, the number of passes one after another that found the same candidate."""
    latest: npt.NDArray[np.int64]
    """The candidates of the latest pass; -1 where there was none."""
    passes: int = 0
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    """Log-probabilities by place in the block, if they were asked for."""


class _BlockText:
    """A text whose end is a block of masked tokens."""

    def __init__(
        self,
        bound: BoundGraph,
        blocks: BlockDiffusion,
        sampler: Sampler,
        rule: CommitRule,
        log_softmax: LogSoftmax | None,
        token_ids: list[int],
    ) -> None:
        self._bound: Final = bound
        self._blocks: Final = blocks
        self._sampler: Final = sampler
        self._rule: Final = rule
        self._log_softmax: Final = log_softmax
        self.token_ids: Final = token_ids
        """The known beginning of the text."""
        self._before: Logits | None = None
        """Where logits are shifted, those of the token before the block."""
        self.block = self._next_block()

    def read_prompt(self, limits: DecodeLimits) -> int:
        """Compute the slots of the whole blocks before the text's end, but the last one; returns the passes.

        Raises:
            Cancelled: the caller cancelled.
        """
        arena, size = self._bound.arena, self._blocks.size
        # The last whole block runs with the first masks: its last logits may be those of the first masked token.
        end = max(self.block.start - size, 0)
        arena.rewind_to(min(arena.length, end) // size * size)
        arena.expect(len(self.token_ids) - arena.length)
        first, passes = arena.length, 0
        while arena.length < end:
            if limits.cancelled():
                raise Cancelled
            limits.progress(READING_PROMPT, (arena.length - first) / (end - first))
            count = min(max(PREFILL_TOKENS // size, 1) * size, end - arena.length)
            self._forward(self.token_ids[arena.length : arena.length + count], [count - 1])
            arena.commit(count)
            passes += 1
        return passes

    def fill(self) -> tuple[int, ...]:
        """Run a pass and keep what the rule says; returns the tokens that continue the known beginning of the text."""
        block, arena, pending = self.block, self._bound.arena, self.block.start - self._bound.arena.length
        masked = np.flatnonzero(~block.known)
        # With shifted logits, a token's are those of the row before it.
        rows = masked + pending - self._blocks.shifted
        given = rows >= 0
        wanted = [*([pending - 1] if pending and self._blocks.shifted else []), *rows[given].tolist()]
        logits = self._forward([*self.token_ids[arena.length : block.start], *block.cells.tolist()], wanted)
        if pending:
            arena.commit(pending)
            if self._blocks.shifted:
                self._before, logits = logits[0].copy(), logits[1:]
        block.passes += 1
        every: list[Logits] = [*([] if given.all() or self._before is None else [self._before]), *logits]
        found = [self._candidate(each, block.start + place) for place, each in zip(masked.tolist(), every, strict=True)]
        return self._keep(masked, found)

    def _keep(self, masked: npt.NDArray[np.int64], found: list[_Candidate]) -> tuple[int, ...]:
        block = self.block
        tokens = np.array([each.token for each in found])
        block.steady[masked] = np.where(block.latest[masked] == tokens, block.steady[masked] + 1, 1)
        block.latest[masked] = tokens
        confidence, gap, entropy = np.array([(each.confidence, each.gap, each.entropy) for each in found]).T
        candidates = Candidates(masked, confidence, gap, entropy, block.steady[masked], block.cells.size)
        kept = self._rule.keeps(candidates)
        for index in np.flatnonzero(kept if kept.any() else most_confident(candidates, 1)).tolist():
            place, each = int(masked[index]), found[index]
            block.cells[place], block.known[place] = each.token, True
            if each.logprobs is not None:
                block.logprobs[place] = each.logprobs
        begun = len(self.token_ids) - block.start
        end = block.cells.size if block.known.all() else int(block.known.argmin())
        new = tuple(block.cells[begun:end].tolist())
        self.token_ids.extend(new)
        return new

    def logprobs_of(self, tokens: Sequence[int]) -> tuple[PositionLogprobs, ...]:
        """Log-probabilities of the tokens that were found last, if they were asked for."""
        first = len(self.token_ids) - len(tokens) - self.block.start
        return tuple(self.block.logprobs[place] for place in range(first, first + len(tokens)) if self.block.logprobs)

    def advance(self) -> None:
        """Begin the next block if this one is known."""
        if self.block.known.all():
            self.block = self._next_block()

    def _next_block(self) -> _Block:
        start = len(self.token_ids) // self._blocks.size * self._blocks.size
        size = min(self._blocks.size, self._bound.arena.limit - start)
        cells = np.full(size, self._blocks.mask)
        begun = self.token_ids[start:]
        cells[: len(begun)] = begun
        return _Block(start, cells, np.arange(size) < len(begun), np.zeros(size, np.int64), np.full(size, -1))

    def _candidate(self, logits: Logits, position: int) -> _Candidate:
        scores = logits.copy()
        scores[self._blocks.mask] = -np.inf
        # Each pass draws anew: a token that was not kept says nothing about the next candidate.
        token = self._sampler.choose(scores, position + self.block.passes * _DRAWS)
        weights = np.exp(scores - scores.max(), dtype=np.float64)
        probabilities = weights / weights.sum()
        second, first = np.partition(scores, scores.size - 2)[-2:].tolist()
        entropy = -float(probabilities @ np.log(np.maximum(probabilities, 1e-300)))
        listed = None if self._log_softmax is None else self._log_softmax.at(scores, token)
        return _Candidate(token, float(probabilities[token]), first - second, entropy, listed)

    def _forward(self, tokens: list[int], wanted: list[int]) -> Floats:
        """Run tokens behind the cache, each of which attends to its block and those before it."""
        block = np.arange(len(tokens)) // self._blocks.size  # the cache ends with a whole block
        return self._bound.forward(tokens, logits_for=wanted, tree_mask=block[:, None] >= block)


def block_decode(
    bound: BoundGraph,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    limits: DecodeLimits,
    rule: CommitRule,
    log_softmax: LogSoftmax | None = None,
    *,
    answer_length: int = 0,
) -> Generator[Step, None, None]:
    """Continue `prompt_ids` block by block, and yield one `Step` per pass; arguments and errors as for `decode`.

    Args:
        bound: the session of a graph with `GraphIO.blocks`.
        rule: which candidates a pass keeps.

    A step has the tokens that the pass added to the known beginning of the text: none if one before them is missing.
    """
    blocks = bound.graph_io.blocks
    if blocks is None:
        raise ValueError("this model does not fill blocks")
    arena = bound.arena
    check_prompt_fits(prompt_ids, arena.limit)
    remaining = min(limits.max_tokens or arena.limit, arena.limit - len(prompt_ids))
    prompt_length = len(prompt_ids) - answer_length
    sampler.observe_prompt(prompt_ids[:prompt_length])
    sampler.observe(prompt_ids[prompt_length:])
    text = _BlockText(bound, blocks, sampler, rule, log_softmax, list(prompt_ids))
    try:
        before = arena.length
        passes = text.read_prompt(limits)
        yield Step((), target_passes=passes, prompt_readers={bound.last_graph: arena.length - before} if passes else {})
        finish = None
        while finish is None:
            if limits.cancelled():
                raise Cancelled
            tokens = text.fill()
            listed = text.logprobs_of(tokens)
            text.advance()
            ends = [index for index, token in enumerate(tokens[:remaining]) if token in limits.eos]
            if ends:
                finish, tokens, listed = FinishReason.STOP, tokens[: ends[0]], listed[: ends[0] + 1]
            elif len(tokens) >= remaining:
                finish, tokens, listed = FinishReason.LENGTH, tokens[:remaining], listed[:remaining]
            remaining -= len(tokens)
            sampler.observe(tokens)
            origins = (DraftOrigin(OriginKind.DECODED),) * len(tokens) if listed else ()
            yield Step(tokens, finish, logprobs=listed, origins=origins)
    except Cancelled:
        yield Step((), FinishReason.CANCELLED, target_passes=0)
