"""Trials: where the model is uncertain, several continuations are tried, and the likeliest one goes on.

Sources: Wang et al., "Cautious next token prediction" (2025), cntp, whose trials are sampled up to a punctuation mark;
He et al., "Towards better code generation: adaptive decoding with uncertainty guidance" (2025), adadec, which ranks the
likeliest tokens by a look ahead.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Final

import numpy as np

from ...errors import InputError
from ..decode import Step
from ..sampling.distribution import Distribution
from ..sampling.logit_stage import Logits
from ..sampling.sampler import uniform_at
from ..sampling.token_mask import DeadEndError
from .search import Continuation, Search, SearchRun, log_probabilities

if TYPE_CHECKING:
    from ..options import GenerateOptions
    from ..text.tokenizer import TextTokenizer
_LONGEST: Final = 32
"""Most tokens of a trial of cntp that no punctuation mark ends."""
_AHEAD: Final = 5
"""Tokens of a look ahead of adadec, the ranked one included."""


@dataclass(frozen=True)
class TrialSearch(Search):
    """Tries several continuations where the entropy of the model's distribution exceeds a threshold."""

    entropy: float
    """The threshold, in nats."""
    count: int
    """Number of trials."""
    length: int
    """Most tokens of a trial."""
    ends: Callable[[int], bool]
    """Whether a trial ends with a token."""
    sampled: bool
    """Whether trials are sampled and the likeliest is kept. Otherwise each begins with another one of the likeliest
    tokens, goes on with the likeliest of all, and only the first token is kept."""

    def steps(self, run: SearchRun) -> Iterator[Step]:
        """Try and go on.

        Raises:
            InputError: trials are sampled without a temperature.
        """
        if self.sampled and run.sampler.params.greedy:
            raise InputError("trials are sampled, and there is no temperature", "give one above 0, such as 0.8")
        forest, logits, passes = run.forest, run.logits, 0
        while True:
            path = self._likeliest(run, logits)
            step = path.step(forest.passes - passes)
            forest.settle(path.node)  # others may copy the slots of the text from here on
            yield step
            if path.finish is not None:
                return
            run.sampler.observe(path.tokens)
            if run.constraint is not None:
                run.constraint.prepare()
            passes, run = forest.passes, replace(run, most_tokens=run.most_tokens - len(path.tokens))
            logits = forest.extend([0], path.tokens[-1:])[0].copy()
            forest.settle(1)

    def _likeliest(self, run: SearchRun, logits: Logits) -> Continuation:
        """What goes on after the text, by the logits float32 `[V]` there; its node is the one before its last token.

        The likeliest trial has the largest mean log-probability.
        """
        logprobs = log_probabilities(logits)
        possible = logprobs[logprobs > -np.inf]
        trials = self.count if -float(np.dot(np.exp(possible), possible)) > self.entropy else 1
        live, rows = {number: Continuation() for number in range(trials)}, np.array([logits] * trials)
        ended: list[Continuation] = []
        while live:
            longer: dict[int, Continuation] = {}
            for (number, path), row in zip(live.items(), rows, strict=True):
                try:
                    longer[number] = self._longer(run, number, path, row, alone=trials == 1)
                except DeadEndError:  # of this trial alone
                    if number == max(live) and not longer and not ended:
                        raise
            ended += [each for each in longer.values() if trials == 1 or self._is_done(each)]
            live = {number: each for number, each in longer.items() if trials > 1 and not self._is_done(each)}
            if live:
                nodes = count(run.forest.size)
                rows = run.forest.extend(
                    [each.node for each in live.values()], [each.tokens[-1] for each in live.values()]
                )
                live = {number: each._replace(node=next(nodes)) for number, each in live.items()}
        best = max(ended, key=lambda path: path.score / len(path.tokens))
        if self.sampled or len(best.tokens) == 1:
            return best
        return Continuation(best.tokens[:1], logprobs=best.logprobs[:1])

    def _longer(self, run: SearchRun, number: int, path: Continuation, logits: Logits, *, alone: bool) -> Continuation:
        """Trial `number` with one more token, by the logits float32 `[V]` after it."""
        sampler = run.sampler
        position = run.forest.base + 1 + len(path.tokens)
        with sampler.rollback():
            sampler.observe(path.tokens)
            if alone or (self.sampled and not number):
                token = sampler.choose(logits, position)
            elif self.sampled:
                uniform = uniform_at(sampler.params.seed, number << 64 | position)
                token = Distribution.of(sampler, logits).draw(uniform)
            else:
                scores = sampler.scores(logits)
                ranked = np.argsort(-scores, kind="stable")[: int((scores > -np.inf).sum())]
                token = int(ranked[0 if path.tokens else min(number, ranked.size - 1)])
        longer = run.extended(path, token, logits, 2 * self.count)
        return longer._replace(score=path.score + float(log_probabilities(logits)[token]))

    def _is_done(self, path: Continuation) -> bool:
        return path.finish is not None or len(path.tokens) >= self.length or self.ends(path.tokens[-1])


def search(options: GenerateOptions, tokenizer: TextTokenizer) -> TrialSearch:
    """The search that options ask for."""

    def ends(token: int) -> bool:
        text = tokenizer.decode([token])
        return "\n" in text or unicodedata.category(text.strip()[-1:] or " ").startswith("P")

    if options.adadec:
        return TrialSearch(options.entropy, options.trials, _AHEAD, lambda _: False, sampled=False)
    return TrialSearch(options.entropy, options.trials, _LONGEST, ends, sampled=True)
