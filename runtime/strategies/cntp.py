"""Cautious next-token prediction: sampled trials up to a punctuation mark, of which the likeliest goes on.

Source: Wang et al., "Cautious next token prediction" (2025).
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING, Final

from .trials import TrialSearch

if TYPE_CHECKING:
    from ..options import GenerateOptions
    from ..text.tokenizer import TextTokenizer

_LENGTH: Final = 32
"""Most tokens of a trial that no punctuation mark ends."""


def search(options: GenerateOptions, tokenizer: TextTokenizer) -> TrialSearch:
    """The search that options ask for."""

    def ends(token: int) -> bool:
        text = tokenizer.decode([token])
        return "\n" in text or unicodedata.category(text.strip()[-1:] or " ").startswith("P")

    return TrialSearch(options.entropy, options.trials, _LENGTH, ends, sampled=True)
