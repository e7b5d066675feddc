"""Decodes blocks of masked tokens (block diffusion): a pass may find several tokens of a block.

A block begins with its masks. After each pass every masked position has a candidate, and a rule says which of them to
keep; the others stay masked. Once all are known, the next block begins. Source: block diffusion (Arriola et al. 2025,
arXiv 2503.09573), in the order of SDAR (arXiv 2510.06303) and, where logits are shifted, of Fast-dLLM v2 (arXiv
2509.26328); where all tokens attend to each other, LLaDA (arXiv 2502.09992) and Dream (arXiv 2508.15487).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ...models.manifest import BlockDiffusion
from ..decode import DecodeLimits, FinishReason, Step, check_prompt_fits
from ..graph.bound_graph import BoundGraph
from ..graph.graph_io import GraphIO
from ..kv.prefix_cache import CachedSequence
from ..prefill import Cancelled
from ..sampling.logit_stage import Logits
from ..sampling.logprobs import LogSoftmax, PositionLogprobs
from ..sampling.sampler import Sampler, SamplingParams
from ..speculation.rounds import OriginKind, TokenOrigin
from ..strategies.second_reader import ReaderStage, SecondReader
from .block_passes import Block, BlockReader, CausalBlocks, WholeTexts
from .commit_rules import Candidates, CommitRule, most_confident

if TYPE_CHECKING:
    from ..options import GenerateOptions
    from ..text.tokenizer import TextTokenizer

_DRAWS: Final = 1 << 64
"""Distance of the random numbers of two passes: more than a text has positions."""
USUAL_LENGTH: Final = 128
"""Tokens of an answer without a limit, where all tokens attend to each other; that of LLaDA's program."""


_Candidate: TypeAlias = tuple[int, float, float, float, PositionLogprobs | None]
"""What a pass found for a masked position: a token, its confidence, gap and entropy as `Candidates` has them, and
log-probabilities if they were asked for."""


class Guidance(NamedTuple):
    """Classifier-free guidance: the same text is read behind a prompt of masks."""

    sequence: CachedSequence
    compared: Callable[[Logits, Logits], Logits]
    """The logits to choose from, given those behind the prompt and behind the masks."""


@dataclass(frozen=True)
class BlockChoices:
    """What an answer's options say about filling blocks."""

    rule: CommitRule
    size: int
    """Number of tokens of a block, where the model allows any."""
    keeps_slots: bool = False
    """See `block_passes.WholeTexts`."""
    line_ends: frozenset[int] = frozenset()
    """Token ids that end a line, for rules that ask for them."""
    guidance: Guidance | None = None

    @staticmethod
    def of(
        options: GenerateOptions, graph_io: GraphIO, tokenizer: TextTokenizer, readers: Sequence[SecondReader]
    ) -> BlockChoices | None:
        """The choices of options whose strategies have these second readers; None for a model without blocks."""
        if (blocks := graph_io.blocks) is None:
            return None
        rule = options.block_rule if isinstance(options.block_rule, CommitRule) else CommitRule.parse("threshold")
        ends = tokenizer.line_ends() if rule.reads_line_ends else frozenset()
        stages = [each.start(SamplingParams(), graph_io.vocab_size, tokenizer) for each in options.strategies]
        compared = [stage.compared for stage in stages if isinstance(stage, ReaderStage)]
        guidance = Guidance(readers[0].sequence, compared[0]) if compared else None
        return BlockChoices(rule, options.block_size or blocks.size, options.lossy_block_cache, ends, guidance)


class _BlockText:
    """A text whose end is a block of masked tokens."""

    def __init__(
        self,
        readers: Sequence[BlockReader],
        choices: BlockChoices,
        sampler: Sampler,
        log_softmax: LogSoftmax | None,
        limits: DecodeLimits,
        end: int,
    ) -> None:
        self._readers: Final = readers
        self._choices: Final = choices
        self._sampler: Final = sampler
        self._log_softmax: Final = log_softmax
        self._eos: Final = limits.eos
        self._end: Final = end
        self.token_ids: Final = readers[0].token_ids
        """The known beginning of the text."""
        self.block = self._next_block()

    def read_prompt(self, limits: DecodeLimits) -> int:
        """Compute the slots of the prompt that can be kept; returns the passes."""
        return sum(reader.read_prompt(self.block, limits) for reader in self._readers)

    def fill(self) -> tuple[int, ...]:
        """Run a pass and keep what the rule says; returns the tokens that continue the known beginning of the text."""
        block = self.block
        masked = np.flatnonzero(~block.known)
        every, *others = (reader.logits_of(block, masked, self._end) for reader in self._readers)
        if (guidance := self._choices.guidance) is not None:
            every = [guidance.compared(*pair) for pair in zip(every, others[0], strict=True)]
        block.passes += 1
        found = [self._candidate(each, block.start + place) for place, each in zip(masked.tolist(), every, strict=True)]
        return self._keep(masked, found)

    def _keep(self, masked: npt.NDArray[np.intp], found: list[_Candidate]) -> tuple[int, ...]:
        block = self.block
        tokens, confidence, gap, entropy, logprobs = zip(*found, strict=True)
        block.steady[masked] = np.where(block.latest[masked] == tokens, block.steady[masked] + 1, 1)
        block.latest[masked] = tokens
        sure = np.array(confidence), np.array(gap), np.array(entropy)
        ends = np.array([token in self._choices.line_ends for token in tokens])
        candidates = Candidates(masked, *sure, block.steady[masked], ends, block.cells.size)
        kept = self._choices.rule.apply(candidates)
        for index in np.flatnonzero(kept if kept.any() else most_confident(candidates, 1)).tolist():
            place, token = int(masked[index]), tokens[index]
            block.cells[place], block.known[place], block.filled_in[place] = token, True, block.passes
            if logprobs[index] is not None:
                block.logprobs[place] = logprobs[index]
            if token in self._eos:  # nothing behind the end of the text has to be found
                block.known[place:] = True
        begun = len(self.token_ids) - block.start
        end = block.cells.size if block.known.all() else int(block.known.argmin())
        new = tuple(block.cells[begun:end].tolist())
        for reader in self._readers:
            reader.token_ids.extend(new)
        return new

    def passes_of(self, count: int) -> tuple[int, ...]:
        """The passes over the block that found the `count` tokens that were found last."""
        first = len(self.token_ids) - count - self.block.start
        return tuple(self.block.filled_in[first : first + count].tolist())

    def logprobs_of(self, count: int) -> tuple[PositionLogprobs, ...]:
        """Log-probabilities of the `count` tokens that were found last, if they were asked for."""
        first = len(self.token_ids) - count - self.block.start
        return tuple(self.block.logprobs[place] for place in range(first, first + count) if self.block.logprobs)

    def advance(self) -> None:
        """Begin the next block if this one is known."""
        if self.block.known.all():
            self.block = self._next_block()

    def _next_block(self) -> Block:
        return self._readers[0].next_block(self._choices.size, self._end)

    def _candidate(self, logits: Logits, position: int) -> _Candidate:
        scores = logits.copy()
        scores[self._readers[0].blocks.mask] = -np.inf
        # Each pass draws anew: a token that was not kept says nothing about the next candidate.
        token = self._sampler.choose(scores, position + self.block.passes * _DRAWS)
        weights = np.exp(scores - scores.max(), dtype=np.float64)
        probabilities = weights / weights.sum()
        second, first = np.partition(scores, scores.size - 2)[-2:].tolist()
        entropy = -float(probabilities @ np.log(np.maximum(probabilities, 1e-300)))
        listed = None if self._log_softmax is None else self._log_softmax.at(scores, token)
        return token, float(probabilities[token]), first - second, entropy, listed


def block_decode(
    bound: BoundGraph,
    prompt_ids: Sequence[int],
    sampler: Sampler,
    limits: DecodeLimits,
    choices: BlockChoices,
    log_softmax: LogSoftmax | None = None,
    *,
    answer_length: int = 0,
) -> Generator[Step, None, None]:
    """Continue `prompt_ids` block by block, and yield one `Step` per pass; arguments and errors as for `decode`.

    Args:
        bound: the session of a graph with `GraphIO.blocks`.
        choices: how blocks are filled.

    A step has the tokens that the pass added to the known beginning of the text: none if one before them is missing.
    Where all tokens attend to each other, the text is as long as `limits.max_tokens` from the start, or `USUAL_LENGTH`
    without it.
    """
    blocks = bound.graph_io.blocks
    if blocks is None:
        raise ValueError("this model does not fill blocks")
    arena = bound.arena
    check_prompt_fits(prompt_ids, arena.limit)
    wanted = limits.max_tokens or (USUAL_LENGTH if blocks.bidirectional else arena.limit)
    remaining = min(wanted, arena.limit - len(prompt_ids))
    prompt_length = len(prompt_ids) - answer_length
    sampler.observe_prompt(prompt_ids[:prompt_length])
    sampler.observe(prompt_ids[prompt_length:])
    readers = [_reader(bound, blocks, list(prompt_ids), choices)]
    if choices.guidance is not None:
        other = choices.guidance.sequence
        other.continue_with([*[blocks.mask] * prompt_length, *prompt_ids[prompt_length:]])
        readers.append(_reader(other.bound, blocks, other.token_ids, choices, hidden=prompt_length))
    text = _BlockText(readers, choices, sampler, log_softmax, limits, len(prompt_ids) + remaining)
    try:
        before = arena.length
        passes = text.read_prompt(limits)
        yield Step((), target_passes=passes, prompt_readers={bound.last_graph: arena.length - before} if passes else {})
        finish = None
        while finish is None:
            if limits.cancelled():
                raise Cancelled
            tokens = text.fill()
            listed, found_in = text.logprobs_of(len(tokens)), text.passes_of(len(tokens))
            ends = [index for index, token in enumerate(tokens[:remaining]) if token in limits.eos]
            if ends:
                finish, tokens, listed = FinishReason.STOP, tokens[: ends[0]], listed[: ends[0] + 1]
            elif len(tokens) >= remaining:
                finish, tokens, listed = FinishReason.LENGTH, tokens[:remaining], listed[:remaining]
            else:
                text.advance()
            remaining -= len(tokens)
            sampler.observe(tokens)
            origins = tuple(TokenOrigin(OriginKind.FILLED, block_pass=each) for each in found_in[: len(tokens)])
            yield Step(tokens, finish, logprobs=listed, origins=origins)
    except Cancelled:
        yield Step((), FinishReason.CANCELLED, target_passes=0)


def _reader(
    bound: BoundGraph, blocks: BlockDiffusion, token_ids: list[int], choices: BlockChoices, hidden: int = 0
) -> BlockReader:
    if blocks.bidirectional:
        return WholeTexts(bound, blocks, token_ids, hidden, keeps_slots=choices.keeps_slots)
    return CausalBlocks(bound, blocks, token_ids, hidden)
