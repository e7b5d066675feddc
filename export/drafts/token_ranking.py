"""Ranks tokens by how often a draft's target writes them.

Tokens are counted in text that the target wrote itself, which is what a draft has to predict (VocabTrim). Some tokens
are always kept: special tokens, those that end a text, and those of the template that all texts begin with. Tokens that
do not occur come last, in the order of their ids, since earlier ids are more frequent in most vocabularies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...runtime.text.turn_markers import TokenArray


@dataclass(frozen=True)
class TokenRanking:
    """A vocabulary in descending order of importance."""

    order: npt.NDArray[np.int64]
    """Token ids, int64 [vocabulary]."""
    min_tokens: int
    """Number of tokens at the beginning of the order that are always kept."""
    counts: npt.NDArray[np.int64]
    """Number of occurrences of each token, by id."""

    def kept(self, tokens: int) -> TokenArray:
        """Ids of the first `tokens` tokens, in ascending order.

        Raises:
            InputError: `tokens` is less than `min_tokens` or more than the vocabulary.
        """
        if not self.min_tokens <= tokens <= self.order.size:
            raise InputError(
                f"a draft's head cannot have {tokens} tokens",
                f"give {self.min_tokens} to {self.order.size}: {self.min_tokens} are always kept",
            )
        return np.sort(self.order[:tokens])

    def places(self) -> npt.NDArray[np.int64]:
        """Index of each token in the order, by id, int64 [vocabulary]."""
        places = np.empty(self.order.size, np.int64)
        places[self.order] = np.arange(self.order.size)
        return places


def rank_tokens(texts: Sequence[TokenArray], vocabulary: int, always: Collection[int]) -> TokenRanking:
    """Order a vocabulary by the number of occurrences in texts.

    Args:
        texts: Token ids, int64 [n] each.
        vocabulary: Number of tokens of the head.
        always: Tokens that are always kept, besides those that all texts begin with; ids beyond the vocabulary are
            ignored.

    Raises:
        InputError: No text is given.
    """
    if not sum(map(len, texts)):
        raise InputError("no text to count tokens in", "give a text with --calibration")
    counts = np.bincount(np.concatenate(texts), minlength=vocabulary)[:vocabulary]
    kept = np.zeros(vocabulary, np.bool_)
    forced = [*always, *_common_prefix(texts)]
    kept[[token for token in forced if 0 <= token < vocabulary]] = True
    order = np.lexsort((np.arange(vocabulary), -counts, ~kept))
    # A head has at least one row.
    return TokenRanking(order.astype(np.int64), max(1, int(kept.sum())), counts.astype(np.int64))


def _common_prefix(texts: Sequence[TokenArray]) -> list[int]:
    """The tokens that all texts begin with; none for a single text, which does not show a template."""
    if len(texts) == 1:
        return []
    shortest = min(map(len, texts))
    same = np.all([text[:shortest] == texts[0][:shortest] for text in texts], axis=0)
    return [int(token) for token in texts[0][: int(np.argmin(np.append(same, False)))]]
