"""Passes over a text whose end is a block of masked tokens, and what they leave in the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import BlockDiffusion
from ..decode import DecodeLimits
from ..graph.bound_graph import BoundGraph
from ..graph.graph_io import Floats
from ..prefill import PREFILL_TOKENS, READING_PROMPT, Cancelled
from ..sampling.logit_stage import Logits
from ..sampling.logprobs import PositionLogprobs


@dataclass
class Block:
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
    filled_in: npt.NDArray[np.int64]
    """The pass over the block, from 1, that each token was kept in; 0 for none."""
    passes: int = 0
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    """Log-probabilities by place in the block, if they were asked for."""


class BlockReader(ABC):
    """Computes the logits of masked tokens.

    Args:
        bound: the session of a graph with `GraphIO.blocks`.
        blocks: how the model fills blocks.
        token_ids: the known beginning of the text, which the caller extends.
        hidden: number of tokens of the text whose places hold masks, for this reader.
    """

    def __init__(self, bound: BoundGraph, blocks: BlockDiffusion, token_ids: list[int], hidden: int = 0) -> None:
        self.bound: Final = bound
        self.blocks: Final = blocks
        self.token_ids: Final = token_ids
        self._hidden: Final = hidden

    def cells(self, block: Block) -> list[int]:
        """The token ids of a block as this reader sees them."""
        hidden = max(self._hidden - block.start, 0)
        return [*[self.blocks.mask] * hidden, *block.cells[hidden:].tolist()]

    @abstractmethod
    def next_block(self, size: int, end: int) -> Block:
        """The block behind the known text, of `size` tokens where the model allows any; the text ends at `end`."""

    @abstractmethod
    def read_prompt(self, block: Block, limits: DecodeLimits) -> int:
        """Compute slots of the text before the first block that can be kept; returns the passes.

        Raises:
            Cancelled: the caller cancelled.
        """

    @abstractmethod
    def logits_of(self, block: Block, masked: npt.NDArray[np.intp], end: int) -> list[Logits]:
        """Run a pass over the block; returns the logits float32 `[V]` of the masked places of the block.

        Args:
            block: the block.
            masked: places in it.
            end: length of the text with all masks behind the block.
        """


class CausalBlocks(BlockReader):
    """Tokens attend to all of their block, and to every block before it.

    The slots of a block are valid once all its tokens are known and have run once more, which they do in the first pass
    of the next block.
    """

    _before: Logits | None = None
    """Where logits are shifted, those of the token before the block."""

    def next_block(self, size: int, end: int) -> Block:
        """A block of the model's size, which begins at a multiple of it."""
        del size, end
        start = len(self.token_ids) // self.blocks.size * self.blocks.size
        room = min(self.blocks.size, self.bound.arena.limit - start)
        return _block(start, self.token_ids[start:], room, self.blocks.mask)

    def read_prompt(self, block: Block, limits: DecodeLimits) -> int:
        """Compute the slots of the whole blocks before the text's end, but the last one; returns the passes."""
        arena, size = self.bound.arena, self.blocks.size
        # The last whole block runs with the first masks: its last logits may be those of the first masked token.
        end = max(block.start - size, 0)
        arena.rewind_to(min(arena.length, end) // size * size)
        arena.expect(len(self.token_ids) - arena.length)
        first, passes = arena.length, 0
        while arena.length < end:
            if limits.cancelled():
                raise Cancelled
            limits.progress(READING_PROMPT, (arena.length - first) / (end - first))
            width = self.bound.prefill_width(PREFILL_TOKENS, end - arena.length)
            count = min(max(width // size, 1) * size, end - arena.length)
            self._forward(self.token_ids[arena.length : arena.length + count], [count - 1])
            arena.commit(count)
            passes += 1
        return passes

    def logits_of(self, block: Block, masked: npt.NDArray[np.intp], end: int) -> list[Logits]:
        """Run the block, behind the tokens before it whose slots are not computed yet."""
        del end
        arena, pending = self.bound.arena, block.start - self.bound.arena.length
        # With shifted logits, a token's are those of the row before it.
        rows = masked + pending - self.blocks.shifted
        given = rows >= 0
        wanted = [*([pending - 1] if pending and self.blocks.shifted else []), *rows[given].tolist()]
        logits = self._forward([*self.token_ids[arena.length : block.start], *self.cells(block)], wanted)
        if pending:
            arena.commit(pending)
            if self.blocks.shifted:
                self._before, logits = logits[0].copy(), logits[1:]
        return [*([] if given.all() or self._before is None else [self._before]), *logits]

    def _forward(self, tokens: list[int], wanted: list[int]) -> Floats:
        block = np.arange(len(tokens)) // self.blocks.size  # the cache ends with a whole block
        return self.bound.forward(tokens, logits_for=wanted, tree_mask=block[:, None] >= block)


class WholeTexts(BlockReader):
    """All tokens of a text attend to each other, those behind a block too, so that each one changes all slots.

    A pass runs the whole text, with masks up to its end. With `keeps_slots`, only the first pass over a block does. The
    others run the block alone, which reads the slots that all other tokens had then: an approximation, the dual cache
    of Fast-dLLM (arXiv 2505.22618). Between two passes the cache is empty, as its slots are of no use to another text.
    """

    def __init__(
        self,
        bound: BoundGraph,
        blocks: BlockDiffusion,
        token_ids: list[int],
        hidden: int = 0,
        *,
        keeps_slots: bool,
    ) -> None:
        super().__init__(bound, blocks, token_ids, hidden)
        self._keeps_slots: Final = keeps_slots
        self._kept = 0
        """Number of slots of the tokens outside of the block."""

    def next_block(self, size: int, end: int) -> Block:
        """A block directly behind the known text."""
        start = len(self.token_ids)
        return _block(start, [], min(size, end - start), self.blocks.mask)

    def read_prompt(self, block: Block, limits: DecodeLimits) -> int:
        """Nothing of a prompt can be kept."""
        del block, limits
        self.bound.arena.rewind_to(0)
        return 0

    def logits_of(self, block: Block, masked: npt.NDArray[np.intp], end: int) -> list[Logits]:
        """Run the whole text, or the block."""
        arena, shifted = self.bound.arena, self.blocks.shifted
        first, stop = block.start - shifted, block.start + block.cells.size  # what runs in each pass
        cells = [*self.token_ids[first : block.start], *self.cells(block)]
        rows = masked + (block.start - first) - shifted
        if block.passes and self._keeps_slots:
            arena.commit(self._kept)
            logits = self._forward(cells, rows, np.arange(first, stop))
        else:
            behind = [self.blocks.mask] * (end - stop)
            logits = self._forward([*self.token_ids[:first], *cells, *behind], rows + first)
            if self._keeps_slots:
                arena.compact(0, [*range(first), *range(stop, end)])
                self._kept = arena.length
        arena.rewind_to(0)
        return list(logits)

    def _forward(
        self, tokens: list[int], wanted: npt.NDArray[np.intp], positions: npt.NDArray[np.intp] | None = None
    ) -> Floats:
        every = np.ones((len(tokens), len(tokens)), np.bool_)
        return self.bound.forward(tokens, logits_for=wanted, positions=positions, tree_mask=every)


def _block(start: int, begun: list[int], size: int, mask: int) -> Block:
    cells = np.full(size, mask)
    cells[: len(begun)] = begun
    none = np.zeros(size, np.int64)
    return Block(start, cells, np.arange(size) < len(begun), none, np.full(size, -1), none.copy())
