"""Exact verification of guesses that were drawn at random from a draft model's own laws.

Matching would be exact too, but takes a guess x only with probability p(x). Comparing the target's law p with the law q
that x was drawn from takes it with about min(1, p(x) / q(x)), and makes up for what q favours by what is emitted
otherwise. The text then has the target's law, yet depends on the guesses: a seed gives another one than plain decoding.

Laws are those after temperature, filters and penalties, on each guess's own path. A chain is judged as a whole (block
verification: Sun et al., ICLR 2025), a tree child by child (recursive rejection without replacement: Jeon et al. 2024).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..distribution import Distribution
from ..sampling import Logits, Purpose, Sampler, uniform_at, uniforms_at
from .tree import Tree
from .verification import VerifyResult, follow


@dataclass(frozen=True)
class SampledDraft:
    """A tree whose guesses were drawn at random, and the laws they were drawn from.

    Whether a node gets children, and how many, may depend on anything known before they are drawn: the path, the laws,
    the cost of a pass. Once drawn, none may be dropped for what it turned out to be; it would no longer follow its law.
    """

    tree: Tree
    """Children of a node with a law come in the order they were drawn in; those of one without were not drawn."""
    laws: Mapping[int, Distribution]
    """For every node whose children were drawn, the law the first of them was drawn from; see `draw_children`."""

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.tree.parents.tolist()):
            if parent in self.laws and not self.laws[parent].probability(int(self.tree.tokens[node])) > 0:
                raise ValueError(f"node {node} cannot have been drawn: its parent's law does not have its token")


def draw_children(law: Distribution, count: int, seed: int, position: int, node: int) -> tuple[int, ...]:
    """Up to `count` different tokens from `law`, each from what the ones before have left of it, in this order.

    Fewer if the law has no more. In law this is the Gumbel top-k (Kool et al. 2019), at a random number per token drawn
    instead of one per token of the vocabulary. Seed, position and node determine the draw; the numbers are used for
    nothing else.

    Args:
        law: the draft's, after `node`'s path.
        count: how many.
        seed: the text's; the target's seed may be the same.
        position: index in the text of the token the anchor's logits are for, so the same for a whole tree. A guess's
            own index would not do: block verification looks at guesses that it does not take, and the next round
            would draw with numbers that have already had their say.
        node: index of the parent in the tree.
    """
    drawn: list[int] = []
    for uniform in uniforms_at(seed, position, count, Purpose.DRAFT, node).tolist():
        law = law.without(drawn[-1]) if drawn else law
        if not law.ids.size:
            break
        drawn.append(law.draw(uniform))
    return tuple(drawn)


def verify_block(
    draft: SampledDraft, logits: Logits, sampler: Sampler, position: int, ends: Container[int], most: int
) -> VerifyResult:
    """Judge a chain as a whole; of the verifiers that know the laws along one path, none takes more guesses.

    Args:
        draft: a chain with the law of every guess.
        logits: float32 `[n, V]`, the target's at each node.
        sampler: has observed the text up to the anchor, and observes the accepted guesses here.
        position: index in the text of the token that the anchor's logits are for.
        ends: tokens that end the text; none is on the path, but the next token may be one.
        most: tokens that may be emitted in this round, at least 1.
    """
    tree = draft.tree
    if most < 1:
        raise ValueError(f"a round emits at least one token, not {most}")
    if not tree.is_chain or any(node not in draft.laws for node in range(len(tree) - 1)):
        raise ValueError("block verification needs a chain with the law of every guess")
    # Guesses beyond the limit, or beyond an end of the text, count as never drawn.
    drawn: list[int] = tree.tokens[1:most].tolist()
    drawn = drawn[: next((count for count, token in enumerate(drawn, 1) if token in ends), None)]
    complete = bool(drawn) and drawn[-1] in ends

    targets: list[Distribution] = []
    with sampler.rollback():
        for node in range(len(drawn) + (not complete)):
            targets.append(sampler.distribution(logits[node]))
            if node < len(drawn):
                if targets[-1].probability(drawn[node]) == 0:
                    # It is never taken, so nothing after it is either.
                    drawn = drawn[: node + 1]
                    break
                sampler.observe(drawn[node : node + 1])
    drafts = [draft.laws[node] for node in range(len(drawn))]
    weights, odds = block_odds(drawn, targets, drafts)
    # All are tried: a late success takes the earlier guesses along.
    successes = np.flatnonzero(uniforms_at(sampler.params.seed, position, len(drawn), Purpose.ACCEPT) < odds)
    taken = int(successes[-1]) + 1 if successes.size else 0
    if complete and taken == len(drawn):
        taken -= 1
        token = drawn[-1]
    else:
        rest = targets[taken] if taken == len(drawn) else targets[taken].residual(drafts[taken], weights[taken])
        token = rest.draw(uniform_at(sampler.params.seed, position + taken))
    sampler.observe(drawn[:taken])
    return VerifyResult(tuple(range(taken + 1)), token)


def block_odds(
    drawn: Sequence[int], targets: Sequence[Distribution], drafts: Sequence[Distribution]
) -> tuple[list[float], list[float]]:
    """How a block of `g` guesses is decided: the last of independent trials to succeed says how many are taken.

    Args:
        drawn: the guesses.
        targets: the target's law at each guess; the one after the last is not needed.
        drafts: the law each guess was drawn from.

    Returns:
        Weights `[g + 1]`: if `i` < g guesses are taken, the next token comes from the residual of the target's law,
        times weight i, over the draft's. And the odds `[g]` of the trials for 1, 2, .. g guesses.
    """
    weights, odds = [1.0], list[float]()
    for i, token in enumerate(drawn):
        weight = min(1.0, weights[-1] * targets[i].probability(token) / drafts[i].probability(token))
        weights.append(weight)
        if weight == 1 or i + 1 == len(drawn):
            odds.append(weight)
        else:
            left = float(targets[i + 1].excess(drafts[i + 1], weight).sum())
            odds.append(left / (left + 1 - weight))
    return weights, odds


def verify_recursive(
    draft: SampledDraft, logits: Logits, sampler: Sampler, position: int, ends: Container[int], most: int
) -> VerifyResult:
    """Judge a tree child by child, in the order they were drawn.

    Children of nodes without a law were not drawn; they are taken if they match the token that `sampler` chooses.

    Args: as for `verify_block`, but `draft` may be any tree.
    """
    tree, seed = draft.tree, sampler.params.seed

    def choose(node: int, at: int) -> int:
        if node not in draft.laws:
            return sampler.choose(logits[node], at)
        rest, proposal = sampler.distribution(logits[node]), draft.laws[node]
        children: list[int] = tree.tokens[tree.parents == node].tolist()
        for token, uniform in zip(children, uniforms_at(seed, at, len(children), Purpose.ACCEPT), strict=True):
            if uniform < acceptance(rest, proposal, token):
                return token
            rest, proposal = after_rejecting(rest, proposal, token)
        return rest.draw(uniform_at(seed, at))

    return follow(tree, choose, sampler, position, ends, most)


def acceptance(rest: Distribution, proposal: Distribution, token: int) -> float:
    """Probability of taking a guess: `rest` is the law still to be met, `proposal` the one it was drawn from."""
    drawn_with = proposal.probability(token)
    return min(1.0, rest.probability(token) / drawn_with) if drawn_with > 0 else 0.0


def after_rejecting(rest: Distribution, proposal: Distribution, token: int) -> tuple[Distribution, Distribution]:
    """What is still to be met, and the law of the next guess, once a guess has been refused."""
    return rest.residual(proposal), proposal.without(token)
