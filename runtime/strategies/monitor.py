"""A check of the text so far, written in Python, that every token has to pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from ..arguments.argument_types import option
from ..sampling.logit_stage import Logits, LogitStage
from ..sampling.token_mask import DeadEndError
from .strategy import Strategy

if TYPE_CHECKING:
    from ..sampling.sampler import SamplingParams
    from ..text.tokenizer import TextTokenizer

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Monitor(Strategy):
    """A check of the text so far, from Python only: `strategies=[Monitor(allows)]`."""

    name: ClassVar[str] = "monitor"
    purpose: ClassVar[str] = "Rules that no grammar says, such as names that a program has: a function checks the text."
    source: ClassVar[str] = "Agrawal et al. 2023, Monitor-Guided Decoding"
    allows: Callable[[str], bool]
    """Called with the text of an answer so far, of whole characters; says whether an answer may begin so."""
    candidates: int = option(
        64, "Number of the likeliest tokens that are tried; no other token is chosen.", least=1, most=4096
    )

    def start(self, params: SamplingParams, vocab_size: int, tokenizer: TextTokenizer) -> LogitStage:
        """Begin a text."""
        return _Monitor(self, tokenizer)


class _Monitor(LogitStage):
    def __init__(self, options: Monitor, tokenizer: TextTokenizer) -> None:
        super().__init__()
        self._options: Final = options
        self._tokenizer: Final = tokenizer

    def scores(self, logits: Logits) -> Logits:
        """The logits of the tokens that the check allows, of the likeliest ones; -infinity for all others.

        Raises:
            DeadEndError: it allows none of them.
        """
        count = min(self._options.candidates, int((logits > -np.inf).sum()))
        ids = np.argpartition(-logits, count - 1)[:count]
        allowed = [token for token in ids.tolist() if self._allows(token)]
        if not allowed:
            raise DeadEndError(
                f"the monitor allows none of the {count} likeliest tokens", "let it allow more, or raise candidates"
            )
        scores = np.full_like(logits, -np.inf)
        scores[allowed] = logits[allowed]
        return scores

    def _allows(self, token: int) -> bool:
        text = self._tokenizer.decode([*self.earlier, *self.tokens[self.prompt_length :], token])
        return self._options.allows(text.rstrip(_REPLACEMENT))
