"""Which guesses of a token tree the text takes: a walk from the anchor along the tokens that would be chosen anyway.

At every node the next token is chosen as plain decoding chooses it, from the same logits and with the position's own
random number; if a child carries it, the walk goes on there. The text is therefore that of plain decoding, whatever was
guessed: greedy and for a seed, with every filter and penalty, which see the walked path and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..sampling import Logits
from .tree import Tree


class TokenSampler(Protocol):
    """Chooses the tokens of one text. `Sampler` is one."""

    def choose(self, logits: Logits, position: int, /) -> int:
        """The token at `position`, its index in the text, from float32 logits `[V]`."""

    def observe(self, tokens: Sequence[int], /) -> None:
        """Add tokens to the text, as far as later choices depend on it."""


@dataclass(frozen=True)
class VerifyResult:
    """What a round takes of its tree."""

    path: tuple[int, ...]
    """Accepted nodes, ascending, the anchor (0) first; each is the child of the one before."""
    next_token: int
    """The token after them: the next round's anchor, or the end of the text."""

    def emitted(self, tree: Tree) -> tuple[int, ...]:
        """The round's new tokens, as many as the path has nodes: those after the anchor, and the next."""
        return (*tree.tokens[list(self.path[1:])].tolist(), self.next_token)


def match(
    tree: Tree, logits: Logits, chooser: TokenSampler, position: int, ends: Container[int], most: int
) -> VerifyResult:
    """Take the guesses that `chooser` would choose: exact match if it is greedy, otherwise sample-then-match.

    Only rows on the path are looked at; a row of a large vocabulary costs more than all the rest.

    Args:
        tree: `n` guesses, fixed before any random number of these positions was looked at.
        logits: float32 `[n, V]`, the target's at each node.
        chooser: has observed the text up to the anchor, and observes the accepted guesses here; the next token is left
            to the round that begins with it.
        position: index in the text of the token that the anchor's logits are for.
        ends: tokens that end the text; none is on the path, but the next token may be one.
        most: tokens that may be emitted in this round, at least 1.
    """
    return follow(tree, lambda node, at: chooser.choose(logits[node], at), chooser, position, ends, most)


def follow(
    tree: Tree, choose: Callable[[int, int], int], chooser: TokenSampler, position: int, ends: Container[int], most: int
) -> VerifyResult:
    """Walk the tree along the tokens that `choose` gives for a node and the position after it; see `match`."""
    if most < 1:
        raise ValueError(f"a round emits at least one token, not {most}")
    path = [0]
    while True:
        token = choose(path[-1], position + len(path) - 1)
        child = None if token in ends or len(path) == most else tree.child(path[-1], token)
        if child is None:
            return VerifyResult(tuple(path), token)
        chooser.observe((token,))
        path.append(child)
