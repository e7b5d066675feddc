"""llguidance's matcher of one answer, and one that begins to match after a text of the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import llguidance
import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ..sampling.token_mask import DeadEndError

Bits = npt.NDArray[np.uint8]

_MOST_FORCED: Final = 64
"""Largest number of forced tokens that are given at once."""
_SLOW_MASK_S: Final = 0.01
"""Time of a mask in seconds after which it is looked whether a long forced text is the reason."""


class GrammarMatcher:
    """Follows the tokens of an answer through a grammar from the first token on.

    llguidance's matcher stays in an error for good, also where one path of a tree has led into it, so it is replaced by
    another one then.

    Args:
        fresh: gives a matcher of llguidance at the beginning.
        described: what the grammar is, in errors.
    """

    def __init__(self, fresh: Callable[[], llguidance.LLMatcher], described: str) -> None:
        self._fresh: Final = fresh
        self._described: Final = described
        self._tokens: list[int] = []
        self._run: Sequence[int] = ()
        """Tokens of a long forced text; llguidance would compute the whole rest of it for every mask."""
        self._run_at = 0
        """Number of tokens before it."""
        self._size = 0
        """Bytes of a mask; 0 while there is no forced text."""
        self.matcher = fresh()
        """llguidance's matcher."""

    def consume(self, token: int) -> bool:
        """Go on by a token; False if it may not come, after which the matcher is where it was.

        Raises:
            InputError: the grammar is too complex here; the matcher is where it was.
        """
        if self.matcher.try_consume_tokens([token]) == 1:
            forced = self._rest_of_run(1)
            if forced and token != forced[0]:
                self._run = ()  # the same text in other tokens, which a drafter has proposed
            self._tokens.append(token)
            return True
        if self.matcher.is_error():
            why = self.matcher.get_error()
            self._recover()
            raise self._too_complex(why)
        return False

    def rollback(self, count: int) -> None:
        """Go back by some tokens."""
        del self._tokens[len(self._tokens) - count :]
        if len(self._tokens) < self._run_at:
            self._run = ()
        if not self.matcher.rollback(count):
            self._recover()

    def bits(self) -> Bits:
        """The tokens that may come, a bit each.

        Raises:
            DeadEndError: none may.
            InputError: the grammar is too complex here.
        """
        if forced := self._rest_of_run(1):
            only = np.zeros(self._size, np.uint8)
            only[forced[0] // 8] = 1 << forced[0] % 8
            return only
        began = time.perf_counter()
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        if not self.matcher.is_error() and bits.any():
            if time.perf_counter() - began > _SLOW_MASK_S:
                self._run, self._run_at = self.matcher.compute_ff_tokens(), len(self._tokens)
                self._size = len(bits)
            return bits
        why = self.matcher.get_error()
        if self.matcher.is_error():
            self._recover()
        if why and not why.startswith("NoExtension"):
            raise self._too_complex(why)
        raise DeadEndError(
            f"the {self._described} of the answer needs a text here that the model's tokens cannot write",
            "change it, or use another model",
        )

    def forced(self) -> Sequence[int]:
        """The tokens that have to come now, as far as they are known."""
        return self._rest_of_run(_MOST_FORCED) or self.matcher.compute_ff_tokens()[:_MOST_FORCED]

    def at_end(self) -> bool:
        """Whether the answer is complete, and nothing but its end may follow."""
        return self.matcher.is_stopped() and self.matcher.is_accepting()

    def _rest_of_run(self, count: int) -> Sequence[int]:
        """The next tokens of the long forced text; none where there is no such text."""
        at = len(self._tokens) - self._run_at
        return self._run[at : at + count]

    def _recover(self) -> None:
        """Go on with another matcher after an error."""
        self.matcher = self._fresh()
        if not self.matcher.consume_tokens(self._tokens):
            raise self._too_complex(self.matcher.get_error())

    def _too_complex(self, why: str) -> InputError:
        return InputError(f"the {self._described} of the answer is too complex: {first_line(why)}", "simplify it")


@dataclass(eq=False)
class MatcherAfterText:
    """A matcher of a grammar that begins after a text of the answer, and after the white space behind it.

    Before that, everything may come but the end of the answer. What the token in which the text ends has besides does
    not belong to the grammar.
    """

    _matcher: GrammarMatcher
    """Matches what follows."""
    _text: bytes
    _token_bytes: Callable[[int], bytes]
    """The bytes of a token, a special one as it is written."""
    _not_end: Bits
    """The tokens that may come before, a bit each."""
    _white_space: frozenset[int]
    """Ids of tokens of white space that may come in between."""
    _tails: list[bytes] = field(init=False, default_factory=lambda: [b""])
    """The end of the text before the grammar begins, after each token of it."""
    _spaces: int = field(init=False, default=0)
    """Number of tokens of white space after that."""
    _matched: int = field(init=False, default=0)
    """Number of tokens of the grammar."""

    @property
    def _began(self) -> bool:
        return self._text in self._tails[-1]

    def consume(self, token: int) -> bool:
        """Go on by a token; False if it may not come."""
        if not self._began:
            kept = self._tails[-1][-(len(self._text) - 1) :] if len(self._text) > 1 else b""
            self._tails.append(kept + self._token_bytes(token))
        elif self._matcher.consume(token):
            self._matched += 1
        elif not self._matched and token in self._white_space:
            self._spaces += 1
        else:
            return False
        return True

    def rollback(self, count: int) -> None:
        """Go back by some tokens."""
        matched = min(count, self._matched)
        if matched:
            self._matcher.rollback(matched)
            self._matched -= matched
        spaces = min(count - matched, self._spaces)
        self._spaces -= spaces
        if before := count - matched - spaces:
            del self._tails[-before:]

    def bits(self) -> Bits:
        """The tokens that may come, a bit each."""
        if not self._began:
            return self._not_end
        bits = self._matcher.bits()
        if self._matched:
            return bits
        bits = bits.copy()
        for token in self._white_space:
            bits[token // 8] |= 1 << token % 8
        return bits

    def forced(self) -> Sequence[int]:
        """The tokens that have to come now; none where white space may come."""
        return self._matcher.forced() if self._matched else ()

    def at_end(self) -> bool:
        """Whether the answer is complete, and nothing but its end may follow."""
        return self._began and self._matcher.at_end()


Matcher: TypeAlias = GrammarMatcher | MatcherAfterText
"""What follows the tokens of an answer through its grammar."""


def first_line(message: str) -> str:
    """What a message of llguidance says, in one line, without the state behind it."""
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines() if line.strip()]
    if not lines:
        return "it cannot be read"
    cause = [line.removeprefix("error:").strip() for line in lines[1:] if line.startswith("error:")]
    first = lines[0].removesuffix(": regex parse error:").removesuffix(":")
    # The first line may quote a whole regex.
    return ": ".join([first if len(first) <= 100 or not cause else f"{first[:100]}...", *cause])[:300]
