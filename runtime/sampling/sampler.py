"""Sampling: from the logits of one position to one token. Work arrays of vocabulary size are allocated once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...errors import EdgeError
from ..arguments.argument_types import check_ranges, option
from .logit_stage import LogitAdjustments, Logits, LogitStage, check_biases
from .token_mask import TokenConstraint, TokenMask

_BLOCK: Final = 1024


def uniform_at(seed: int, position: int) -> float:
    """The random number in [0, 1) for a position of the text with this seed.

    It depends on these two alone (a counter-based generator: Philox, Salmon et al. 2011), so a seed gives one text
    however many tokens a pass emits.
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def drawn_index(weights: npt.NDArray[np.float64], uniform: float) -> int:
    """Index of the weight at the point `uniform`, in [0, 1), of their cumulative sum; it is positive.

    A cumulative sum of a whole vocabulary takes longer than its exponentials, so that of blocks finds the block first.

    Args:
        weights: float64 `[k]`, not negative, at least one positive.
        uniform: the point.
    """
    blocks = np.add.reduceat(weights, np.arange(0, weights.size, _BLOCK))
    block, rest = _point(blocks, uniform * blocks.sum())
    return block * _BLOCK + _point(weights[block * _BLOCK : (block + 1) * _BLOCK], rest)[0]


def _point(weights: npt.NDArray[np.float64], at: float) -> tuple[int, float]:
    """The index of the weight at a point of their cumulative sum, and where in it the point lies."""
    cumulative = np.cumsum(weights)
    # A product rounded up to the total would lie beyond the last positive weight.
    index = int(min(np.searchsorted(cumulative, at, side="right"), np.searchsorted(cumulative, cumulative[-1])))
    return index, at - float(cumulative[index - 1]) if index else at


_GROUP: Final = 64
_USUAL_NUCLEUS: Final = 1024
"""Number of the likeliest tokens that usually contain the nucleus; more are searched where they do not."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen; the default is greedy.

    `repeat_penalty` divides the positive and multiplies the negative logits of every token already in the context
    (Keskar et al. 2019, CTRL). Then `presence_penalty` is subtracted from the logit of every token that the answer has,
    `frequency_penalty` as often as the answer has it, and `logit_bias` is added (OpenAI's chat API). `temperature` 0 is
    greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off.
    """

    temperature: float = option(
        0.0,
        "Sampling temperature: 0 takes the most likely token, higher values spread.",
        least=0,
        accepts=lambda value: value == 0 or 1e-4 <= value <= 1e4,
        range="0 (greedy), or between 0.0001 and 10000",
        flags=("-t", "--temperature"),
        metavar="T",
        unset="what the model recommends, or 0",
    )
    top_k: int = option(
        0,
        "Sample from this number of the most likely tokens; 0 for all.",
        least=0,
        range="0 (off) or more",
        label="top-k",
        metavar="K",
    )
    top_p: float = option(
        1.0,
        "Sample from the most likely tokens that have this probability together.",
        within="(0, 1]",
        label="top-p",
        metavar="P",
    )
    min_p: float = option(
        0.0,
        "Leave out tokens less likely than this times the most likely one.",
        within="[0, 1)",
        label="min-p",
        metavar="P",
    )
    seed: int = option(
        0,
        "Seed of the sampling; the same seed gives the same text.",
        least=0,
        accepts=lambda value: 0 <= value < 1 << 64,
        range="at least 0 and below 2 to the 64th",
        metavar="N",
        unset="random",
    )
    repeat_penalty: float = option(
        1.0,
        "Above 1, make tokens that are already in the text less likely; 1 is off.",
        within="[0.01, 100]",
        label="repeat-penalty",
        metavar="X",
    )
    presence_penalty: float = option(
        0.0,
        "Lower the logits of all tokens that the answer has already by this; -2 to 2.",
        within="[-2, 2]",
        label="presence-penalty",
        metavar="X",
    )
    frequency_penalty: float = option(
        0.0,
        "Lower the logit of a token by this for every time that the answer has it already; -2 to 2.",
        within="[-2, 2]",
        label="frequency-penalty",
        metavar="X",
    )
    logit_bias: tuple[tuple[int, float], ...] = option(
        (), "What is added to the logits of token ids; -100 to 100.", metavar="ID=X"
    )
    first_position: int = 0
    """Number of tokens left out of the sequence: random numbers follow from the position in the whole text."""

    def __post_init__(self) -> None:
        check_ranges(self)
        check_biases(bias for _, bias in self.logit_bias)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def adjusts(self) -> bool:
        """Whether any logit is changed."""
        return self.repeat_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty or self.logit_bias)


def require_finite(largest: float) -> None:
    """Check the largest logit, which is NaN if any is.

    Raises:
        EdgeError: it is NaN or infinite.
    """
    if not math.isfinite(largest):
        raise EdgeError(
            f"the model computes {'NaN' if math.isnan(largest) else 'infinite'} logits",
            "its weights are damaged: copy, download or export the model again",
        )


class Sampler:
    """Chooses the tokens of one sequence; records its tokens for penalties.

    Args:
        params: how tokens are chosen.
        vocab_size: number of logits.
        constraint: which tokens may come, applied after penalties and biases; None for all.
        stages: what changes logits and probabilities after that, in this order; the logits of tokens that may not come
            are -infinity there.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        constraint: TokenConstraint | None = None,
        stages: Sequence[LogitStage] = (),
    ) -> None:
        self.params = params
        self._constraint = constraint
        self._masked = np.empty(0 if constraint is None else vocab_size, np.float32)
        self._ids = np.arange(vocab_size) if not params.greedy else np.empty(0, np.intp)
        self._weights = np.empty(vocab_size if not params.greedy else 0, np.float64)
        self._mask = np.empty(vocab_size, np.bool_)
        penalties = (params.repeat_penalty, params.presence_penalty, params.frequency_penalty)
        adjusting = (LogitAdjustments(penalties, params.logit_bias, vocab_size),) if params.adjusts else ()
        self._adjusting: Final[Sequence[LogitStage]] = adjusting
        self.stages: Final = stages
        self._observing: Final = (*adjusting, *stages)

    @property
    def magnifies(self) -> float:
        """By how much the difference of two logits may grow before a token is chosen."""
        return float(np.prod([stage.magnifies for stage in self._observing]))

    def observe_prompt(self, tokens: npt.ArrayLike) -> None:
        """Add tokens of the prompt to the sequence."""
        for stage in self._observing:
            stage.observe_prompt(_as_list(tokens))

    def observe(self, tokens: npt.ArrayLike) -> None:
        """Add tokens of the answer to the sequence."""
        for stage in self._observing:
            stage.observe(_as_list(tokens))
        if self._constraint is not None:
            self._constraint.observe(_as_list(tokens))

    @contextmanager
    def rollback(self) -> Iterator[None]:
        """A context that forgets the tokens observed within it when it ends."""
        sizes = [len(stage.tokens) for stage in self._observing]
        constraint = self._constraint
        size = 0 if constraint is None else constraint.size
        try:
            yield
        finally:
            for stage, length in zip(self._observing, sizes, strict=True):
                stage.shorten(length)
            if constraint is not None:
                constraint.shorten(size)

    def choose(self, logits: Logits, position: int) -> int:
        """Choose a token; of equal logits, greedy decoding takes the lowest id.

        Args:
            logits: float32 `[V]`; not modified.
            position: index of the token in the text.

        Raises:
            EdgeError: some logits are NaN, or the largest is infinite.
        """
        if self.params.greedy:
            scores, mask = self._scores(logits)
            # That of the first NaN, if there is one.
            token = int(scores.argmax()) if mask is None else mask.largest(scores, self._masked)
            require_finite(scores.item(token))
            return token
        ids, weights = self._possible(logits)
        return int(ids[drawn_index(weights, uniform_at(self.params.seed, self.params.first_position + position))])

    def top_two_margin(self, logits: Logits) -> float:
        """Difference of the two largest of `logits` `[V]`, after penalties and biases and of tokens that may come."""
        scores = self.scores(logits)
        groups = scores.size // _GROUP
        if groups > 2:
            # Both are in the two groups with the highest maxima, or in the values behind the last whole group.
            grouped = scores[: groups * _GROUP].reshape(_GROUP, groups)
            best = grouped.max(axis=0).argpartition(groups - 2)[groups - 2 :]
            scores = np.concatenate([grouped[:, best].ravel(), scores[groups * _GROUP :]])
        second, first = np.partition(scores, scores.size - 2)[-2:].tolist()
        return float(first - second)

    def scores(self, logits: Logits) -> Logits:
        """The logits to choose from, -infinity for tokens that may not come; valid until the next call."""
        scores, mask = self._scores(logits)
        return scores if mask is None else mask.apply(scores, self._masked)

    def probabilities(self, logits: Logits) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Probabilities of the next token; undefined for greedy parameters.

        Tokens that may not come have probability 0. Temperature, top-k, top-p and min-p apply in this order, each to
        the tokens that the one before has kept. Equal logits at a filter's edge are kept together.

        Args:
            logits: float32 `[V]`; not modified.

        Returns:
            Ascending token ids `[k]` and their probabilities, float64 `[k]`, summing to 1; valid until the next call.

        Raises:
            EdgeError: some logits are NaN, or the largest is infinite.
        """
        ids, weights = self._possible(logits)
        weights /= weights.sum()
        return ids, weights

    def _possible(self, logits: Logits) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """As `probabilities`, with weights that do not sum to 1."""
        params = self.params
        ids, (scores, mask) = self._ids, self._scores(logits)
        if mask is not None and mask.ids is not None:
            ids = mask.ids
            scores = scores[ids]
        elif mask is not None:
            scores = mask.apply(scores, self._masked)
        largest = scores.max()
        require_finite(float(largest))
        if 0 < params.top_k < scores.size:
            kept = largest_indices(scores, params.top_k, self._mask)
            ids, scores = ids[kept], scores[kept]
        weights = self._weights[: ids.size]
        np.subtract(scores, largest, out=weights)
        if params.temperature != 1:
            weights /= params.temperature
        np.exp(weights, out=weights)
        if params.top_p < 1:
            ids, weights = self._nucleus(ids, weights, params.top_p)
        if params.min_p > 0:
            kept = self._where(np.greater_equal, weights, params.min_p * weights.max())
            ids, weights = ids[kept], weights[kept]
        for stage in self.stages:
            weights = stage.weights(ids, weights)
        return ids, weights

    def _adjusted(self, logits: Logits) -> Logits:
        """The logits after penalties and biases, valid until the next call."""
        for stage in self._adjusting:
            logits = stage.scores(logits)
        return logits

    def _scores(self, logits: Logits) -> tuple[Logits, TokenMask | None]:
        """The logits to choose from, valid until the next call, and which of them may be chosen; None for all."""
        scores, mask = self._adjusted(logits), self._mask_here()
        if mask is not None and self.stages:
            scores, mask = mask.apply(scores, self._masked), None
        for stage in self.stages:
            scores = stage.scores(scores)
        return scores, mask

    def _mask_here(self) -> TokenMask | None:
        """The tokens that may come after those observed; None for all."""
        return None if self._constraint is None else self._constraint.mask()

    def _nucleus(
        self, ids: npt.NDArray[np.intp], weights: npt.NDArray[np.float64], top_p: float
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """The smallest set of tokens of probability `top_p` (Holtzman et al. 2020), ties at the edge kept."""
        needed = top_p * weights.sum()
        candidates = largest_indices(weights, _USUAL_NUCLEUS, self._mask)
        if weights[candidates].sum() < needed:
            # Tokens below this weight have less than 1 - top_p together, so the nucleus is among the others.
            candidates = self._where(np.greater, weights, (1 - top_p) * weights.sum() / weights.size)
        heavy = np.sort(weights[candidates])[::-1]
        reached = int(np.searchsorted(np.cumsum(heavy), needed))
        edge = heavy[min(reached, heavy.size - 1)]
        kept = candidates[weights[candidates] >= edge]
        return ids[kept], weights[kept]

    def _where(self, compare: np.ufunc, values: npt.NDArray[np.floating], bound: float) -> npt.NDArray[np.intp]:
        """Indices where `compare(values, bound)` is true."""
        return np.flatnonzero(compare(values, bound, out=self._mask[: values.size]))


def _as_list(tokens: npt.ArrayLike) -> list[int]:
    found: list[int] = np.asarray(tokens, np.intp).ravel().tolist()
    return found


def largest_indices(values: npt.NDArray[np.floating], k: int, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Ascending indices of the `k` largest values, and of values equal to the smallest of them.

    At least k values reach the k-th largest of the maxima of many groups, so it is a lower bound of the k-th largest
    value; only the few values above it are partitioned.

    Args:
        values: the values, `[n]`.
        k: number of values, at least 1.
        mask: work array, bool, at least `[n]`.
    """
    groups = values.size // _GROUP
    if k >= values.size:
        return np.arange(values.size)
    bound = values.min()
    if k <= groups:
        maxima = values[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        maxima.partition(groups - k)
        bound = maxima[groups - k]
    candidates = np.flatnonzero(np.greater_equal(values, bound, out=mask[: values.size]))
    chosen = values[candidates]
    edge = np.partition(chosen, chosen.size - k)[chosen.size - k]
    largest: npt.NDArray[np.intp] = candidates[chosen >= edge]
    return largest
