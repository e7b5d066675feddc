"""Greedy text that is plain decoding's to the last bit, whatever was guessed.

The kernels for several rows add up in another order than those for one, so a row's logits differ in their last bits;
and with activations rounded to 8 bits, one rounding that falls the other way is a difference that stays: every later
row reads it in the cache. A choice is in doubt only where the best two scores are closer than all of this can move
them. Such a near-tie is decided again. One pass over the cache as it is would not do, because that differs as well:
every row since the last one that is plain decoding's own is run again, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..graph.bound_session import BoundSession
from ..prefill import Cancelled
from ..sampling import Logits, Sampler
from .tree import Tree
from .verification import VerifyResult, follow


class NearTies:
    """Finds the choices of one greedy text that are in doubt, and decides them as plain decoding does.

    Args:
        bound: the session and the arena of the text.
        sampler: chooses its tokens. What it draws at random can be in doubt without being a tie: that is text for plain
            rounds, of which no choice is in doubt.
        epsilon: logits; scores that are further apart keep their order. A repetition penalty scales it.
        cancelled: asked before every pass.
    """

    def __init__(self, bound: BoundSession, sampler: Sampler, epsilon: float, cancelled: Callable[[], bool]) -> None:
        penalty = sampler.params.repeat_penalty
        self._bound = bound
        self._sampler = sampler
        self._epsilon: Final = epsilon * max(penalty, 1 / penalty)
        self._cancelled = cancelled
        self._text: list[int] = []
        self.met = 0
        """Near-ties decided again."""
        self.rows = 0
        """Passes that this took, of a row each."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Make `prompt` the text, and those of its rows that are in the arena plain decoding's.

        Raises:
            Cancelled: before that was done.
        """
        arena = self._bound.arena
        self._text = list(prompt[: arena.length])
        if arena.plain_length < arena.length:
            self._renew(())
        self._text = list(prompt)

    def append(self, tokens: Sequence[int]) -> None:
        """Let the text grow."""
        self._text += tokens

    def settled(self, logits: Logits) -> Logits:
        """What to choose from after a pass over the text's last token: `logits` `[V]`, or if in doubt, those renewed.

        Raises:
            Cancelled: before they were.
        """
        if not self._doubts(logits, 1):
            return logits
        self.met += 1
        return self._renew(())

    def match(self, tree: Tree, logits: Logits, position: int, ends: frozenset[int], most: int) -> VerifyResult:
        """`verify.match`, except that the walk ends at a near-tie.

        The rows of its path are then in the arena, committed; otherwise that is still to be done.

        Args:
            tree: as for `verify.match`.
            logits: as for `verify.match`, of a pass over `tree` behind the arena's committed rows.
            position: as for `verify.match`.
            ends: as for `verify.match`.
            most: as for `verify.match`.

        Raises:
            Cancelled: while a near-tie was decided.
        """
        last = set(ends)

        def choose(node: int, at: int) -> int:
            if not self._doubts(logits[node], len(tree)):
                return self._sampler.choose(logits[node], at)
            self.met += 1
            first = logits[0].copy()
            token = self._sampler.choose(self._renew(tree.tokens[list(tree.path_to(node)[1:])].tolist()), at)
            logits[0] = first  # a pass over one row has left its logits there
            last.add(token)  # the rows behind this one are gone
            return token

        return follow(tree, choose, self._sampler, position, last, most)

    def _doubts(self, logits: Logits, rows: int) -> bool:
        """Whether `logits` `[V]`, of a pass over `rows` rows, may lead to another choice than plain decoding's."""
        arena = self._bound.arena
        if rows == 1 and arena.plain_length >= arena.length:
            return False
        return self._sampler.top_two_margin(logits) < self._epsilon

    def _renew(self, path: Sequence[int]) -> Logits:
        """Make the rows of the text and `path` plain decoding's, committed; returns the last one's logits `[V]`."""
        arena = self._bound.arena
        arena.rewind_to(arena.plain_length)
        logits: Logits | None = None
        for token in [*self._text, *path][arena.plain_length :]:
            if self._cancelled():
                # The guesses of the path are not given out, so their rows may not stay.
                arena.rewind_to(min(arena.length, len(self._text)))
                raise Cancelled
            logits = self._bound.forward((token,))[0]
            arena.commit(1)
            self.rows += 1
        if logits is None:
            raise ValueError("every row is plain decoding's already")
        return logits
