"""Speculation with draft tokens sampled at random, from a draft model or from n-grams.

Where the target is sampled at a high temperature, a token sampled from the drafter's own distribution, and accepted
by comparing the two distributions, is accepted more often than the drafter's most probable token. The disadvantage:
the text for a seed then depends on how much was drafted, hence on this machine's timing. So it is never the default.

Sample-then-match would be exact too, but accepts a draft token x only with probability p(x). Comparing the target's
distribution p with the distribution q that x was sampled from accepts it with about min(1, p(x) / q(x)), and corrects
for what q favours in the token emitted otherwise. The output then has the target's distribution, yet depends on the
draft tokens: a seed gives another text than in plain decoding.

Distributions are those after temperature, filters and penalties, on each draft token's own path. Chains use block
verification (Sun et al., ICLR 2025), trees recursive rejection without replacement (Jeon et al. 2024), which accepts
more than SpecTr's k-SEQ (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final

import numpy as np

from ..sampling.distribution import Distribution, Purpose, uniforms_at
from ..sampling.logit_stage import Logits
from ..sampling.sampler import Sampler, SamplingParams, uniform_at
from ..sampling.token_mask import TokenConstraint
from .choice import DraftSampling
from .drafters.sampled import AcceptanceEstimate, DistributionSource, SampledDraft, SampledDrafter
from .growth import TokenPrices
from .pass_cost import PassCost
from .rounds import Round
from .speculator import Speculator
from .verification import TokenSampler, VerifyResult, walk_tree


class SampledSpeculator(Speculator):
    """A `Speculator` whose only drafter samples from distributions.

    Args:
        distributions: what draft tokens are sampled from.
        cost: cost of target passes.
        draft_sampling: anything but OFF.
        trees: whether the target can verify trees.
        estimate: what is known about the acceptance of such draft tokens; None for nothing yet.
    """

    def __init__(
        self,
        distributions: DistributionSource,
        cost: PassCost,
        draft_sampling: DraftSampling,
        *,
        trees: bool,
        estimate: AcceptanceEstimate | None = None,
    ) -> None:
        super().__init__((), cost, trees=trees)
        self._distributions: Final = distributions
        self._estimate: Final = AcceptanceEstimate() if estimate is None else estimate
        self._chain: Final = draft_sampling is DraftSampling.CHAIN or not trees
        self._drafter = SampledDrafter(distributions, SamplingParams(), self._estimate)
        self._sampled: SampledDraft | None = None

    def start_answer(self, params: SamplingParams) -> None:
        """Draft for a target that is sampled with `params`."""
        self._drafter = SampledDrafter(self._distributions, params, self._estimate)

    def verify(
        self, draft: Round, logits: Logits, sampler: TokenSampler, position: int, ends: Container[int], max_tokens: int
    ) -> VerifyResult:
        """Decide which draft tokens are accepted by comparing the target's and the drafter's distributions."""
        if self._sampled is None or len(draft.tree) == 1:
            return super().verify(draft, logits, sampler, position, ends, max_tokens)
        assert isinstance(sampler, Sampler)  # noqa: S101  recorded answers have other drafters
        verifier = verify_block if self._chain else verify_recursive
        return verifier(self._sampled, logits, sampler, position, ends, max_tokens)

    def _sync_drafters(self) -> None:
        if self._synced:
            self._drafter.append(self._token_ids[self._synced :])
        else:
            self._drafter.reset(self._token_ids)
        self._synced = len(self._token_ids)

    def _grow_draft(
        self, anchor: int, prices: TokenPrices, max_depth: int, constraint: TokenConstraint | None
    ) -> Round:
        if constraint is not None:  # only the tokens that it forces are drafted
            self._sampled = None
            return super()._grow_draft(anchor, prices, max_depth, constraint)
        before = self._distributions.passes
        # The draft is verified as it was sampled: pruning by the sampled tokens would change their distribution.
        self._sampled = sampled = self._drafter.sample(anchor, prices, max_depth, chain=self._chain)
        expected = float(sampled.tree.path_prob.sum())
        price = sum(prices.positions[: len(sampled.tree) - 1])
        passes = self._distributions.passes - before
        seconds = self._distributions.take_seconds_spent()
        return Round(sampled.tree, None, None, expected, expected - 1 - price, passes, seconds)

    def _learn(self, draft: Round, result: VerifyResult, logits: Logits) -> None:
        del draft
        if self._sampled is not None:
            self._drafter.learn(self._sampled, result, logits)
            self._sampled = None


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
    # Draft tokens beyond the limit, or beyond an end of the sequence, count as never sampled.
    tokens: list[int] = list(tree.token_ids[1:max_tokens])
    tokens = tokens[: next((count for count, token in enumerate(tokens, 1) if token in ends), None)]
    ended = bool(tokens) and tokens[-1] in ends

    targets: list[Distribution] = []
    with sampler.rollback():
        for node in range(len(tokens) + (not ended)):
            targets.append(Distribution.of(sampler, logits[node]))
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
        rest, proposal = Distribution.of(sampler, logits[node]), draft.distributions[node]
        children = [token for token, parent in zip(tree.token_ids, tree.parent_nodes, strict=True) if parent == node]
        for token, uniform in zip(children, uniforms_at(seed, at, len(children), Purpose.ACCEPT), strict=True):
            if uniform < acceptance_probability(rest, proposal, token):
                return token
            rest, proposal = rest.residual(proposal), proposal.without(token)
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
