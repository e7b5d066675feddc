"""AdaDec: where the model is uncertain, its likeliest tokens are ranked by a look ahead.

Source: He et al., "Towards better code generation: adaptive decoding with uncertainty guidance" (2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .trials import TrialSearch

if TYPE_CHECKING:
    from ..options import GenerateOptions
    from ..text.tokenizer import TextTokenizer

_LENGTH: Final = 5
"""Tokens of a look ahead, the ranked one included."""


def search(options: GenerateOptions, _: TextTokenizer) -> TrialSearch:
    """The search that options ask for."""
    return TrialSearch(options.entropy, options.trials, _LENGTH, lambda _: False, sampled=False)
