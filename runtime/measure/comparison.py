"""Compares speculative text with plain text, prompt by prompt, and judges every difference.

So that there is something to find, guesses are not pruned to what pays: to the speculators used here, rows are free.
Besides the drafters that the engine has, two know the plain answer: one proposes it, which makes the longest passes
that can be accepted, and one hides it among false branches, which makes trees whose accepted rows lie apart.

A difference is acquitted where plain decoding's choice was a near-tie. Greedily that is one between two logits closer
than epsilon. Where tokens are drawn, the next token is the one whose share of the cumulative law holds the position's
uniform number u. If no logit moves by more than epsilon / 2, the log-odds of an edge between two shares move by at most
epsilon / temperature, so a difference is acquitted if those of u are that near to the edge that was crossed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..decode import DecodeLimits, FinishReason, decode
from ..engine import Engine
from ..options import GenerationRequest
from ..prefill import prefill
from ..sampling import Logits, Sampler, SamplingParams, uniform_at
from ..speculation.drafters.oracle import OracleDrafter, TreeDrafter
from ..speculation.drafters.recycling import RecyclingDrafter
from ..speculation.growth import Grower
from ..speculation.near_ties import NearTies
from ..speculation.pass_cost import PassCost
from ..speculation.speculator import MAX_DRAFT_WIDTH, Speculator
from ..speculation.tree import Source, Tree
from .exactness import ComparisonCounts, Counterexample, ExactnessReport
from .width_noise import WidthNoise, measure_width_noise

_NOISE_TEXTS: Final = 6
_NOISE_TOKENS: Final = 128
_ROWS_FREE: Final = {0: {1: 1.0, MAX_DRAFT_WIDTH: 1.0 + 1e-4}}
"""Seconds of a pass: any guess pays, and what guessing takes does not count beside it."""
_FALSE_PATHS: Final = 0.3
"""Of the hidden answer's tokens, those behind which it is left out."""
_IMPOSSIBLE: Final = 1e30
"""The gap where there is no second token to compare with."""


@dataclass(frozen=True)
class Answer:
    """What was decoded."""

    tokens: tuple[int, ...]
    ended: bool
    """Whether an end-of-sequence token followed."""
    candidates: int = 0
    accepted: int = 0
    again: int = 0
    """Rows run again."""


@dataclass
class _Tally:
    """A `ComparisonCounts` that is being counted."""

    texts: int = 0
    identical: int = 0
    tied: int = 0
    candidates: int = 0
    accepted: int = 0
    widest_tie: float = 0.0
    again: int = 0


class _FreeRows(PassCost):
    """Believes what it was told, whatever passes take."""

    def observe(self, rows: int, context: int, seconds: float) -> None:
        """Learn nothing."""


class _Hidden:
    """A `TreeProposer` that hides the answer among false branches. What it claims about its guesses means nothing."""

    def __init__(self, answer: Sequence[int], start: int, vocab_size: int) -> None:
        self._answer = answer
        self._start = start
        self._vocab_size = vocab_size

    def propose(self, text: Sequence[int], most: int) -> Tree | None:
        """A tree of up to `MAX_DRAFT_WIDTH` rows."""
        random = np.random.default_rng(len(text))
        at = len(text) - self._start
        coming = self._answer[at : at + most]
        tokens, parents, behind = [text[-1]], [-1], 0
        for true in coming:
            siblings = dict.fromkeys([*random.integers(0, self._vocab_size, 2).tolist(), true])
            if random.random() < _FALSE_PATHS:
                siblings.pop(true)
            order = random.permutation(list(siblings)).tolist()
            if len(tokens) + len(order) > MAX_DRAFT_WIDTH:
                break
            parents += [behind] * len(order)
            behind = len(tokens) + order.index(true if true in siblings else order[0])
            tokens += order
            if true not in siblings:
                break
        claims = [1.0, *np.sort(random.uniform(0.3, 1.0, len(tokens) - 1))[::-1].tolist()]
        return Tree.of(tokens, parents, claims, [Source.OTHER] * len(tokens))


class Comparison:
    """Answers prompts plainly and speculatively.

    Args:
        engine: the model; nothing else may run on it meanwhile.
        max_tokens: of an answer.
        seeds: of the sampled answers.
        temperature: of the sampled answers, above 0.
    """

    def __init__(
        self, engine: Engine, max_tokens: int, *, seeds: Sequence[int] = (1, 2), temperature: float = 0.8
    ) -> None:
        self._engine = engine
        self._bound = engine.model.new_sequence().bound
        self._read: tuple[int, ...] = ()
        """The prompt whose rows, but for the last, are in the arena."""
        self._limits = DecodeLimits(max_tokens, engine.tokenizer.eos)
        self._greedy = SamplingParams()
        self._sampled = [SamplingParams(temperature=temperature, seed=seed) for seed in seeds]
        self._trees = engine.graph_io.supports_trees
        self._tallies = {kind: _Tally() for kind in ("greedy", "sampled", "exact")}
        self._counterexample: Counterexample | None = None

    def certify(self, prompts: Sequence[Sequence[int]], progress: Callable[[int, int], None]) -> ExactnessReport:
        """Compare over `prompts`, token ids that leave room for an answer.

        Args:
            prompts: at least one.
            progress: told steps done and to do.

        Raises:
            ContextError: a prompt does not fit the context.
        """
        steps = 2 * len(prompts) + 1
        plain = []
        for prompt in prompts:
            plain.append(self.plain(prompt, self._greedy))
            progress(len(plain), steps)
        noise = self._noise(prompts, plain)
        progress(len(plain) + 1, steps)
        for number, (prompt, answer) in enumerate(zip(prompts, plain, strict=True)):
            self._compare(number, prompt, answer, noise.epsilon)
            progress(len(plain) + 2 + number, steps)
        counts = {kind: ComparisonCounts(**vars(tally)) for kind, tally in self._tallies.items() if tally.texts}
        return ExactnessReport(noise, **counts, counterexample=self._counterexample)

    def plain(self, prompt: Sequence[int], params: SamplingParams) -> Answer:
        """What plain decoding answers."""
        return self._decode(prompt, Sampler(params, self._engine.graph_io.vocab_size), None, None)

    def _noise(self, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> WidthNoise:
        """Over the first prompts and answers: what it is needed for."""
        texts = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
        chosen = [text[-_NOISE_TOKENS:] for text in texts[:_NOISE_TEXTS] if len(text) > 1]
        self._read = ()
        return measure_width_noise(self._bound, chosen)

    def _compare(self, number: int, prompt: Sequence[int], greedy: Answer, epsilon: float) -> None:
        vocab_size = self._engine.graph_io.vocab_size
        for params in (self._greedy, *self._sampled):
            plain = greedy if params.greedy else self.plain(prompt, params)
            for drafter, speculator in self._speculators(prompt, plain, params):
                found = self._decode(prompt, Sampler(params, vocab_size), speculator, None)
                kind = "greedy" if params.greedy else "sampled"
                self._judge(kind, drafter, number, prompt, params, plain, found, epsilon)
            if params.greedy:
                for drafter, speculator in self._speculators(prompt, plain, params):
                    found = self._decode(prompt, Sampler(params, vocab_size), speculator, epsilon)
                    self._judge("exact", drafter, number, prompt, params, plain, found, 0.0)

    def _speculators(
        self, prompt: Sequence[int], plain: Answer, params: SamplingParams
    ) -> list[tuple[str, Speculator]]:
        """By name, new ones: what was learned from another text, or laid to rest, would be missing here."""
        foreseen = OracleDrafter(plain.tokens, len(prompt))
        hidden = TreeDrafter(_Hidden(plain.tokens, len(prompt), self._engine.graph_io.vocab_size))
        made = [("foreseen", self._eager(Grower([foreseen]))), ("hidden", self._eager(Grower([hidden])))]
        auto = self._engine.model.drafters.speculator(GenerationRequest((), params), self._bound.arena)
        if auto is not None:
            made.append(("auto", self._eager(auto.grower)))
        return made

    def _eager(self, grower: Grower) -> Speculator:
        recycle = next((each for each in grower.predictors if isinstance(each, RecyclingDrafter)), None)
        return Speculator(grower, _FreeRows(_ROWS_FREE), trees=self._trees, recycle=recycle)

    def _decode(
        self, prompt: Sequence[int], sampler: Sampler, speculator: Speculator | None, epsilon: float | None
    ) -> Answer:
        """An answer. The prompt's rows are those of one reading for all answers to it."""
        bound = self._bound
        self._rewind(prompt)
        near_ties = None if epsilon is None else NearTies(bound, sampler, epsilon, lambda: False)
        steps = list(decode(bound, prompt, sampler, self._limits, speculator, near_ties))
        rounds = [step.round for step in steps if step.round is not None]
        return Answer(
            tuple(token for step in steps for token in step.tokens),
            steps[-1].finish is FinishReason.STOP,
            sum(sum(each.drafted) for each in rounds),
            sum(sum(each.accepted) for each in rounds),
            0 if near_ties is None else near_ties.rows,
        )

    def _rewind(self, prompt: Sequence[int]) -> None:
        """Leave the rows of `prompt` in the arena, but for the last, which decoding starts with."""
        arena = self._bound.arena
        if self._read != tuple(prompt):
            arena.rewind_to(0)
            prefill(self._bound, prompt[:-1])
            self._read = tuple(prompt)
        arena.rewind_to(len(prompt) - 1)

    def _judge(
        self,
        kind: str,
        drafter: str,
        number: int,
        prompt: Sequence[int],
        params: SamplingParams,
        plain: Answer,
        found: Answer,
        epsilon: float,
    ) -> None:
        tally = self._tallies[kind]
        tally.texts += 1
        tally.candidates += found.candidates
        tally.accepted += found.accepted
        tally.again += found.again
        if (plain.tokens, plain.ended) == (found.tokens, found.ended):
            tally.identical += 1
            return
        place = next(
            (at for at, both in enumerate(zip(plain.tokens, found.tokens, strict=False)) if both[0] != both[1]),
            min(len(plain.tokens), len(found.tokens)),
        )
        expected, other, gap = self._gap(prompt, params, plain, found, place)
        if gap < epsilon:
            tally.tied += 1
            tally.widest_tie = max(tally.widest_tie, gap)
        elif self._counterexample is None:
            self._counterexample = Counterexample(kind, drafter, number, params.seed, place, expected, other, gap)

    def _gap(
        self, prompt: Sequence[int], params: SamplingParams, plain: Answer, found: Answer, place: int
    ) -> tuple[int, int, float]:
        """The tokens of both answers where they first differ, and how far plain decoding's choice is from the other."""
        position = len(prompt) + place
        vocab_size = self._engine.graph_io.vocab_size
        logits = self._plain_logits([*prompt, *plain.tokens[:place]], len(prompt))
        expected = Sampler(params, vocab_size).choose(logits, position)
        ends = sorted(self._limits.eos) if found.ended else []
        others = [found.tokens[place]] if place < len(found.tokens) else ends
        gaps = {other: _distance(logits, params, position, expected, other) for other in others if other != expected}
        if not gaps:
            return expected, others[0] if others else -1, _IMPOSSIBLE
        nearest = min(gaps, key=lambda other: gaps[other])
        return expected, nearest, gaps[nearest]

    def _plain_logits(self, text: Sequence[int], prompt: int) -> Logits:
        """Logits `[V]` for the token after `text`, of which `prompt` tokens were read and the others decoded."""
        last = _Told(text[prompt:])
        self._rewind(text[:prompt])
        limits = DecodeLimits(len(text) - prompt + 1)
        for _ in decode(self._bound, text[:prompt], last, limits):
            pass
        return last.logits


class _Told:
    """A `TokenSampler` that chooses what it is told, and keeps the logits of the choice after that."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = iter(tokens)
        self.logits: Logits = np.empty(0, np.float32)

    def choose(self, logits: Logits, position: int, /) -> int:
        """The next token."""
        del position
        self.logits = logits.copy()
        return next(self._tokens, 0)

    def observe(self, tokens: Sequence[int], /) -> None:
        """Nothing depends on them."""


def _distance(logits: Logits, params: SamplingParams, position: int, expected: int, other: int) -> float:
    """How far, in logits, plain decoding's choice is from choosing `other`."""
    if params.greedy:
        return float(logits[expected] - logits[other])
    # Without filters, the law covers every token: its places are ids.
    cumulative = np.cumsum(Sampler(params, logits.size).probabilities(logits)[1])
    edge = cumulative[other - 1] if other > expected else cumulative[other]
    drawn = uniform_at(params.seed, position) * cumulative[-1]
    return params.temperature * abs(_log_odds(drawn) - _log_odds(float(edge)))


def _log_odds(probability: float) -> float:
    kept = min(max(probability, 1e-300), 1 - 1e-16)
    return math.log(kept) - math.log1p(-kept)
