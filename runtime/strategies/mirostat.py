"""Mirostat: a text of constant perplexity, by a bound on surprise that follows what was sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ..arguments.argument_types import option
from ..sampling.logit_stage import LogitStage, Weights
from .strategy import Strategy

if TYPE_CHECKING:
    from ..sampling.sampler import SamplingParams
    from ..text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Mirostat(Strategy):
    """Mirostat 2.0."""

    name: ClassVar[str] = "mirostat"
    purpose: ClassVar[str] = "Long texts that neither become dull nor fall apart: the surprise stays near a target."
    source: ClassVar[str] = "Basu et al. 2021, Mirostat; version 2 as in llama.cpp"
    filters: ClassVar[bool] = True
    tau: float = option(
        5.0, "Surprise of a token to aim at, in bits.", accepts=lambda tau: 0 < tau <= 100, range="above 0 up to 100"
    )
    eta: float = option(
        0.1,
        "How much of the error of a token the bound takes over.",
        accepts=lambda eta: 0 < eta <= 1,
        range="above 0 and at most 1",
    )

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
