"""Which tokens a draft's head should know: those that its target writes most.

Counted in text that the target wrote itself, which is what a draft has to guess (VocabTrim). Some tokens stay whatever
the counts say: special ones, those that end a text, and those of the template that all texts begin with. Tokens that
were never seen come last, in the order of their ids: in most vocabularies earlier ids are the more frequent ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...runtime.text.turn_markers import TokenArray


@dataclass(frozen=True)
class Ranking:
    """A vocabulary from the tokens that matter most to those that matter least."""

    order: npt.NDArray[np.int64]
    """Token ids, int64 [vocabulary]."""
    least: int
    """How many of the first have to stay."""
    counts: npt.NDArray[np.int64]
    """How often each token occurs in the texts, by id."""

    def kept(self, tokens: int) -> TokenArray:
        """The ids of the first `tokens`, ascending.

        Raises:
            InputError: fewer than have to stay, or more than there are.
        """
        if not self.least <= tokens <= self.order.size:
            raise InputError(
                f"a head of {tokens} tokens cannot be made",
                f"{self.least} have to stay, and the vocabulary has {self.order.size}",
            )
        return np.sort(self.order[:tokens])


def rank_tokens(texts: Sequence[TokenArray], vocabulary: int, always: Collection[int]) -> Ranking:
    """Order a vocabulary by how often texts use its tokens.

    Args:
        texts: ids int64 [n] each.
        vocabulary: how many tokens the head has.
        always: tokens that stay; what all texts begin with is added. Ids beyond the vocabulary count for nothing.

    Raises:
        InputError: there is no text.
    """
    if not sum(map(len, texts)):
        raise InputError("there is no text to count tokens in", "give a text, or let the model write some")
    counts = np.bincount(np.concatenate(texts), minlength=vocabulary)[:vocabulary]
    staying = np.zeros(vocabulary, np.bool_)
    forced = [*always, *_common_beginning(texts)]
    staying[[token for token in forced if 0 <= token < vocabulary]] = True
    order = np.lexsort((np.arange(vocabulary), -counts, ~staying))
    # A head needs a row, whatever is special.
    return Ranking(order.astype(np.int64), max(1, int(staying.sum())), counts.astype(np.int64))


def _common_beginning(texts: Sequence[TokenArray]) -> list[int]:
    """The tokens that all texts begin with; none where there is a single text, which is no sign of a template."""
    if len(texts) == 1:
        return []
    shortest = min(map(len, texts))
    same = np.all([text[:shortest] == texts[0][:shortest] for text in texts], axis=0)
    return [int(token) for token in texts[0][: int(np.argmin(np.append(same, False)))]]
