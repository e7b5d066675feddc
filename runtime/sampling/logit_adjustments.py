"""Penalties for tokens that occurred before, and biases: what is done to logits before a token is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ..arguments.argument_types import check_ranges, option

_MAX_PENALTY = 2.0
_PENALTIES = f"between -{_MAX_PENALTY:g} and {_MAX_PENALTY:g}"
_MAX_BIAS = 100.0


def check_biases(biases: Iterable[float]) -> None:
    """Check what is to be added to logits.

    Raises:
        InputError: a number is out of range.
    """
    for bias in biases:
        if not abs(bias) <= _MAX_BIAS:
            raise InputError(f"a logit bias is {bias}", f"it must be between -{_MAX_BIAS:g} and {_MAX_BIAS:g}")


@dataclass(frozen=True, kw_only=True)
class LogitParams:
    """Penalties and biases; the default changes nothing.

    `repeat_penalty` divides the positive and multiplies the negative logits of every token already in the context
    (Keskar et al. 2019, CTRL). Then `presence_penalty` is subtracted from the logit of every token that the answer has,
    `frequency_penalty` as often as the answer has it, and `logit_bias` is added (OpenAI's chat API).
    """

    repeat_penalty: float = option(
        1.0,
        "Above 1, make tokens that are already in the text less likely; 1 is off.",
        accepts=lambda value: 0.01 <= value <= 100,
        range="between 0.01 and 100",
        label="repeat-penalty",
        metavar="X",
    )
    presence_penalty: float = option(
        0.0,
        "Lower the logits of all tokens that the answer has already by this; -2 to 2.",
        accepts=lambda value: abs(value) <= _MAX_PENALTY,
        range=_PENALTIES,
        label="presence-penalty",
        metavar="X",
    )
    frequency_penalty: float = option(
        0.0,
        "Lower the logit of a token by this for every time that the answer has it already; -2 to 2.",
        accepts=lambda value: abs(value) <= _MAX_PENALTY,
        range=_PENALTIES,
        label="frequency-penalty",
        metavar="X",
    )
    logit_bias: tuple[tuple[int, float], ...] = option(
        (), "What is added to the logits of token ids; -100 to 100.", metavar="ID=X"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        check_biases(bias for _, bias in self.logit_bias)

    @property
    def adjusts(self) -> bool:
        """Whether any logit is changed."""
        return self.repeat_penalty != 1 or self.counts_answer or bool(self.logit_bias)

    @property
    def counts_answer(self) -> bool:
        """Whether it matters how often a token is in the answer."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


class LogitAdjustments:
    """Applies penalties and biases over one sequence, whose tokens it records.

    Args:
        params: the penalties and biases.
        vocab_size: number of logits.

    Raises:
        InputError: a bias is for a token that the model does not have.
    """

    def __init__(self, params: LogitParams, vocab_size: int) -> None:
        beyond = [token for token, _ in params.logit_bias if not 0 <= token < vocab_size]
        if beyond:
            raise InputError(f"logit_bias has token {beyond[0]}", f"token ids of this model are 0 to {vocab_size - 1}")
        self.params = params
        self._scores = np.empty(vocab_size, np.float32)
        self._bias_ids = np.array([token for token, _ in params.logit_bias], np.intp)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._seen = _TokenCounts(vocab_size if params.repeat_penalty != 1 else 0)
        self._answer = _TokenCounts(vocab_size if params.counts_answer else 0)

    def observe_prompt(self, tokens: npt.ArrayLike) -> None:
        """Add tokens of the prompt to the sequence."""
        if self.params.repeat_penalty != 1:
            self._seen.add(tokens)

    def observe(self, tokens: npt.ArrayLike) -> None:
        """Add tokens of the answer to the sequence."""
        self.observe_prompt(tokens)
        if self.params.counts_answer:
            self._answer.add(tokens)

    @contextmanager
    def rollback(self) -> Iterator[None]:
        """Forget the tokens observed within the `with` block when it ends."""
        seen, answer = self._seen.size, self._answer.size
        try:
            yield
        finally:
            self._seen.shorten(seen)
            self._answer.shorten(answer)

    def apply(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the adjusted logits, float32 `[V]`, valid until the next call; `logits` is not modified."""
        scores, params = self._scores, self.params
        np.copyto(scores, logits)
        if params.repeat_penalty != 1:
            ids = self._seen.ids
            seen = scores[ids]
            scores[ids] = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
        if params.counts_answer:
            ids = self._answer.ids
            penalties = params.presence_penalty + params.frequency_penalty * self._answer.counts[ids]
            scores[ids] -= penalties.astype(np.float32)
        if self._bias_ids.size:
            # The same token may be listed more than once.
            np.add.at(scores, self._bias_ids, self._biases)
        return scores


class _TokenCounts:
    """How often each token occurs in a sequence that can be shortened."""

    def __init__(self, vocab_size: int) -> None:
        self.counts = np.zeros(vocab_size, np.int32)
        self._different = np.empty(vocab_size, np.intp)
        """The tokens that occur, in order of their first occurrence."""
        self._different_count = 0
        self._tokens: list[int] = []

    @property
    def size(self) -> int:
        """Number of tokens of the sequence."""
        return len(self._tokens)

    @property
    def ids(self) -> npt.NDArray[np.intp]:
        """The tokens that occur."""
        return self._different[: self._different_count]

    def add(self, tokens: npt.ArrayLike) -> None:
        for token in np.asarray(tokens, np.intp).ravel().tolist():
            if not self.counts[token]:
                self._different[self._different_count] = token
                self._different_count += 1
            self.counts[token] += 1
            self._tokens.append(token)

    def shorten(self, size: int) -> None:
        for token in reversed(self._tokens[size:]):
            self.counts[token] -= 1
            # Removed in reverse order, so a token that no longer occurs is the last of the different ones.
            self._different_count -= self.counts[token] == 0
        del self._tokens[size:]
