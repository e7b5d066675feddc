"""What changes logits before a token is chosen, and the probabilities of the tokens that may come.

Penalties, biases, and a first token by its rank are such stages; strategies have others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import InputError

Logits: TypeAlias = npt.NDArray[np.float32]
Weights: TypeAlias = npt.NDArray[np.float64]
_MAX_BIAS: Final = 100.0


def log_softmax(logits: npt.NDArray[np.floating]) -> Weights:
    """Log-probabilities, float64 `[V]`, of logits `[V]`, some of which may be -infinity."""
    with np.errstate(invalid="ignore"):  # the sampler refuses what is not finite
        shifted = logits - np.float64(logits.max())
    normalized: Weights = shifted - np.log(np.exp(shifted).sum())
    return normalized


class LogitStage:
    """A step from the logits of one position to its token; this one changes nothing.

    What it returns may depend on the logits that it is given, on `tokens`, and on nothing else, so that a text does not
    depend on how many tokens a pass verifies.
    """

    magnifies = 1.0
    """By how much the difference of two logits may grow at most, as far as near ties are concerned."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        """Token ids of the sequence."""
        self.prompt_length = 0
        """Number of them that are the prompt's."""
        self.earlier: Sequence[int] = ()
        """Token ids of the answer that a full context has left out of the sequence."""

    def observe_prompt(self, tokens: list[int]) -> None:
        """Add tokens of the prompt to the sequence."""
        self.observe(tokens)
        self.prompt_length = len(self.tokens)

    def observe(self, tokens: list[int]) -> None:
        """Add tokens of the answer to the sequence."""
        self.tokens += tokens

    def shorten(self, size: int) -> None:
        """Forget the tokens after the first `size`, none of which is the prompt's."""
        del self.tokens[size:]

    def scores(self, logits: Logits) -> Logits:
        """Return the changed logits, float32 `[V]`, valid until the next call; `logits` is not modified."""
        return logits

    def weights(self, ids: npt.NDArray[np.intp], weights: Weights) -> Weights:
        """Change the weights of the tokens that may come, after temperature and filters; not used by greedy decoding.

        Args:
            ids: ascending token ids, `[k]`.
            weights: their probabilities up to a factor, float64 `[k]`; may be modified.

        Returns:
            The new weights, `[k]`; 0 leaves a token out, and one must not be 0.
        """
        del ids
        return weights


def check_biases(biases: Iterable[float]) -> None:
    """Check what is to be added to logits.

    Raises:
        InputError: a number is out of range.
    """
    for bias in biases:
        if not abs(bias) <= _MAX_BIAS:
            raise InputError(f"a logit bias is {bias}", f"it must be between -{_MAX_BIAS:g} and {_MAX_BIAS:g}")


class LogitAdjustments(LogitStage):
    """Applies penalties and biases.

    Args:
        penalties: the repeat, presence and frequency penalties of `SamplingParams`.
        biases: what is added to the logits of tokens.
        vocab_size: number of logits.

    Raises:
        InputError: a bias is for a token that the model does not have.
    """

    def __init__(
        self, penalties: tuple[float, float, float], biases: Sequence[tuple[int, float]], vocab_size: int
    ) -> None:
        super().__init__()
        if beyond := [token for token, _ in biases if not 0 <= token < vocab_size]:
            raise InputError(f"logit_bias has token {beyond[0]}", f"token ids of this model are 0 to {vocab_size - 1}")
        self._repeat, self._presence, self._frequency = penalties
        self.magnifies = max(self._repeat, 1 / self._repeat)
        self._adjusted = np.empty(vocab_size, np.float32)
        self._bias_ids = np.array([token for token, _ in biases], np.intp)
        self._biases = np.array([bias for _, bias in biases], np.float32)
        self._seen = _TokenCounts(vocab_size) if self._repeat != 1 else None
        self._answer = _TokenCounts(vocab_size) if self._presence or self._frequency else None

    def observe_prompt(self, tokens: list[int]) -> None:
        """Add tokens of the prompt to the sequence."""
        self._observe(tokens, (self._seen,))

    def observe(self, tokens: list[int]) -> None:
        """Add tokens of the answer to the sequence."""
        self._observe(tokens, (self._seen, self._answer))

    def _observe(self, tokens: list[int], counted: Sequence[_TokenCounts | None]) -> None:
        for token in tokens:
            for counts in counted:
                if counts is not None:
                    counts.add(token)
            self.tokens.append(token)

    def shorten(self, size: int) -> None:
        """Forget the tokens after the first `size`, none of which is the prompt's."""
        for token in reversed(self.tokens[size:]):
            for counts in (self._seen, self._answer):
                if counts is not None:
                    counts.remove(token)
        super().shorten(size)

    def scores(self, logits: Logits) -> Logits:
        """Return the adjusted logits, float32 `[V]`, valid until the next call; `logits` is not modified."""
        scores = self._adjusted
        np.copyto(scores, logits)
        if self._seen is not None:
            ids = self._seen.ids
            seen = scores[ids]
            scores[ids] = np.where(seen > 0, seen / self._repeat, seen * self._repeat)
        if self._answer is not None:
            ids = self._answer.ids
            penalties = self._presence + self._frequency * self._answer.counts[ids]
            scores[ids] -= penalties.astype(np.float32)
        if self._bias_ids.size:
            # The same token may be listed more than once.
            np.add.at(scores, self._bias_ids, self._biases)
        return scores


class FirstToken(LogitStage):
    """Leaves one token to choose from at one position, and all elsewhere; see `GenerateOptions.branch`.

    Args:
        position: number of tokens before it.
        rank: 0 for the likeliest token; of equal logits, the lowest id has the lower rank. Where fewer tokens may come,
            the least likely one is taken.
    """

    def __init__(self, position: int, rank: int) -> None:
        super().__init__()
        self._position: Final = position
        self._rank: Final = rank

    def scores(self, logits: Logits) -> Logits:
        """The logit of the token of the rank; -infinity for all others."""
        if len(self.tokens) != self._position or not np.isfinite(logits.max()):
            return logits
        ranked = np.argsort(-logits, kind="stable")
        token = ranked[min(self._rank, int((logits > -np.inf).sum()) - 1)]
        scores = np.full_like(logits, -np.inf)
        scores[token] = logits[token]
        return scores


class _TokenCounts:
    """How often each token occurs in a sequence that can be shortened."""

    def __init__(self, vocab_size: int) -> None:
        self.counts = np.zeros(vocab_size, np.int32)
        self._different = np.empty(vocab_size, np.intp)
        """The tokens that occur, in order of their first occurrence."""
        self._different_count = 0

    @property
    def ids(self) -> npt.NDArray[np.intp]:
        """The tokens that occur."""
        return self._different[: self._different_count]

    def add(self, token: int) -> None:
        if not self.counts[token]:
            self._different[self._different_count] = token
            self._different_count += 1
        self.counts[token] += 1

    def remove(self, token: int) -> None:
        """Remove the last token of the sequence."""
        self.counts[token] -= 1
        # They are removed in reverse order, so a token that no longer occurs is the last of the different ones.
        self._different_count -= self.counts[token] == 0
