"""Trials: where the model is uncertain, several continuations are tried, and the likeliest one goes on.

Sources: Wang et al., "Cautious next token prediction" (2025), cntp, whose trials are sampled up to a punctuation mark;
He et al., "Towards better code generation: adaptive decoding with uncertainty guidance" (2025), adadec, which ranks the
likeliest tokens by a look ahead.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

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


class Trial(NamedTuple):
    """One of several continuations; the likeliest has the largest mean log-probability."""

    number: int
    path: Continuation = Continuation()
    total: float = 0.0
    """Log-probability of its tokens."""
    node: int = 0
    """The node of the forest that it goes on from."""


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
            path, node = self._likeliest(run, logits)
            step = path.step(forest.passes - passes)
            forest.settle(node)  # others may copy the slots of the text from here on
            yield step
            if path.finish is not None:
                return
            run.sampler.observe(path.tokens)
            if run.constraint is not None:
                run.constraint.prepare()
            passes, run = forest.passes, replace(run, most_tokens=run.most_tokens - len(path.tokens))
            logits = forest.extend([0], path.tokens[-1:])[0].copy()
            forest.settle(1)

    def _likeliest(self, run: SearchRun, logits: Logits) -> tuple[Continuation, int]:
        """What goes on after the text, by the logits float32 `[V]` there, and the node before its last token."""
        logprobs = log_probabilities(logits)
        possible = logprobs[logprobs > -np.inf]
        trials = self.count if -float(np.dot(np.exp(possible), possible)) > self.entropy else 1
        live, rows = [Trial(number) for number in range(trials)], np.array([logits] * trials)
        ended: list[Trial] = []
        while live:
            longer = []
            for trial, row in zip(live, rows, strict=True):
                try:
                    longer.append(self._longer(run, trial, row, alone=trials == 1))
                except DeadEndError:  # of this trial alone
                    if trial is live[-1] and not longer and not ended:
                        raise
            ended += [each for each in longer if trials == 1 or self._is_done(each.path)]
            live = [each for each in longer if trials > 1 and not self._is_done(each.path)]
            if live:
                first = run.forest.size
                rows = run.forest.extend([each.node for each in live], [each.path.tokens[-1] for each in live])
                live = [each._replace(node=first + index) for index, each in enumerate(live)]
        best = max(ended, key=lambda trial: trial.total / len(trial.path.tokens))
        if self.sampled or len(best.path.tokens) == 1:
            return best.path, best.node
        return Continuation(best.path.tokens[:1], logprobs=best.path.logprobs[:1]), 0

    def _longer(self, run: SearchRun, trial: Trial, logits: Logits, *, alone: bool) -> Trial:
        """A trial with one more token, by the logits float32 `[V]` after it."""
        path, sampler = trial.path, run.sampler
        position = run.forest.base + 1 + len(path.tokens)
        with sampler.rollback():
            sampler.observe(path.tokens)
            if alone or (self.sampled and not trial.number):
                token = sampler.choose(logits, position)
            elif self.sampled:
                uniform = uniform_at(sampler.params.seed, trial.number << 64 | position)
                token = Distribution.of(sampler, logits).draw(uniform)
            else:
                scores = sampler.scores(logits)
                ranked = np.argsort(-scores, kind="stable")[: int((scores > -np.inf).sum())]
                token = int(ranked[0 if path.tokens else min(trial.number, ranked.size - 1)])
        longer = run.extended(path, token, logits, 2 * self.count)
        return trial._replace(path=longer, total=trial.total + float(log_probabilities(logits)[token]))

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
