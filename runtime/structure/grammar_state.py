"""Where one answer is in its grammar: masks, forced tokens, and what a drafter may propose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import llguidance
import numpy as np
import numpy.typing as npt

from ...errors import EdgeError, InputError
from ..kv.arena import shared_tokens
from ..sampling.token_mask import DeadEndError, TokenMask

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


_Path = tuple[int, ...]
_MOST_MASKS = 256
"""Largest number of masks that are kept; each takes a byte for every token of the vocabulary."""


@dataclass(eq=False)
class GrammarState:
    """A `TokenConstraint` of one answer.

    The matcher has one position, which moves along the paths that are asked about. Masks are computed once for each
    path; the masks of a pass are computed in a thread while the pass runs.
    """

    _matcher: Matcher
    """At the beginning of the answer."""
    _vocab_size: int
    """Number of logits."""
    _ends: frozenset[int]
    """Tokens that end the answer, which are never drafted."""
    _submit: Callable[[Callable[[], None]], None]
    """Runs a function in another thread."""
    _ended: Callable[[], None] | None = None
    """Called once at the end of the answer; None for nothing."""
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Held by whoever moves the matcher."""
    _base: int = field(init=False, default=0)
    """Number of tokens that the matcher does not go back behind."""
    _observed: _Path = field(init=False, default=())
    """Tokens observed after those."""
    _at: _Path = field(init=False, default=())
    """Tokens after those that the matcher has consumed."""
    _masks: dict[_Path, TokenMask | None] = field(init=False, default_factory=dict)
    """The mask after every path behind the base that is known."""

    @property
    def size(self) -> int:
        """Number of tokens observed."""
        return self._base + len(self._observed)

    def observe(self, tokens: Sequence[int]) -> None:
        """Add tokens to the answer, which may come there."""
        self._observed += tuple(tokens)

    def shorten(self, size: int) -> None:
        """Forget the tokens after the first `size`, of those observed since `prepare`."""
        self._observed = self._observed[: size - self._base]

    def mask(self, path: Sequence[int] = ()) -> TokenMask | None:
        """The tokens that may come after a path; None if all may."""
        whole = (*self._observed, *path)
        with self._lock:
            if whole not in self._masks:
                if len(self._masks) >= _MOST_MASKS:  # a search asks for those of many paths
                    self._masks.clear()
                self._masks[whole] = self._mask(whole)
            return self._masks[whole]

    def forced(self, path: Sequence[int] = ()) -> Sequence[int]:
        """The tokens that have to come after a path, without one that ends the answer."""
        with self._lock:
            whole = (*self._observed, *path)
            self._seek(whole)
            forced = self._matcher.forced()
            if not forced or not self._draftable((*whole, *forced[:-1]), forced[-1]):
                # The pass over the token before gives the last token of a grammar, behind which nothing is needed.
                return forced[:-1]
            return forced

    def allows(self, path: Sequence[int], tokens: Sequence[int]) -> Sequence[bool]:
        """Whether each of some tokens may come after a path and does not end the answer."""
        whole = (*self._observed, *path)
        with self._lock:
            mask = self._masks.get(whole)
            possible = tokens if mask is None else [token for token in tokens if mask.allows(token)]
            good = {token for token in possible if self._draftable(whole, token)}
            return [token in good for token in tokens]

    def ends_with(self, token: int) -> bool:
        """Whether the answer is complete with one more token, and nothing but its end may follow."""
        with self._lock:
            self._seek((*self._observed, token))
            return self._matcher.at_end()

    def end(self) -> None:
        """End the answer when the masks that are being computed are done; calling it again does nothing."""
        with self._lock:
            ended, self._ended = self._ended, None
        if ended is not None:
            ended()

    def prepare(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> None:
        """Begin to compute the masks of a pass over a tree of tokens in another thread."""
        with self._lock:
            self._seek(self._observed)
            done = len(self._observed)
            known = self._masks.items()
            self._masks = {path[done:]: mask for path, mask in known if path[:done] == self._observed}
            self._base += done
            self._observed = self._at = ()
        paths: list[_Path] = [()]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            paths.append((*paths[parent], token))
        self._lock.acquire()
        try:
            self._submit(lambda: self._compute(paths))
        except RuntimeError:  # no thread can be started
            self._compute(paths)

    def _compute(self, paths: Sequence[_Path]) -> None:
        """Compute the masks after some paths; the lock is held, and released at the end."""
        try:
            for path in paths:
                if path not in self._masks:
                    with suppress(EdgeError):  # raised where the mask is asked for, if it ever is
                        self._masks[path] = self._mask(path)
        finally:
            self._lock.release()

    def _draftable(self, path: _Path, token: int) -> bool:
        """Whether a token may come after a path, and does not end the answer."""
        if token in self._ends:
            return False
        try:
            self._seek(path)
            if not self._matcher.consume(token):
                return False
        except EdgeError:  # raised again where the answer itself comes there
            return False
        ends = self._matcher.at_end()
        self._matcher.rollback(1)
        return not ends

    def _mask(self, path: _Path) -> TokenMask:
        self._seek(path)
        mask = TokenMask(self._matcher.bits(), self._vocab_size)
        if mask.ids is not None and not len(mask.ids):
            raise DeadEndError(
                "only the end of the answer may come, and the model has no token for it", "allow longer answers"
            )
        return mask

    def _seek(self, path: _Path) -> None:
        """Move the matcher to the end of a path behind the base.

        Raises:
            EdgeError: the grammar does not allow the path, or is too complex there.
        """
        at = self._at
        shared = shared_tokens(at, path)
        if shared < len(at):
            self._matcher.rollback(len(at) - shared)
            self._at = path[:shared]
        for token in path[shared:]:
            if not self._matcher.consume(token):
                # llguidance refuses a token without an error where checking it exceeds a limit; its mask has the error.
                self._matcher.bits()
                raise EdgeError(f"the grammar of the answer does not allow the token {token} here")
            self._at = (*self._at, token)
