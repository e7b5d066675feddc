"""Several texts sampled in the same passes: a pass over a few rows costs little more than one over a single row.

The texts lie in one cache, their rows mixed: each row sees what all texts begin with and the rows of its own text, as
the branches of a token tree would. That takes a slot of the cache per token of every text, and a graph whose masks do
not count slots, which those of sliding windows do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError
from ...export.checkpoint.config import read_config
from ..engine import Engine
from ..graph.bound_session import BoundSession, Floats
from ..prefill import prefill
from ..sampling import Sampler, SamplingParams

_MOST: Final = 8
"""Texts at a time; more rows in a pass cost as much again."""


@dataclass
class Continued:
    """A text being written."""

    number: int
    tokens: list[int]
    sampler: Sampler
    pending: list[int] = field(default_factory=list)
    """Its last tokens, which no pass has read yet."""
    end: int | None = None
    """The token that would have come next, where that ends the text."""

    def sample(self, logits: Floats, most: int, ends: frozenset[int]) -> bool:
        """Take the next token; whether the text goes on, of at most `most` tokens and up to one of `ends`."""
        if len(self.tokens) >= most:
            return False
        token = self.sampler.choose(logits, len(self.tokens))
        if token in ends:
            self.end = token
            return False
        self.tokens.append(token)
        self.pending = [token]
        return len(self.tokens) < most


class SideBySide:
    """Continues texts of a model, as many at a time as its context has room for."""

    def __init__(self, engine: Engine, longest: int) -> None:
        """`longest` is the most tokens that any text will have."""
        self._bound: BoundSession = engine.model.new_sequence().bound
        self._read_before: list[int] = []
        room = engine.context // longest if engine.graph_io.supports_trees and not _has_windows(engine) else 1
        self.together: Final = max(1, min(_MOST, room))
        """How many texts to ask for at a time."""

    def continued(
        self, prompts: Sequence[list[int]], most: int, ends: frozenset[int], seeds: Iterator[int]
    ) -> list[Continued]:
        """Sample what follows each prompt, at temperature 1, up to a token of `ends` or `most` tokens in all.

        Prompts are not empty; there are at most `together`.
        """
        shared = _beginning(prompts)
        if not shared:  # a pass over an empty cache is one text's
            return [each for prompt in prompts for each in self.continued([prompt], most, ends, seeds)]
        texts = [
            Continued(
                number, [*prompt], Sampler(SamplingParams(temperature=1.0, seed=seed), self._bound.graph_io.vocab_size)
            )
            for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=False))
        ]
        logits = self._read(shared)
        going = []
        for text in texts:
            text.pending = text.tokens[len(shared) :]
            if text.pending or text.sample(logits, most, ends):
                going.append(text)
        owners = np.zeros(0, np.int64)
        while going:
            owners = np.concatenate([owners, *(np.full(len(text.pending), text.number) for text in going)])
            rows = self._pass(going, owners)
            going = [text for text, row in zip(going, rows, strict=True) if text.sample(row, most, ends)]
        return texts

    def _read(self, shared: list[int]) -> Floats:
        """Make these tokens the cache's; logits [V] of the last one."""
        bound, arena = self._bound, self._bound.arena
        kept = len(_beginning([self._read_before, shared[:-1]]))
        arena.rewind_to(min(kept, arena.length))
        logits, _ = prefill(bound, shared)
        self._read_before = shared
        return np.array(logits)

    def _pass(self, going: Sequence[Continued], owners: npt.NDArray[np.int64]) -> Floats:
        """Read what is pending; logits of each text's last token, valid until the next pass.

        `owners` holds the numbers of the texts that rows are of, from the first row that is not all texts'.
        """
        tokens = [token for text in going for token in text.pending]
        positions = [place for text in going for place in range(len(text.tokens) - len(text.pending), len(text.tokens))]
        last = np.cumsum([len(text.pending) for text in going]) - 1
        mask = owners[-len(tokens) :, None] == owners
        mask[:, -len(tokens) :] &= np.tri(len(tokens), dtype=np.bool_)
        logits = self._bound.forward(tokens, logits_for=last, positions=positions, tree_mask=mask)
        self._bound.arena.commit(len(tokens))
        return logits


def _beginning(texts: Sequence[list[int]]) -> list[int]:
    """What all of these have in common, from their first tokens on."""
    length = 0
    for tokens in zip(*texts, strict=False):
        if len(set(tokens)) > 1:
            break
        length += 1
    return texts[0][:length]


def _has_windows(engine: Engine) -> bool:
    """Whether some layers see a window only, as far as is known; it is taken for granted where it is not."""
    try:
        return any(layer.window is not None for layer in read_config(engine.bundle.folder).attention)
    except CheckpointError:
        return True
