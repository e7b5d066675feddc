"""Verifies a token tree by walking it along the tokens that plain decoding chooses.

At every node the next token is chosen as in plain decoding, from the same logits and with the random number of its
position; if a child carries that token, the walk continues there. So the output equals plain decoding's
whatever was drafted: greedy or for a seed, with every filter and penalty, which see the accepted path only.

Near ties are recomputed where greedy output has to equal plain decoding bit for bit: the kernels for several tokens
add up in another order than those for one, so logits differ in their last bits; and with activations rounded to 8
bits, a rounding that goes the other way leaves a difference in the KV cache, which every later token reads. A choice
is uncertain only where the best two logits are closer than all of this can move them: a near tie. It is decided again.
One more pass over the cache as it is would not do, because the cache differs as well: every token since the last cache
slot that equals plain decoding's is run again, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Final, NamedTuple

from ..graph.bound_graph import BoundGraph
from ..prefill import Cancelled, prefill
from ..sampling.logit_stage import Logits
from ..sampling.sampler import Sampler
from .tree import Tree


class VerifyResult(NamedTuple):
    """Outcome of verifying a tree."""

    accepted_path: tuple[int, ...]
    """Accepted nodes, ascending, the anchor (0) first; each is a child of the one before."""
    next_token: int
    """The token after the accepted path: the next round's anchor, or the end of the sequence."""

    def emitted(self, tree: Tree) -> tuple[int, ...]:
        """The tokens that the round produces: the accepted draft tokens, then the next token."""
        return (*[tree.token_ids[node] for node in self.accepted_path[1:]], self.next_token)


def verify_tree(
    tree: Tree, logits: Logits, sampler: Sampler, position: int, ends: Container[int], max_tokens: int
) -> VerifyResult:
    """Accept the draft tokens that `sampler` chooses: exact match if it is greedy, otherwise sample-then-match.

    Only the logits of nodes on the accepted path are read: with a large vocabulary, one row of logits costs more than
    everything else.

    Args:
        tree: `n` nodes, drafted before any random number of these positions was used.
        logits: float32 `[n, V]`, the target's at each node.
        sampler: has observed the sequence up to the anchor, and observes the accepted tokens here; the next token is
            left to the round that begins with it.
        position: index in the sequence of the token that the anchor's logits predict.
        ends: tokens that end the sequence; none is on the accepted path, but the next token may be one.
        max_tokens: number of tokens that may be emitted in this round, at least 1.
    """
    return walk_tree(tree, lambda node, at: sampler.choose(logits[node], at), sampler, position, ends, max_tokens)


def walk_tree(
    tree: Tree,
    choose: Callable[[int, int], int],
    sampler: Sampler,
    position: int,
    ends: Container[int],
    max_tokens: int,
) -> VerifyResult:
    """Walk the tree along the tokens that `choose` returns for a node and the position after it; see `verify_tree`."""
    path = [0]
    while True:
        token = choose(path[-1], position + len(path) - 1)
        child = None if token in ends or len(path) == max_tokens else tree.child(path[-1], token)
        if child is None:
            return VerifyResult(tuple(path), token)
        sampler.observe((token,))
        path.append(child)


class NearTies:
    """Finds the near ties of one greedy sequence and decides them as plain decoding does.

    Args:
        bound: the session and the arena of the sequence.
        sampler: chooses its tokens. A sampled choice can be uncertain without a near tie, so exact sampled output needs
            plain decoding throughout.
        epsilon: largest difference, in logits, that still counts as a near tie; what the sampler does scales it.
        cancelled: called before every pass; returns whether to stop.
    """

    def __init__(self, bound: BoundGraph, sampler: Sampler, epsilon: float, cancelled: Callable[[], bool]) -> None:
        self._bound = bound
        self._sampler = sampler
        self._epsilon: Final = epsilon * sampler.magnifies
        self._cancelled = cancelled
        self._token_ids: list[int] = []
        self.passes = 0
        """Number of passes that recomputed near ties, of one token each."""

    def reset(self, prompt: Sequence[int]) -> int:
        """Start a new sequence; recompute the cached slots after `plain_length`, one token at a time.

        Returns:
            The passes so far.

        Raises:
            Cancelled: the caller cancelled.
        """
        arena = self._bound.arena
        self._token_ids = list(prompt[: arena.length])
        if arena.plain_length < arena.length:
            self._recompute(())
        self._token_ids = list(prompt)
        return self.passes

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        self._token_ids += tokens

    def resolve(self, logits: Logits) -> Logits:
        """The logits to choose from after a pass over the last token: `logits` `[V]`, recomputed at a near tie.

        Raises:
            Cancelled: the caller cancelled.
        """
        if not self._is_near_tie(logits, 1):
            return logits
        return self._recompute(())

    def verify_tree(
        self, tree: Tree, logits: Logits, position: int, ends: frozenset[int], max_tokens: int
    ) -> tuple[VerifyResult, Logits]:
        """`verification.verify_tree`, except that the walk ends at a near tie, which is recomputed.

        After a near tie, the slots of the accepted path are committed; otherwise that is left to the caller.

        Args:
            tree: as for `verification.verify_tree`.
            logits: as for `verification.verify_tree`, of a pass over `tree` behind the arena's committed slots.
            position: as for `verification.verify_tree`.
            ends: as for `verification.verify_tree`.
            max_tokens: as for `verification.verify_tree`.

        Returns:
            The result, and the logits that it was chosen from: after a near tie a copy with its recomputed ones.

        Raises:
            Cancelled: the caller cancelled.
        """
        last = set(ends)
        decisive = logits

        def choose(node: int, at: int) -> int:
            if not self._is_near_tie(logits[node], len(tree)):
                return self._sampler.choose(logits[node], at)
            nonlocal decisive
            decisive = logits.copy()  # the passes that recompute overwrite the original
            decisive[node] = self._recompute([tree.token_ids[each] for each in tree.path_to(node)[1:]])
            token = self._sampler.choose(decisive[node], at)
            last.add(token)  # recomputing has overwritten the slots behind this one, so the walk ends here
            return token

        result = walk_tree(tree, choose, self._sampler, position, last, max_tokens)
        return result, decisive

    def _is_near_tie(self, logits: Logits, width: int) -> bool:
        """Whether `logits` `[V]`, of a pass over `width` tokens, may lead to another choice than plain decoding's."""
        arena = self._bound.arena
        if width == 1 and arena.plain_length >= arena.length:
            return False
        return self._sampler.top_two_margin(logits) < self._epsilon

    def _recompute(self, path: Sequence[int]) -> Logits:
        """Run the sequence and `path` from the last plain slot on, token by token; returns the last logits `[V]`."""
        arena = self._bound.arena
        last_prefill = arena.last_prefill
        arena.rewind_to(arena.plain_length)
        try:
            logits, passes, _ = prefill(self._bound, [*self._token_ids, *path], self._cancelled, width=1)
        except Cancelled:
            # The draft tokens of the path are not emitted, so their slots must not stay.
            arena.rewind_to(min(arena.length, len(self._token_ids)))
            raise
        finally:
            arena.last_prefill = last_prefill  # these tokens are not the prompt's
        self.passes += passes
        return logits
