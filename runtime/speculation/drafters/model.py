"""A draft model as a drafter: its probabilities as evidence buckets.

How reliable a draft model's probabilities are depends on the target, the text and the temperature, so they are divided
into classes whose acceptance rates are learned like those of any other evidence. A distilled model is about right from
the start: of the bundled one's first candidates with a probability between 0.5 and 0.6, the target chose 65 %; between
0.8 and 0.9, 87 %; above 0.98, 99 %.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, Protocol

from ...kv.arena import KVArena
from ..tree import Source
from .draft_model import Path, TopTokens
from .interface import Candidate

_EDGES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Upper bounds of the probability classes."""
_CLASSES: Final = len(_EDGES) + 1
_MIN_PROB: Final = 0.02
"""Candidates less probable than this are dropped: no token position is that cheap."""
_MAX_CANDIDATES: Final = 3


class PathModel(Protocol):
    """What a drafter needs of a draft model; see `DraftModel`, whose methods these are."""

    @property
    def source(self) -> Source:
        """What its candidates are counted under."""

    def attach(self, arena: KVArena) -> None:
        """Learn that the target generates in `arena` from now on."""

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""

    def append(self, token: int) -> None:
        """Append a token to the sequence."""

    def has_logits(self, path: Path) -> bool:
        """Whether `top_tokens(path)` takes no time."""

    def seconds(self, path: Path) -> float:
        """Expected seconds of `top_tokens(path)` now."""

    def take_seconds_spent(self) -> float:
        """Seconds that the model has run since the last call of this method."""

    def top_tokens(self, path: Path, count: int, temperature: float = 1.0) -> TopTokens:
        """The `count` most probable tokens after the sequence and `path`."""


class ModelDrafter:
    """A `Drafter` whose `candidates` take time, and `after` none. Its state is the path of tokens behind the sequence.

    Args:
        model: the draft model.
        temperature: temperature of its probabilities, above 0: the target's, or 1 if the target is greedy.
    """

    prior: Final[Sequence[float]] = (
        *((low + high) / 2 for low, high in zip((_MIN_PROB, *_EDGES), (*_EDGES, 1.0), strict=True)),  # first candidates
        *(0.8 * (low + high) / 2 for low, high in zip((_MIN_PROB, *_EDGES), (*_EDGES, 1.0), strict=True)),  # others
    )

    def __init__(self, model: PathModel, temperature: float = 1.0) -> None:
        self.model: Final = model
        self.temperature = temperature

    @property
    def source(self) -> Source:
        """See `Drafter.source`."""
        return self.model.source

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self.model.reset(token_ids)

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self.model.append(token)

    def state(self) -> Path:
        """The empty path."""
        return ()

    def after(self, state: Path, token: int) -> Path:
        """The path with one more token; nothing is run."""
        return (*state, token)

    def seconds(self, state: Path) -> float:
        """Expected seconds of `candidates(state)` now."""
        return self.model.seconds(state)

    def take_seconds_spent(self) -> float:
        """Seconds that the model has run since the last call of this method."""
        return self.model.take_seconds_spent()

    def candidates(self, state: Path) -> Sequence[Candidate]:
        """The model's most probable next tokens.

        Raises:
            EdgeError: ONNX Runtime failed; the KV cache of the sequence is intact.
        """
        top = self.model.top_tokens(state, _MAX_CANDIDATES, self.temperature)
        return [
            Candidate(token, bisect_right(_EDGES, probability) + (_CLASSES if rank else 0))
            for rank, (token, probability) in enumerate(zip(*top, strict=True))
            if probability >= _MIN_PROB
        ]
