"""Exact verification of draft tokens sampled from a draft model's own distributions.

Sample-then-match would be exact too, but accepts a draft token x only with probability p(x). Comparing the target's
distribution p with the distribution q that x was sampled from accepts it with about min(1, p(x) / q(x)), and corrects
for what q favours in the token emitted otherwise. The output then has the target's distribution, yet depends on the
draft tokens: a seed gives another text than in plain decoding.

Distributions are those after temperature, filters and penalties, on each draft token's own path. Chains use block
verification (Sun et al., ICLR 2025), trees recursive rejection without replacement (Jeon et al. 2024).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..sampling.distribution import Distribution
from ..sampling.sampler import Logits, Purpose, Sampler, uniform_at, uniforms_at
from .tree import Tree
from .verification import VerifyResult, walk_tree


@dataclass(frozen=True)
class SampledDraft:
    """A tree whose draft tokens were sampled, and the distributions they were sampled from.

    Whether a node gets children, and how many, may depend on anything known before they are sampled: the path, the
    distributions, the cost of a pass. Once sampled, none may be dropped because of the token it turned out to be;
    otherwise it would no longer follow its distribution.
    """

    tree: Tree
    """Children of a node with a distribution are in the order they were sampled in; others were not sampled."""
    distributions: Mapping[int, Distribution]
    """For every node whose children were sampled, the distribution of the first child; see `sample_children`."""

    def __post_init__(self) -> None:
        for node, parent in enumerate(self.tree.parent_nodes):
            token = self.tree.token_ids[node]
            if parent in self.distributions and not self.distributions[parent].probability(token) > 0:
                raise ValueError(f"node {node} has token {token}, which has no probability in its distribution")


def sample_children(distribution: Distribution, count: int, seed: int, position: int, node: int) -> tuple[int, ...]:
    """Sample up to `count` different tokens without replacement, in this order; fewer if there are no more.

    Equivalent to Gumbel top-k (Kool et al. 2019), with one random number per sampled token instead of one per token of
    the vocabulary. Seed, position and node determine the random numbers, which are used for nothing else.

    Args:
        distribution: the draft model's, after `node`'s path.
        count: number of tokens.
        seed: seed of the sequence; the target may use the same one.
        position: index in the sequence of the token that the anchor's logits predict, the same for a whole tree. A
            draft token's own index would not do: block verification reads draft tokens that it does not accept, and
            the next round would sample with random numbers that have already influenced the output.
        node: index of the parent in the tree.
    """
    sampled: list[int] = []
    for uniform in uniforms_at(seed, position, count, Purpose.DRAFT, node).tolist():
        distribution = distribution.without(sampled[-1]) if sampled else distribution
        if not distribution.ids.size:
            break
        sampled.append(distribution.draw(uniform))
    return tuple(sampled)


def verify_block(
    draft: SampledDraft, logits: Logits, sampler: Sampler, position: int, ends: Container[int], max_tokens: int
) -> VerifyResult:
    """Verify a chain as a block; of the verifiers that know the distributions on one path, none accepts more.

    Args:
        draft: a chain with the distribution of every draft token.
        logits: float32 `[n, V]`, the target's at each node.
        sampler: has observed the sequence up to the anchor, and observes the accepted tokens here.
        position: index in the sequence of the token that the anchor's logits predict.
        ends: tokens that end the sequence; none is on the accepted path, but the next token may be one.
        max_tokens: number of tokens that may be emitted in this round, at least 1.
    """
    tree = draft.tree
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, but a round emits at least one token")
    if not tree.is_chain or any(node not in draft.distributions for node in range(len(tree) - 1)):
        raise ValueError("block verification needs a chain with the distribution of every draft token")
    # Draft tokens beyond the limit, or beyond an end of the sequence, count as never sampled.
    tokens: list[int] = list(tree.token_ids[1:max_tokens])
    tokens = tokens[: next((count for count, token in enumerate(tokens, 1) if token in ends), None)]
    ended = bool(tokens) and tokens[-1] in ends

    targets: list[Distribution] = []
    with sampler.rollback():
        for node in range(len(tokens) + (not ended)):
            targets.append(sampler.distribution(logits[node]))
            if node < len(tokens):
                if targets[-1].probability(tokens[node]) == 0:
                    # It is never accepted, so nothing after it is either.
                    tokens = tokens[: node + 1]
                    break
                sampler.observe(tokens[node : node + 1])
    drafts = [draft.distributions[node] for node in range(len(tokens))]
    weights, probabilities = block_acceptance(tokens, targets, drafts)
    # All trials count: a late success accepts the tokens before it too.
    seed, at = sampler.params.seed, sampler.params.first_position + position
    uniforms = uniforms_at(seed, at, len(tokens), Purpose.ACCEPT)
    successes = np.flatnonzero(uniforms < probabilities)
    accepted = int(successes[-1]) + 1 if successes.size else 0
    if ended and accepted == len(tokens):
        accepted -= 1
        token = tokens[-1]
    else:
        rest = targets[accepted]
        if accepted < len(tokens):
            rest = rest.residual(drafts[accepted], weights[accepted])
        token = rest.draw(uniform_at(seed, at + accepted))
    sampler.observe(tokens[:accepted])
    return VerifyResult(tuple(range(accepted + 1)), token)


def block_acceptance(
    tokens: Sequence[int], targets: Sequence[Distribution], drafts: Sequence[Distribution]
) -> tuple[list[float], list[float]]:
    """Acceptance probabilities of a block of `g` draft tokens: the last independent trial to succeed decides.

    Args:
        tokens: the draft tokens.
        targets: the target's distribution at each draft token; the one after the last is not needed.
        drafts: the distribution that each draft token was sampled from.

    Returns:
        Weights `[g + 1]`: if `i` < g tokens are accepted, the next token is sampled from the residual of the target's
        distribution, times weight i, over the draft's. And the probabilities `[g]` of the trials for 1, 2, ... g
        tokens.
    """
    weights, probabilities = [1.0], list[float]()
    for i, token in enumerate(tokens):
        weight = min(1.0, weights[-1] * targets[i].probability(token) / drafts[i].probability(token))
        weights.append(weight)
        if weight == 1 or i + 1 == len(tokens):
            probabilities.append(weight)
        else:
            excess = float(targets[i + 1].excess(drafts[i + 1], weight).sum())
            probabilities.append(excess / (excess + 1 - weight))
    return weights, probabilities


def verify_recursive(
    draft: SampledDraft, logits: Logits, sampler: Sampler, position: int, ends: Container[int], max_tokens: int
) -> VerifyResult:
    """Verify a tree child by child, in the order they were sampled.

    Children of nodes without a distribution were not sampled; they are accepted if they match the token that `sampler`
    chooses.

    Args: as for `verify_block`, but `draft` may be any tree.
    """
    tree, seed = draft.tree, sampler.params.seed

    def choose(node: int, position: int) -> int:
        if node not in draft.distributions:
            return sampler.choose(logits[node], position)
        at = sampler.params.first_position + position
        rest, proposal = sampler.distribution(logits[node]), draft.distributions[node]
        children = [token for token, parent in zip(tree.token_ids, tree.parent_nodes, strict=True) if parent == node]
        for token, uniform in zip(children, uniforms_at(seed, at, len(children), Purpose.ACCEPT), strict=True):
            if uniform < acceptance_probability(rest, proposal, token):
                return token
            rest, proposal = after_rejecting(rest, proposal, token)
        return rest.draw(uniform_at(seed, at))

    return walk_tree(tree, choose, sampler, position, ends, max_tokens)


def acceptance_probability(rest: Distribution, proposal: Distribution, token: int) -> float:
    """Probability of accepting a draft token.

    Args:
        rest: what is left of the target's distribution after the children rejected so far.
        proposal: the distribution that the token was sampled from.
        token: the draft token.
    """
    proposed = proposal.probability(token)
    return min(1.0, rest.probability(token) / proposed) if proposed > 0 else 0.0


def after_rejecting(rest: Distribution, proposal: Distribution, token: int) -> tuple[Distribution, Distribution]:
    """What is left of the target's distribution, and the next child's distribution, once `token` was rejected."""
    return rest.residual(proposal), proposal.without(token)
