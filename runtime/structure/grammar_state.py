"""Where one answer is in its grammar: masks, forced tokens, and what a drafter may propose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ...errors import EdgeError
from ..kv.arena import shared_tokens
from ..sampling.token_mask import DeadEndError, TokenMask
from .matcher import Matcher

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
