"""Medusa heads: each proposes the tokens of one position behind the sequence, whatever comes between.

The heads read the target's last hidden state before the anchor, so one run a round serves every path: head k proposes
what follows k draft tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from ...graph.medusa_session import HeadTokens, MedusaSession
from ...kv.arena import KVArena
from ...kv.features import FeatureSlots
from ..tree import Source
from .draft_model import Path, TopTokens

_OBSERVED_RUNS: Final = 16
"""Number of runs over which their time is averaged."""


class MedusaDraft:
    """A `PathModel` of Medusa heads over one sequence.

    Args:
        session: the heads.
        target_vocab: vocabulary size of the target; further tokens of the heads are padding.
    """

    source: Final = Source.MEDUSA

    def __init__(self, session: MedusaSession, target_vocab: int) -> None:
        self._session: Final = session
        self._target_vocab: Final = target_vocab
        self._features: FeatureSlots | None = None
        self._length = 0
        self._found: HeadTokens | None = None
        """What the heads propose behind the sequence; None if they were not run."""
        self._spent = 0.0
        self._seconds = session.seconds
        """Average time of a run."""

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self._session.heads

    def attach(self, arena: KVArena) -> None:
        """Read the features of the sequence in the target's `arena` from now on."""
        self._features = arena.features
        self._found = None

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._length = len(token_ids)
        self._found = None

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        del token
        self._length += 1
        self._found = None

    def has_logits(self, path: Path) -> bool:
        """Whether `top_tokens(path)` takes no time."""
        return self._found is not None or len(path) >= self.heads

    def seconds(self, path: Path) -> float:
        """Expected seconds of `top_tokens(path)` now."""
        return 0.0 if self.has_logits(path) else self._seconds

    def take_seconds_spent(self) -> float:
        """Seconds that the heads have run since the last call of this method."""
        spent, self._spent = self._spent, 0.0
        return spent

    def top_tokens(self, path: Path, count: int, temperature: float = 1.0) -> TopTokens:
        """The `count` most probable tokens after the sequence and as many tokens as `path` has.

        The probabilities are those of temperature 1, and how often such tokens are accepted is learned.

        Raises:
            EdgeError: ONNX Runtime failed.
        """
        del temperature
        features, last = self._features, self._length - 2
        if len(path) >= self.heads or features is None or not features.start <= last < features.end:
            return TopTokens((), ())
        if self._found is None:
            started = time.perf_counter()
            self._found = self._session.run(features.read(last, last + 1)[0])
            seconds = time.perf_counter() - started
            self._spent += seconds
            self._seconds += (seconds - self._seconds) / _OBSERVED_RUNS
        ids, probabilities = self._found.ids[len(path)], self._found.probabilities[len(path)]
        known = ids < self._target_vocab
        return TopTokens(tuple(ids[known][:count].tolist()), tuple(probabilities[known][:count].tolist()))
