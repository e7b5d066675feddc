"""The interface of drafters, and the evidence of those that look for repetitions.

Free drafters are cheap lookups (microseconds). A candidate comes with an evidence bucket, not a probability: the
acceptance rate of each bucket is learned while decoding (`Mixer`), so that probabilities are calibrated for every
model and text.

A drafter that looks for repetitions finds earlier occurrences of the end of the sequence. The length of the match, and
whether all occurrences were followed by the same token, decide how reliable a candidate is, better than anything else
that was tried.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from ...kv.arena import KVArena
from ...sampling.logit_stage import Logits
from ...sampling.sampler import SamplingParams
from ..tree import Source

State: TypeAlias = Any
"""A drafter's own description of a sequence; immutable, and only used by the drafter that made it."""
_CLASS_STARTS: Final = (1, 2, 3, 4, 5, 7, 10, 16, 32)
"""Shortest match of each class of match lengths."""
_RATES_WITHIN: Final = (
    (0.29, 0.47, 0.59, 0.64, 0.71, 0.77, 0.86, 0.93, 0.98),  # ONCE
    (0.55, 0.76, 0.81, 0.86, 0.87, 0.90, 0.91, 0.97, 0.99),  # ALWAYS
    (0.36, 0.40, 0.50, 0.58, 0.60, 0.62, 0.64, 0.67, 0.70),  # MOSTLY, the first candidate
    (0.04, 0.06, 0.06, 0.07, 0.07, 0.08, 0.08, 0.08, 0.09),  # MOSTLY, the others
    (0.11, 0.18, 0.20, 0.24, 0.24, 0.25, 0.32, 0.40, 0.45),  # SPLIT, the first candidate
    (0.06, 0.08, 0.12, 0.12, 0.12, 0.12, 0.12, 0.12, 0.15),  # SPLIT, the others
)
_RATES_ELSEWHERE: Final = (
    (0.12, 0.16, 0.21, 0.34, 0.36, 0.41, 0.55, 0.60, 0.60),
    (0.21, 0.43, 0.45, 0.55, 0.63, 0.82, 0.90, 0.92, 0.92),
    (0.21, 0.27, 0.35, 0.45, 0.48, 0.69, 0.80, 0.85, 0.85),
    (0.05, 0.07, 0.08, 0.08, 0.08, 0.08, 0.08, 0.08, 0.08),
    (0.07, 0.08, 0.09, 0.11, 0.15, 0.19, 0.20, 0.20, 0.20),
    (0.04, 0.05, 0.06, 0.06, 0.08, 0.08, 0.08, 0.08, 0.08),
)
SAME_CONVERSATION: Final = tuple(rate for rates in _RATES_WITHIN for rate in rates)
"""Prior acceptance rate of each bucket, for repetitions within a conversation.

Measured on Llama-3-8B's answers in 80 two-turn MT-Bench conversations, and smoothed so that no rate falls with the
length of the match.
"""
EARLIER_CONVERSATIONS: Final = tuple(rate for rates in _RATES_ELSEWHERE for rate in rates)
"""The same for repetitions of the other of those conversations, which are about other topics."""


class Candidate(NamedTuple):
    """A token that may come next, and the bucket of the evidence for it."""

    token: int
    bucket: int


class Drafter(Protocol):
    """Proposes next tokens from the sequence. A subclass sets `source` and `prior`."""

    source: Source
    """The source that its candidates are counted under."""
    prior: Sequence[float]
    """Prior acceptance rate of every evidence bucket."""
    logits_needed: int = 0
    """Number of best logits of each verified position that `learn` needs; 0 if it learns nothing."""
    reads_rejected: bool = False
    """Whether `learn_rejected` is to be called."""

    def reset(self, token_ids: Sequence[int], /) -> None:
        """Replace the sequence. The new one may be the old one with a few tokens more, or an unrelated one."""

    def append(self, token: int, /) -> None:
        """Append a token to the sequence."""

    def state(self) -> State:
        """The state at the end of the sequence."""

    def after(self, state: State, token: int, /) -> State:
        """The state after one more token; the sequence itself stays as it is."""

    def candidates(self, state: State, /) -> Sequence[Candidate]:
        """The most probable next tokens, best first, each token once; few or none."""

    def learn(self, token: int, logits: Logits, /) -> None:
        """Learn the target's logits float32 `[V]` after a token that was accepted."""
        del token, logits

    def learn_rejected(self, tokens: Sequence[int], emitted: int, /) -> None:
        """Learn the most probable tokens behind each rejected token of the best branch.

        Args:
            tokens: the first of them comes after the sequence that has the round's tokens too.
            emitted: number of the round's tokens, which are appended afterwards.
        """
        del tokens, emitted

    def repetition(self) -> int:
        """Number of tokens at the end of the sequence that occurred before, if the drafter knows."""
        return 0


class TailDrafter(Drafter, Protocol):
    """A `Drafter` whose state is the last `reach` tokens of the sequence."""

    reach: int
    _tail: tuple[int, ...] = ()

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._tail = tuple(token_ids[-self.reach :])

    def append(self, token: int) -> None:
        """Append a token to the sequence."""
        self._tail = self.after(self._tail, token)

    def state(self) -> tuple[int, ...]:
        """The last tokens of the sequence."""
        return self._tail

    def after(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        """The last tokens after one more token."""
        return (*state, token)[-self.reach :]


class Agreement(IntEnum):
    """Whether the earlier occurrences of a match were followed by the same token."""

    ONCE = 0
    """One occurrence."""
    ALWAYS = 1
    """Several occurrences, all followed by the same token."""
    MOSTLY = 2
    """Several tokens; the first candidate followed more than half of the occurrences."""
    SPLIT = 4
    """Several tokens; the first candidate did not follow more than half of the occurrences."""


def bucket(length: int, agreement: Agreement, rank: int) -> int:
    """The evidence bucket of a candidate.

    Args:
        length: number of tokens of the match, at least 1; the classes are 1, 2, 3, 4, 5 to 6, 7 to 9, 10 to 15, 16 to
            31, and 32 or more.
        agreement: agreement of the occurrences of the match.
        rank: 0 for the best candidate at this place, the only one of ONCE and ALWAYS; all others share a bucket.
    """
    return (agreement + (rank > 0)) * len(_CLASS_STARTS) + bisect_right(_CLASS_STARTS, length) - 1


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
    """A `Drafter` whose `candidates` take time, and `after` none. Its state is a path of tokens behind the sequence.

    How reliable a draft model's probabilities are depends on the target, the text and the temperature, so they are
    divided into classes whose acceptance rates are learned like any other evidence. A distilled model is about right
    from the start: of the bundled one's first candidates with a probability between 0.5 and 0.6, the target chose 65 %;
    between 0.8 and 0.9, 87 %; above 0.98, 99 %.
    """

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
