"""Compares speculative with plain text and classifies every difference.

Drafts are not pruned to what pays here, so that there is something to compare: the speculators assume that wider passes
cost nothing. Besides the drafters that the model has, two know the plain answer. One drafts it, which makes the longest
drafts that can be accepted; one hides it among false branches, which makes trees whose accepted nodes lie apart. With
these two, greedy answers are also generated several at a time, in passes that they share.

A difference is within tolerance if plain decoding's choice was a near tie. For greedy decoding that is a margin of less
than epsilon between two logits. For sampling, the next token is the one whose share of the cumulative distribution
holds the position's uniform number u. If no logit moves by more than epsilon / 2, the log-odds of a boundary between
two shares move by at most epsilon / temperature; so a difference is within tolerance if the log-odds of u are that
close to the boundary that was crossed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from ..decode import DecodeLimits, FinishReason, Step, decode
from ..engine import Engine
from ..graph.graph_choice import ChosenSession
from ..kv.arena import shared_tokens
from ..long_context.long_graph import LongContextGraph
from ..options import GenerateOptions, Request
from ..prefill import prefill
from ..result import DraftCounts
from ..sampling.logit_stage import Logits
from ..sampling.sampler import Sampler, SamplingParams, uniform_at
from ..scheduling.request_queue import TurnTaker
from ..scheduling.several_answers import run_together
from ..speculation.drafters.interface import Candidate, Drafter, ModelDrafter
from ..speculation.pass_cost import PassCost
from ..speculation.replay import OracleDrafter
from ..speculation.speculator import MAX_DRAFT_WIDTH, Speculator
from ..speculation.verification import NearTies
from .exactness import ComparisonCounts, Counterexample, ExactnessReport, measure_width_noise

_NOISE_TEXTS: Final = 6
"""Texts over which width noise is measured."""
_NOISE_TOKENS: Final = 128
_EQUAL_COST: Final = {0: {1: 1.0, MAX_DRAFT_WIDTH: 1.0 + 1e-4}}
"""Seconds by context and width with which every draft pays and the cost of drafting is negligible."""
_OMISSION_RATE: Final = 0.3
"""Share of the answer's tokens that the hiding drafter leaves out, which ends the draft."""
_NO_TIE: Final = 1e30
"""The gap where there is no second token to compare with."""


@dataclass(frozen=True)
class Answer:
    """A decoded answer."""

    token_ids: tuple[int, ...]
    ended: bool
    """Whether an end-of-sequence token followed."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Draft tokens that were verified and accepted."""
    recomputed: int = 0
    """Number of positions that were recomputed."""


class _ConstantPassCost(PassCost):
    """A pass cost that does not change with observed passes."""

    def observe(self, width: int, context: int, seconds: float) -> None:
        """Ignore the pass."""


class _HidingDrafter(OracleDrafter):
    """Hides the answer's tokens among false ones, and leaves some of them out, which ends the draft."""

    prior = (0.9,)

    def __init__(self, answer: Sequence[int], start: int, vocab_size: int) -> None:
        super().__init__(answer, start)
        self._vocab_size = vocab_size

    def after(self, state: int, token: int) -> int:
        """The next index; -1, where nothing is drafted, after a false token."""
        return state + 1 if 0 <= state < len(self._answer) and token == self._answer[state] else -1

    def candidates(self, state: int) -> Sequence[Candidate]:
        """The answer's token at this index and two random ones, in a random order."""
        if not (hidden := super().candidates(state)):
            return ()
        random = np.random.default_rng((self._index, state))
        tokens = set(random.integers(0, self._vocab_size, 2).tolist()) - {hidden[0].token}
        if random.random() >= _OMISSION_RATE:
            tokens.add(hidden[0].token)
        return [Candidate(token, 0) for token in random.permutation(sorted(tokens)).tolist()]


class Comparison:
    """Answers prompts plainly and speculatively, and compares the answers.

    Args:
        engine: the model; nothing else may run on it meanwhile.
        max_tokens: most tokens of an answer.
    """

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        self._engine = engine
        self._bound = engine.model.new_sequence().bound
        # Exact answers run in the model's own graph, and all answers to a prompt share the slots of one prefill.
        self._bound.prefers_base = True
        self._cached_prompt: tuple[int, ...] = ()
        """The prompt whose slots, except for the last token's, are in the arena."""
        self._limits = DecodeLimits(max_tokens, engine.tokenizer.eos)
        self._greedy = SamplingParams()
        self._sampled = [SamplingParams(temperature=0.8, seed=seed) for seed in (1, 2)]
        self._trees = engine.graph_io.supports_trees
        self._counts: dict[str, ComparisonCounts] = {}
        self.texts: list[list[int]] = []
        """Token ids of the prompts of the last report, each with its plain greedy answer."""
        self._counterexample: Counterexample | None = None

    def report(self, prompts: Sequence[Sequence[int]], progress: Callable[[float], None]) -> ExactnessReport:
        """Compare over prompts.

        Args:
            prompts: token ids that leave room for an answer, at least one prompt.
            progress: receives the fraction done, 0 to 1.

        Raises:
            ContextError: a prompt does not fit the context.
        """
        steps = 2 * len(prompts) + 2
        plain = []
        for prompt in prompts:
            plain.append(self.plain(prompt, self._greedy))
            progress(len(plain) / steps)
        self.texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, plain, strict=True)]
        self._cached_prompt = ()
        long = self._bound.further(LongContextGraph.name) if isinstance(self._bound, ChosenSession) else None
        chosen = [text[-_NOISE_TOKENS:] for text in self.texts[:_NOISE_TEXTS] if len(text) > 1]
        noise = measure_width_noise(self._bound, chosen, long_context=long)
        progress((len(plain) + 1) / steps)
        for number, (prompt, answer) in enumerate(zip(prompts, plain, strict=True)):
            self._compare_prompt(number, prompt, answer, noise.epsilon)
            progress((len(plain) + 2 + number) / steps)
        self._compare_together(prompts, plain, noise.epsilon)
        progress(1.0)
        return ExactnessReport(noise, **self._counts, counterexample=self._counterexample)

    def plain(self, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        """Answer a prompt without speculation."""
        return self._decode(prompt, sampling, None, None)

    def _compare_prompt(self, index: int, prompt: Sequence[int], greedy: Answer, epsilon: float) -> None:
        for sampling in (self._greedy, *self._sampled):
            plain = greedy if sampling.greedy else self.plain(prompt, sampling)
            # Kinds of answers, the margin below which they recompute near ties, and below which they may differ.
            kinds = [("greedy", None, epsilon), ("exact", epsilon, 0.0)] if sampling.greedy else []
            for kind, recomputed, allowed in kinds or [("sampled", None, epsilon)]:
                for drafter, speculator in self._speculators(prompt, plain, sampling):
                    found = self._decode(prompt, sampling, speculator, recomputed)
                    self._count(kind, drafter, index, prompt, sampling, plain, found, allowed)

    def _compare_together(self, prompts: Sequence[Sequence[int]], plain: Sequence[Answer], epsilon: float) -> None:
        """Compare greedy answers that are generated several at a time, in passes that they share."""
        model, queue = self._engine.model, self._engine.model.queue
        if isinstance(model.shared_passes, str):
            return

        def steps(prompt: Sequence[int], speculator: Speculator, taker: TurnTaker) -> Generator[Step, None, None]:
            bound = model.new_sequence().bound
            bound.prefers_base = True
            prefill(bound, prompt[:-1])
            bound.shares_passes = True
            limits = replace(self._limits, cancelled=partial(queue.yield_turn, taker))
            yield from decode(bound, prompt, self._sampler(self._greedy), limits, speculator)

        # Chains in every other answer, beside trees.
        chosen = [
            self._speculators(prompt, answer, self._greedy)[index % 2]
            for index, (prompt, answer) in enumerate(zip(prompts, plain, strict=True))
        ]
        starts = [partial(steps, prompt, speculator) for prompt, (_, speculator) in zip(prompts, chosen, strict=True)]
        found: list[list[Step]] = [[] for _ in prompts]
        for index, step in run_together(queue, starts, [TurnTaker(steady=True) for _ in starts], queue.parallel):
            found[index].append(step)
        for index, (prompt, (drafter, _)) in enumerate(zip(prompts, chosen, strict=True)):
            answer = _answer(found[index])
            self._count("together", drafter, index, prompt, self._greedy, plain[index], answer, epsilon)

    def _speculators(
        self, prompt: Sequence[int], plain: Answer, sampling: SamplingParams
    ) -> list[tuple[str, Speculator]]:
        """Create speculators by name: new ones, which have neither learned nor disabled anything yet."""
        oracle = OracleDrafter(plain.token_ids, len(prompt))
        hiding = _HidingDrafter(plain.token_ids, len(prompt), self._engine.graph_io.vocab_size)
        speculators = [("oracle", self._unpruned([oracle])), ("oracle tree", self._unpruned([hiding]))]
        with self._engine.model.drafters.answering(Request((), GenerateOptions(), sampling), self._bound.arena) as auto:
            if auto is not None:
                speculators.append(("auto", self._unpruned(auto.drafters, auto.model)))
        return speculators

    def _unpruned(self, drafters: Sequence[Drafter], model: ModelDrafter | None = None) -> Speculator:
        return Speculator(drafters, _ConstantPassCost(_EQUAL_COST), model=model, trees=self._trees)

    def _decode(
        self, prompt: Sequence[int], sampling: SamplingParams, speculator: Speculator | None, epsilon: float | None
    ) -> Answer:
        """Answer a prompt; all answers to a prompt share the slots of one prefill."""
        self._rewind(prompt)
        sampler = self._sampler(sampling)
        near_ties = None if epsilon is None else NearTies(self._bound, sampler, epsilon, lambda: False)
        steps = list(decode(self._bound, prompt, sampler, self._limits, speculator, near_ties))
        return _answer(steps, 0 if near_ties is None else near_ties.passes)

    def _sampler(self, sampling: SamplingParams) -> Sampler:
        return Sampler(sampling, self._engine.graph_io.vocab_size)

    def _rewind(self, prompt: Sequence[int]) -> None:
        """Leave the slots of `prompt` in the arena, except for the last token's, with which decoding starts."""
        arena = self._bound.arena
        if self._cached_prompt != tuple(prompt):
            arena.rewind_to(0)
            prefill(self._bound, prompt[:-1])
            self._cached_prompt = tuple(prompt)
        arena.rewind_to(len(prompt) - 1)

    def _count(
        self,
        kind: str,
        drafter: str,
        number: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        plain: Answer,
        found: Answer,
        epsilon: float,
    ) -> None:
        """Count an answer to the prompt of an index; the first that differs where it must not is kept."""
        identical = (plain.token_ids, plain.ended) == (found.token_ids, found.ended)
        near_tie, gap = False, 0.0
        if not identical:
            index = shared_tokens(plain.token_ids, found.token_ids)
            expected, other, gap = self._gap(prompt, sampling, plain, found, index)
            near_tie = gap < epsilon
            if not near_tie and self._counterexample is None:
                self._counterexample = Counterexample(kind, drafter, number, sampling.seed, index, expected, other, gap)
        counts = ComparisonCounts(
            1, int(identical), int(near_tie), gap if near_tie else 0.0, found.drafts, found.recomputed
        )
        self._counts[kind] = self._counts.get(kind, ComparisonCounts()) + counts

    def _gap(
        self, prompt: Sequence[int], sampling: SamplingParams, plain: Answer, found: Answer, index: int
    ) -> tuple[int, int, float]:
        """Return the tokens where the answers first differ, and how far plain decoding is from the other choice."""
        position = len(prompt) + index
        logits = self._plain_logits([*prompt, *plain.token_ids[:index]], len(prompt))
        expected = Sampler(sampling, logits.size).choose(logits, position)
        end_tokens = sorted(self._limits.eos) if found.ended else []
        others = [found.token_ids[index]] if index < len(found.token_ids) else end_tokens
        gaps = {other: _distance(logits, sampling, position, expected, other) for other in others if other != expected}
        if not gaps:
            return expected, others[0] if others else -1, _NO_TIE
        nearest = min(gaps, key=lambda other: gaps[other])
        return expected, nearest, gaps[nearest]

    def _plain_logits(self, text: Sequence[int], prompt_tokens: int) -> Logits:
        """Return the logits `[V]` after `text`, of which the first tokens are prefilled and the others decoded."""
        self._rewind(text[:prompt_tokens])
        for token in text[prompt_tokens - 1 :]:
            logits: Logits = self._bound.forward((token,))[0]
            self._bound.arena.commit(1)
        return logits.copy()


def _answer(steps: Sequence[Step], recomputed: int = 0) -> Answer:
    """The answer of a decode loop's steps."""
    rounds = [step.round for step in steps if step.round is not None]
    return Answer(
        tuple(token for step in steps for token in step.tokens),
        steps[-1].finish is FinishReason.STOP,
        DraftCounts(sum(sum(each.drafted) for each in rounds), sum(sum(each.accepted) for each in rounds)),
        recomputed,
    )


def _distance(logits: Logits, sampling: SamplingParams, position: int, expected: int, other: int) -> float:
    """Return how far, in logits, plain decoding's choice is from choosing `other`."""
    if sampling.greedy:
        return float(logits[expected] - logits[other])
    # Without filters the distribution covers every token, so its indices are token ids.
    cumulative = np.cumsum(Sampler(sampling, logits.size).probabilities(logits)[1])
    boundary = cumulative[other - 1] if other > expected else cumulative[other]
    uniform = uniform_at(sampling.seed, position) * cumulative[-1]
    return sampling.temperature * abs(_log_odds(uniform) - _log_odds(float(boundary)))


def _log_odds(probability: float) -> float:
    clipped = min(max(probability, 1e-300), 1 - 1e-16)
    return math.log(clipped) - math.log1p(-clipped)
