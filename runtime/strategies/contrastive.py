"""Contrastive search: the likely token whose hidden state is least like those of the text before it.

Source: Su et al., "A contrastive framework for neural text generation" (2022); tokens as in transformers 4, whose
version 5 has it no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ...errors import InputError
from ..decode import Step
from .search import Continuation, Search, SearchRun

if TYPE_CHECKING:
    from ..options import GenerateOptions
    from ..text.tokenizer import TextTokenizer

_CANDIDATES: Final = 4
"""Number of candidates where `top_k` is not given."""


@dataclass(frozen=True)
class ContrastiveSearch(Search):
    """Runs the likeliest tokens as siblings of one tree: one pass a token, which also gives the logits after each."""

    alpha: float
    """Weight of the likeness; the probability has the rest."""
    candidates: int
    reads_states = True

    def steps(self, run: SearchRun) -> Iterator[Step]:
        """Choose token by token."""
        forest, logits = run.forest, run.logits
        while True:
            scores = run.scores((), logits)
            most = min(self.candidates, int((scores > -np.inf).sum()), forest.room)
            likeliest = np.argsort(-scores, kind="stable")[:most]
            weights = np.exp(scores - scores[likeliest[0]], dtype=np.float64)
            rows = forest.extend([0] * likeliest.size, likeliest.tolist())
            states = forest.states()
            states /= np.linalg.norm(states, axis=1, keepdims=True)
            likeness = (states[-likeliest.size :] @ states[: -likeliest.size].T).max(axis=1)
            best = int(((1 - self.alpha) * weights[likeliest] / weights.sum() - self.alpha * likeness).argmax())
            path = run.extended(Continuation(), int(likeliest[best]), logits, 0)
            yield path.step(1)
            if path.finish is not None:
                return
            run.sampler.observe(path.tokens)
            if run.constraint is not None:
                run.constraint.prepare()
            run, logits = replace(run, most_tokens=run.most_tokens - 1), rows[best].copy()
            forest.settle(1 + best)


def search(options: GenerateOptions, _: TextTokenizer) -> ContrastiveSearch:
    """The search that options ask for.

    Raises:
        InputError: it is to sample.
    """
    if options.temperature:
        raise InputError("penalty_alpha and temperature are both given", "contrastive search does not sample")
    return ContrastiveSearch(options.penalty_alpha, options.top_k or _CANDIDATES)
