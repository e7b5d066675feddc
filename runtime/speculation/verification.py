"""Verifies a token tree by walking it along the tokens that plain decoding chooses.

At every node the next token is chosen as in plain decoding, from the same logits and with the random number of its
position; if a child carries that token, the walk continues there. The output is therefore that of plain decoding
whatever was drafted: greedy or for a seed, with every filter and penalty, which see the accepted path only.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, Protocol

from ..sampling.sampler import Logits
from .tree import Tree


class TokenSampler(Protocol):
    """Chooses the tokens of one sequence: `Sampler`, or the `ReplaySampler` of benchmarks."""

    def choose(self, logits: Logits, position: int, /) -> int:
        """Choose the token at `position`, its index in the sequence, from float32 logits `[V]`."""

    def observe_prompt(self, tokens: Sequence[int], /) -> None:
        """Add tokens of the prompt to the sequence; the repetition penalty depends on them."""

    def observe(self, tokens: Sequence[int], /) -> None:
        """Add tokens of the answer to the sequence; penalties depend on them."""


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
    tree: Tree, logits: Logits, sampler: TokenSampler, position: int, ends: Container[int], max_tokens: int
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
    sampler: TokenSampler,
    position: int,
    ends: Container[int],
    max_tokens: int,
) -> VerifyResult:
    """Walk the tree along the tokens that `choose` returns for a node and the position after it; see `verify_tree`."""
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, but a round emits at least one token")
    path = [0]
    while True:
        token = choose(path[-1], position + len(path) - 1)
        child = None if token in ends or len(path) == max_tokens else tree.child(path[-1], token)
        if child is None:
            return VerifyResult(tuple(path), token)
        sampler.observe((token,))
        path.append(child)
