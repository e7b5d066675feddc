"""A check of the text so far, written in Python, that every token has to pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from ..arguments.argument_types import option
from ..sampling.logit_stage import Logits
from ..sampling.token_mask import DeadEndError
from .strategy import Strategy, StrategyStage

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

    def scores(self, logits: Logits, text: StrategyStage) -> Logits:
        """The logits of the tokens that the check allows, of the likeliest ones; -infinity for all others.

        Raises:
            DeadEndError: it allows none of them.
        """
        count = min(self.candidates, int((logits > -np.inf).sum()))
        ids = np.argpartition(-logits, count - 1)[:count]
        answer = [*text.earlier, *text.tokens[text.prompt_length :]]
        texts = {token: text.tokenizer.decode([*answer, token]).rstrip(_REPLACEMENT) for token in ids.tolist()}
        allowed = [token for token, whole in texts.items() if self.allows(whole)]
        if not allowed:
            raise DeadEndError(
                f"the monitor allows none of the {count} likeliest tokens", "let it allow more, or raise candidates"
            )
        scores = np.full_like(logits, -np.inf)
        scores[allowed] = logits[allowed]
        return scores
