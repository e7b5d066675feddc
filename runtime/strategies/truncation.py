"""Strategies that leave out unlikely or too likely tokens, by their probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ..arguments.argument_types import option
from ..sampling.logit_stage import Logits, LogitStage, Weights
from .strategy import Strategy

if TYPE_CHECKING:
    from ..sampling.sampler import SamplingParams
    from ..text.tokenizer import TextTokenizer


def _entropy(probabilities: Weights) -> float:
    """Entropy in nats."""
    some = probabilities[probabilities > 0]
    return float(-(some * np.log(some)).sum())


@dataclass(frozen=True)
class Typical(Strategy):
    """Locally typical sampling."""

    name: ClassVar[str] = "typical"
    purpose: ClassVar[str] = "Text whose tokens are about as surprising as the model expects."
    source: ClassVar[str] = "Meister et al. 2022, Locally Typical Sampling"
    filters: ClassVar[bool] = True
    mass: float = option(
        0.95,
        "Probability that the kept tokens have together, the most typical ones first.",
        within="(0, 1)",
    )

    def kept(self, probabilities: Weights) -> Weights:
        """Keep the tokens whose surprise is closest to the entropy, until they have the mass together."""
        with np.errstate(divide="ignore"):
            distance = np.abs(-np.log(probabilities) - _entropy(probabilities))
        order = np.argsort(distance, kind="stable")
        reached = int(np.searchsorted(np.cumsum(probabilities[order]), self.mass))
        probabilities[distance > distance[order[min(reached, order.size - 1)]]] = 0
        return probabilities


@dataclass(frozen=True)
class Eta(Strategy):
    """Eta sampling."""

    name: ClassVar[str] = "eta"
    purpose: ClassVar[str] = "Leaves out tokens that are unlikely for how open the position is."
    source: ClassVar[str] = "Hewitt et al. 2022, Truncation Sampling as Language Model Desmoothing"
    filters: ClassVar[bool] = True
    epsilon: float = option(3e-4, "Smallest probability of a token; less where the entropy is high.", within="(0, 1)")

    def kept(self, probabilities: Weights) -> Weights:
        """Keep the tokens of at least the probability, and the likeliest one."""
        least = min(self.epsilon, math.sqrt(self.epsilon) * math.exp(-_entropy(probabilities)))
        probabilities[probabilities < min(least, probabilities.max())] = 0
        return probabilities


@dataclass(frozen=True)
class TopNSigma(Strategy):
    """Top-n-sigma sampling."""

    name: ClassVar[str] = "top-n-sigma"
    purpose: ClassVar[str] = "Keeps the same tokens at every temperature, so that high temperatures stay readable."
    source: ClassVar[str] = "Tang et al. 2024, Top-n-sigma: Not All Logits Are You Need"
    filters: ClassVar[bool] = True
    n: float = option(
        1.0,
        "How many standard deviations of the logits a token may be below the largest one.",
        within="(0, 100]",
    )

    def start(self, params: SamplingParams, vocab_size: int, tokenizer: TextTokenizer) -> LogitStage:
        """Begin a text."""
        return _TopNSigma(self.n / params.temperature)


class _TopNSigma(LogitStage):
    def __init__(self, deviations: float) -> None:
        super().__init__()
        self._deviations: Final = deviations
        self._least = 0.0
        """Smallest weight, relative to the largest one."""

    def scores(self, logits: Logits) -> Logits:
        """Note the deviation of the logits of all tokens that may come."""
        possible = logits[logits > -np.inf]
        self._least = math.exp(-self._deviations * float(possible.std(dtype=np.float64)))
        return logits

    def weights(self, ids: npt.NDArray[np.intp], weights: Weights) -> Weights:
        """Keep the tokens whose logits are close enough to the largest one."""
        weights[weights < self._least * weights.max()] = 0
        return weights


@dataclass(frozen=True)
class Xtc(Strategy):
    """Exclude top choices."""

    name: ClassVar[str] = "xtc"
    purpose: ClassVar[str] = "Fewer clichés: where several tokens are likely, the likeliest are left out at times."
    source: ClassVar[str] = "llama.cpp, XTC sampler (P. E. Weidmann, text-generation-webui pull request 6335)"
    filters: ClassVar[bool] = True
    probability: float = option(0.5, "How often tokens are left out.", least=0, most=1)
    threshold: float = option(
        0.1,
        "Probability from which a token counts as likely; of these the least likely one is kept.",
        within="(0, 0.5]",
    )

    def kept(self, probabilities: Weights) -> Weights:
        """Mix both distributions, with and without the likeliest tokens, by how often each is to be sampled from."""
        likely = probabilities >= self.threshold
        if likely.sum() < 2:
            return probabilities
        likely &= probabilities > probabilities[likely].min()
        rest = np.where(likely, 0, probabilities)
        mixed: Weights = (1 - self.probability) * probabilities + self.probability * rest / rest.sum()
        return mixed


@dataclass(frozen=True)
class Mirostat(Strategy):
    """Mirostat 2.0."""

    name: ClassVar[str] = "mirostat"
    purpose: ClassVar[str] = "Long texts that neither become dull nor fall apart: the surprise stays near a target."
    source: ClassVar[str] = "Basu et al. 2021, Mirostat; version 2 as in llama.cpp"
    filters: ClassVar[bool] = True
    tau: float = option(5.0, "Surprise of a token to aim at, in bits.", within="(0, 100]")
    eta: float = option(0.1, "How much of the error of a token the bound takes over.", within="(0, 1]")

    def start(self, params: SamplingParams, vocab_size: int, tokenizer: TextTokenizer) -> LogitStage:
        """Begin a text."""
        return _Mirostat(self)


class _Mirostat(LogitStage):
    """The bound after every token of the answer: it follows from the path, so shortening the path restores it."""

    def __init__(self, options: Mirostat) -> None:
        super().__init__()
        self._options: Final = options
        self._bounds = [2 * options.tau]
        """Largest surprise in bits, at the beginning of the answer and after each of its tokens."""
        self._kept: tuple[npt.NDArray[np.intp], Weights] | None = None
        """Ids and probabilities that the next token is sampled from."""

    def observe_prompt(self, tokens: list[int]) -> None:
        """Add tokens of the prompt, which do not count."""
        super().observe_prompt(tokens)
        self._bounds = self._bounds[:1]

    def observe(self, tokens: list[int]) -> None:
        """Add tokens of the answer; those that were not sampled here leave the bound as it is."""
        super().observe(tokens)
        for token in tokens:
            bound = self._bounds[-1]
            if self._kept is not None:
                ids, probabilities = self._kept
                at = min(int(np.searchsorted(ids, token)), ids.size - 1)
                if ids[at] == token and probabilities[at] > 0:
                    bound -= self._options.eta * (-float(np.log2(probabilities[at])) - self._options.tau)
            self._bounds.append(bound)
            self._kept = None

    def shorten(self, size: int) -> None:
        """Forget the tokens after the first `size`."""
        if size < len(self.tokens):
            self._kept = None
        del self._bounds[1 + size - self.prompt_length :]
        super().shorten(size)

    def weights(self, ids: npt.NDArray[np.intp], weights: Weights) -> Weights:
        """Keep the tokens within the bound, and the likeliest one."""
        probabilities: Weights = weights / weights.sum()
        least = min(2.0 ** -self._bounds[-1], float(probabilities.max()))
        probabilities[probabilities < least] = 0
        probabilities /= probabilities.sum()
        self._kept = ids.copy(), probabilities
        return probabilities.copy()
