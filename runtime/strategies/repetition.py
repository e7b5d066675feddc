"""Strategies against repetition, by where the text comes back to what it has already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from ..arguments.argument_types import option
from ..sampling.logit_stage import Logits
from .strategy import Strategy, StrategyStage

_LARGEST_PENALTY: Final = 1e6
_LONGEST_PENALIZED: Final = 128
"""Number of tokens of a repeated sequence up to which its penalty grows; comparing further ones takes long."""
_LONGEST: Final = 5
"""Longest sequence that resistance is measured by, as published."""


@dataclass(frozen=True)
class Dry(Strategy):
    """Don't repeat yourself."""

    name: ClassVar[str] = "dry"
    purpose: ClassVar[str] = "Ends loops: tokens that would continue a sequence as before are made less likely."
    source: ClassVar[str] = "llama.cpp, DRY sampler (P. E. Weidmann, text-generation-webui pull request 5677)"
    multiplier: float = option(0.8, "Penalty for the shortest repeated sequence that has one.", least=0, most=100)
    base: float = option(1.75, "By how much each further token, up to the 128th, multiplies it.", least=1, most=10)
    allowed_length: int = option(2, "Longest repeated sequence without a penalty, in tokens.", least=1)
    last: int = option(-1, "Number of tokens that are searched; -1 for all.", least=-1)
    breakers: str = option('\n:"*', "Characters that no repeated sequence goes across.")

    def scores(self, logits: Logits, text: StrategyStage) -> Logits:
        """Lower the logits of the tokens that followed an earlier occurrence of the last tokens."""
        penalties = self._penalties(text)
        if not penalties:
            return logits
        adjusted = logits.copy()
        adjusted[list(penalties)] -= np.fromiter(penalties.values(), np.float32, len(penalties))
        return adjusted

    def _penalties(self, text: StrategyStage) -> dict[int, float]:
        """For each token that would continue a long enough repeated sequence, the penalty for the longest one."""
        tokens = np.array(
            text.tokens if self.last < 0 else text.tokens[max(len(text.tokens) - self.last, 0) :], np.intp
        )
        ends = np.arange(tokens.size - 1)  # earlier occurrences of the last tokens end before tokens[ends + 1]
        found: dict[int, float] = {}
        for length in range(1, min(tokens.size, _LONGEST_PENALIZED + 1)):
            final = int(tokens[-length])
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == final]
            if not ends.size or any(each.encode() in text.tokenizer.token_bytes.of(final) for each in self.breakers):
                break
            if length >= self.allowed_length:
                penalty = self._penalty(length)
                found |= dict.fromkeys(tokens[ends + 1].tolist(), penalty)
                if penalty == self._penalty(length + 1):  # of all longer ones too
                    break
        return found

    def _penalty(self, length: int) -> float:
        power = min(self.base ** (length - self.allowed_length), _LARGEST_PENALTY)
        return min(self.multiplier * power, _LARGEST_PENALTY)


@dataclass(frozen=True)
class Momentum(Strategy):
    """Momentum decoding."""

    name: ClassVar[str] = "momentum"
    purpose: ClassVar[str] = "Long greedy texts without loops: coming back to a token of the text meets resistance."
    source: ClassVar[str] = "Lan et al. 2022, Momentum Decoding: Open-ended Text Generation as Graph Exploration"
    k: int = option(5, "Number of the likeliest tokens to choose from.", least=1, most=1000)
    alpha: float = option(0.2, "Resistance of a token by the length of what it would repeat.", least=0, most=100)

    def scores(self, logits: Logits, text: StrategyStage) -> Logits:
        """Each of the k likeliest tokens has its probability, less alpha for every token of what it would repeat."""
        tokens, best = np.array(text.tokens, np.intp), int(logits.argmax())
        if best not in tokens:
            return logits
        k = min(self.k, int((logits > -np.inf).sum()))
        ids = np.argpartition(-logits, k - 1)[:k]
        weights = np.exp(logits - logits[best], dtype=np.float64)
        resistances = np.array([_repeated_length(tokens, token) for token in ids.tolist()])
        scores = np.full_like(logits, -np.inf)
        left = weights[ids] / weights.sum() - self.alpha * resistances
        if not text.params.greedy:  # sampled in proportion to what is left; where nothing is, the best token is taken
            shares = np.maximum(left, 0) if left.max() > 0 else left == left.max()
            with np.errstate(divide="ignore"):
                left = np.log(shares, dtype=np.float64)
        scores[ids] = left
        return scores


def _repeated_length(tokens: npt.NDArray[np.intp], token: int) -> int:
    """Length of the longest sequence that `tokens` have already and `token` would end again, up to the longest."""
    ends = np.flatnonzero(tokens == token)
    length = 0
    while ends.size and length < _LONGEST:
        length += 1
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[-length]]
    return length
