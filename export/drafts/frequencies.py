"""Which tokens a draft's head should know: those that its target writes most.

Counted in text that the target wrote itself, which is what a draft has to guess (VocabTrim). Some tokens stay whatever
the counts say: special ones, those that end a text, and those of the template that all texts begin with. Tokens that
were never seen come last, in the order of their ids: in most vocabularies earlier ids are the more frequent ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...models.json_file import is_whole
from ..checkpoint.json_fields import read_json
from ..workbench import TokenArray


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


@dataclass(frozen=True)
class Markers:
    """Tokens that stand for something else than text."""

    special: frozenset[int]
    """All of the tokenizer's."""
    ending: frozenset[int]
    """Those that end a text."""

    @property
    def opening(self) -> frozenset[int]:
        """Those that may open a turn."""
        return self.special - self.ending


def read_markers(folder: Path) -> Markers:
    """Special tokens of the tokenizer in a folder, and those that its configuration files say end a text.

    Raises:
        CheckpointError: a file is damaged.
    """
    tokenizer = read_json(folder / "tokenizer.json")
    added = [token for token in tokenizer.get("added_tokens") or () if isinstance(token, dict)]
    special: list[Any] = [token.get("id") for token in added if token.get("special")]
    ending: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        ending += value if isinstance(value, list) else [value]
    settings = folder / "tokenizer_config.json"
    named = read_json(settings).get("eos_token") if settings.is_file() else None
    text = named.get("content") if isinstance(named, dict) else named
    ending += [token.get("id") for token in added if text is not None and token.get("content") == text]
    return Markers(*(frozenset(int(token) for token in each if is_whole(token, 0)) for each in (special, ending)))


def answer_start(text: TokenArray, markers: Markers) -> int:
    """Where the last turn of a text begins: behind the last token that may open one; 0 where there is none."""
    opened = np.flatnonzero(np.isin(text[:-1], list(markers.opening)))
    return int(opened[-1]) + 1 if opened.size else 0


def _common_beginning(texts: Sequence[TokenArray]) -> list[int]:
    """The tokens that all texts begin with; none where there is a single text, which is no sign of a template."""
    if len(texts) == 1:
        return []
    shortest = min(map(len, texts))
    same = np.all([text[:shortest] == texts[0][:shortest] for text in texts], axis=0)
    return [int(token) for token in texts[0][: int(np.argmin(np.append(same, False)))]]
