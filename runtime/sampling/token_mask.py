"""Which tokens may come next: a mask over the vocabulary, and what gives it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ...errors import InputError

_Floats: TypeAlias = npt.NDArray[np.float32]

_FEW: Final = 4096
"""Number of tokens up to which a list of ids is quicker than a mask of the whole vocabulary."""


class TokenMask:
    """The tokens that may come at one position of a text.

    Args:
        bits: uint8; bit i % 8 of byte i // 8 says whether token i may come. Tokens beyond the last bit may not.
        vocab_size: number of logits.
    """

    __slots__ = ("_allowed", "_forbidden", "ids", "single")

    def __init__(self, bits: npt.NDArray[np.uint8], vocab_size: int) -> None:
        allowed = np.zeros(vocab_size, np.bool_)
        flags = np.unpackbits(bits, bitorder="little")[:vocab_size]
        allowed[: flags.size] = flags
        count = np.count_nonzero(allowed)
        self._allowed: Final = allowed
        self.ids: Final = np.flatnonzero(allowed) if count <= _FEW else None
        """The tokens that may come, ascending, if they are few; else None."""
        forbidden = vocab_size - count
        self._forbidden: Final = np.flatnonzero(~allowed) if forbidden <= _FEW and self.ids is None else ~allowed
        self.single: Final = int(self.ids[0]) if self.ids is not None and count == 1 else None
        """The only token that may come; None if there are several."""

    @property
    def every(self) -> npt.NDArray[np.intp]:
        """The tokens that may come, ascending."""
        return np.flatnonzero(self._allowed) if self.ids is None else self.ids

    def allows(self, token: int) -> bool:
        """Whether a token may come."""
        return bool(self._allowed[token])

    def apply(self, logits: _Floats, out: _Floats) -> _Floats:
        """Write the logits float32 `[V]` to `out`, -infinity for the tokens that may not come; returns `out`."""
        np.copyto(out, logits)
        out[self._forbidden] = -np.inf
        return out

    def largest(self, logits: _Floats, work: _Floats) -> int:
        """The token with the largest logit of those that may come; of equal ones, that with the lowest id.

        Args:
            logits: float32 `[V]`.
            work: work array, float32 `[V]`.
        """
        if self.ids is not None:
            return int(self.ids[logits[self.ids].argmax()])
        # The likeliest token of all usually may come.
        token = int(logits.argmax())
        return token if self._allowed[token] else int(self.apply(logits, work).argmax())


class DeadEndError(InputError):
    """No token of the model may come where an answer is."""


class TokenConstraint(Protocol):
    """Which tokens may come at every position of one answer, whose tokens it observes.

    A path has the tokens behind those that were observed.
    """

    @property
    def size(self) -> int:
        """Number of tokens observed."""

    def observe(self, tokens: Sequence[int], /) -> None:
        """Add tokens to the answer, which may come there."""

    def shorten(self, size: int, /) -> None:
        """Forget the tokens after the first `size`, of those observed since `prepare`."""

    def mask(self, path: Sequence[int] = (), /) -> TokenMask | None:
        """The tokens that may come after a path, at least one; None if all may.

        Raises:
            DeadEndError: none may.
            EdgeError: the constraint is too complex to say.
        """

    def forced(self, path: Sequence[int] = (), /) -> Sequence[int]:
        """The tokens that have to come after a path, as far as they are known, without one that ends the answer."""

    def allows(self, path: Sequence[int], tokens: Sequence[int], /) -> Sequence[bool]:
        """Whether each of some tokens may come after a path and does not end the answer, so that it can be drafted.

        True may be wrong where `forced` has another token.
        """

    def ends_with(self, token: int, /) -> bool:
        """Whether the answer is complete with one more token and nothing but its end may follow."""

    def prepare(self, tokens: Sequence[int] = (), parents: Sequence[int] = (), /) -> None:
        """Begin to compute the masks of a pass in another thread; later calls wait for what they need of it.

        Args:
            tokens: the tokens of a tree; the first is the last token observed.
            parents: the index of the token before each of them; -1 for the first.
        """
