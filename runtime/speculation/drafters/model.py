"""A draft model as a drafter: its probabilities as evidence buckets.

How reliable a draft model's probabilities are depends on the target, the text and the temperature, so they are divided
into classes whose acceptance rates are learned like any other evidence. A distilled model is about right from
the start: of the bundled one's first candidates with a probability between 0.5 and 0.6, the target chose 65 %; between
0.8 and 0.9, 87 %; above 0.98, 99 %.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from ...kv.arena import KVArena
from ...sampling.sampler import SamplingParams
from ..tree import Source
from .interface import Candidate, Drafter

Path: TypeAlias = tuple[int, ...]
"""The draft tokens behind the sequence; `()` is the sequence itself."""

_EDGES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Upper bounds of the probability classes."""
_CLASSES: Final = len(_EDGES) + 1
_MIN_PROB: Final = 0.02
"""Candidates less probable than this are dropped: no token position is that cheap."""
_MAX_CANDIDATES: Final = 3
_MIDDLES: Final = tuple((low + high) / 2 for low, high in zip((_MIN_PROB, *_EDGES), (*_EDGES, 1.0), strict=True))


class TopTokens(NamedTuple):
    """The most probable next tokens, best first, and their probabilities."""

    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]


class ModelDrafter(Drafter, Protocol):
    """A `Drafter` whose `candidates` take time, and `after` none. Its state is a path of tokens behind the sequence."""

    source: Source = Source.MODEL
    prior: Sequence[float] = (*_MIDDLES, *(0.8 * rate for rate in _MIDDLES))
    """By class of the probability: rates of the first candidate, then of the others."""
    temperature: float = 1.0
    """Temperature of the probabilities, above 0: the target's, or 1 if the target is greedy."""
    _spent: float = 0.0

    def start(self, params: SamplingParams) -> None:
        """Draft for a target that is sampled with `params` from now on."""
        self.temperature = 1.0 if params.greedy else params.temperature

    def attach(self, arena: KVArena) -> None:
        """Learn that the target generates in `arena` from now on; only drafts over what it computes use that."""
        del arena

    def settle(self, gained: float) -> None:
        """Learn what drafts of a round gained, in tokens of plain decoding, less what they cost."""
        del gained

    def has_logits(self, path: Path) -> bool:
        """Whether `top_tokens(path)` takes no time."""

    def seconds(self, path: Path) -> float:
        """Expected seconds of `top_tokens(path)` now; infinite if it should not be called."""

    def top_tokens(self, path: Path, count: int, temperature: float = 1.0) -> TopTokens:
        """The `count` most probable tokens after the sequence and `path`.

        Raises:
            EdgeError: ONNX Runtime failed; the KV cache of the sequence is intact.
        """

    def take_seconds_spent(self) -> float:
        """Seconds that the model has run since the last call of this method."""
        spent, self._spent = self._spent, 0.0
        return spent

    def state(self) -> Path:
        """The empty path."""
        return ()

    def after(self, state: Path, token: int) -> Path:
        """The path with one more token; nothing is run."""
        return (*state, token)

    def candidates(self, state: Path) -> Sequence[Candidate]:
        """The model's most probable next tokens; errors as for `top_tokens`."""
        top = self.top_tokens(state, _MAX_CANDIDATES, self.temperature)
        return [
            Candidate(token, bisect_right(_EDGES, probability) + (_CLASSES if rank else 0))
            for rank, (token, probability) in enumerate(zip(*top, strict=True))
            if probability >= _MIN_PROB
        ]
