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
from heapq import heappop, heappush
from typing import Final

import numpy as np

from ..sampling.distribution import Distribution, Purpose, uniforms_at
from ..sampling.logit_stage import Logits
from ..sampling.sampler import Sampler, SamplingParams, uniform_at
from ..sampling.token_mask import TokenConstraint
from .choice import DraftSampling
from .drafters.interface import Path
from .drafters.sampled import DistributionSource, SampledDraft, sample_children
from .growth import TokenPrices
from .learned_rates import Backoff, Mixer, Prediction
from .pass_cost import PassCost
from .rounds import Round
from .speculator import Speculator
from .tree import Source, Tree
from .verification import VerifyResult, walk_tree

_BINS: Final = 10
_CONFIDENCES: Final = [(index + 0.5) / _BINS for index in range(_BINS)]
_PRIOR: Final = (*(0.3 + 0.65 * each for each in _CONFIDENCES), *(0.15 + 0.3 * each for each in _CONFIDENCES))
"""Prior acceptance rates by the largest probability of a distribution, of first children and of all others. Even flat
distributions overlap; a second child meets what the first one has left of the target's distribution."""
_MAX_CHILDREN: Final = 4
_FIRST_WAIT: Final = 16
_MAX_WAIT: Final = 1024


class SampledSpeculator(Speculator):
    """A `Speculator` whose only drafter samples from distributions.

    The number of children of a node is decided before they are sampled, which keeps verification exact; and as in any
    draft, only while another token position, or another pass of the draft model, pays. Where none does, one token is
    drafted occasionally all the same, after waits that double, because texts change.

    Args:
        distributions: what draft tokens are sampled from.
        cost: cost of target passes.
        draft_sampling: anything but OFF.
        trees: whether the target can verify trees.
        mixer: what is known about the acceptance of such draft tokens; None for nothing yet.
    """

    def __init__(
        self,
        distributions: DistributionSource,
        cost: PassCost,
        draft_sampling: DraftSampling,
        *,
        trees: bool,
        mixer: Mixer | None = None,
    ) -> None:
        super().__init__((), cost, trees=trees, mixer=mixer or Mixer({distributions.source: _PRIOR}))
        self._distributions: Final = distributions
        self._chain: Final = draft_sampling is DraftSampling.CHAIN or not trees
        self._sampled: SampledDraft | None = None
        self.mean_rate = 0.6
        """Acceptance rate of first children, whatever their distribution."""
        self.start_answer(SamplingParams())

    def start_answer(self, params: SamplingParams) -> None:
        """Draft for a target that is sampled with `params`; a greedy one accepts only what matches its choice."""
        self._distributions.start(params)
        self._params = params
        self._backoff = Backoff(_FIRST_WAIT, _MAX_WAIT)
        self._backoff.start()

    def verify(
        self, draft: Round, logits: Logits, sampler: Sampler, position: int, ends: Container[int], max_tokens: int
    ) -> VerifyResult:
        """Decide which draft tokens are accepted by comparing the target's and the drafter's distributions."""
        if self._sampled is None or len(draft.tree) == 1:
            return super().verify(draft, logits, sampler, position, ends, max_tokens)
        verifier = verify_block if self._chain else verify_recursive
        return verifier(self._sampled, logits, sampler, position, ends, max_tokens)

    def _sync_drafters(self) -> None:
        if self._synced:
            self._distributions.append(self._token_ids[self._synced :])
        else:
            self._distributions.reset(self._token_ids)
        self._synced = len(self._token_ids)

    def _grow_draft(
        self, anchor: int, prices: TokenPrices, max_depth: int, constraint: TokenConstraint | None
    ) -> Round:
        if constraint is not None:  # only the tokens that it forces are drafted
            self._sampled = None
            return super()._grow_draft(anchor, prices, max_depth, constraint)
        before = self._distributions.passes
        # The draft is verified as it was sampled: pruning by the sampled tokens would change their distribution.
        tree = self.sample(anchor, prices, max_depth).tree
        expected = float(tree.path_prob.sum())
        price = sum(prices.positions[: len(tree) - 1])
        passes = self._distributions.passes - before
        seconds = self._distributions.take_seconds_spent()
        return Round(tree, None, None, expected, expected - 1 - price, passes, seconds)

    def sample(self, anchor: int, prices: TokenPrices, max_depth: int) -> SampledDraft:
        """Sample a draft behind the sequence; the anchor alone if nothing pays. Arguments as for `TreeGrowth.grow`."""
        tokens, parents, path_probs = [anchor], [-1], [1.0]
        paths: list[Path] = [()]
        distributions: dict[int, Distribution] = {}
        heap = [(-1.0, 0)] if max_depth else []
        position = self._params.first_position + len(self._token_ids)
        trying = self._backoff.left == 0
        if trying:
            self._backoff.start()
        else:
            self._backoff.left -= 1
        while heap:
            node = heappop(heap)[1]
            left = len(prices.positions) - len(tokens)
            if left < 1:
                break
            cost = prices.positions[len(tokens) - 1] + prices.second * self._distributions.seconds(paths[node])
            pays = path_probs[node] * self.mean_rate > cost
            if not pays and not (trying and node == 0):
                continue
            distribution = self._distributions.distribution(paths[node])
            if distribution is None:
                continue
            chances = self._children(distribution, path_probs[node], prices.positions[len(tokens) - 1 :])
            if trying and not chances:
                chances = [self.prediction(distribution, 0).probability]
            sampled = sample_children(distribution, min(len(chances), left), self._params.seed, position, node)
            if sampled:
                distributions[node] = distribution
            for token, chance in zip(sampled, chances, strict=False):
                if len(paths[node]) + 1 < max_depth:
                    heappush(heap, (-chance, len(tokens)))
                tokens.append(token)
                parents.append(node)
                path_probs.append(chance)
                paths.append((*paths[node], token))
        if len(tokens) > 1 and not trying:
            self._backoff.reset()
            self._backoff.start()
        sources = [Source.ANCHOR, *[self._distributions.source] * (len(tokens) - 1)]
        self._sampled = SampledDraft(Tree.of(tokens, parents, path_probs, sources), distributions)
        return self._sampled

    def prediction(self, distribution: Distribution, rank: int) -> Prediction:
        """How probable it is that child number `rank` of a distribution is accepted if those before it are not.

        That is learned by the largest probability of the distribution.
        """
        confidence = min(int(distribution.probs.max() * _BINS), _BINS - 1)
        return self.mixer.predict(((self._distributions.source, confidence + (_BINS if rank else 0)),))

    def _children(self, distribution: Distribution, path_prob: float, prices: Sequence[float]) -> list[float]:
        """Path probabilities of as many children of a node as pay for their positions, before they are sampled."""
        chances: list[float] = []
        rejected = 1.0
        for rank, price in zip(range(1 if self._chain else _MAX_CHILDREN), prices, strict=False):
            rate = self.prediction(distribution, rank).probability
            if path_prob * rejected * rate <= price:
                break
            chances.append(path_prob * rejected * rate)
            rejected *= 1 - rate
        return chances

    def _learn(self, draft: Round, result: VerifyResult, logits: Logits) -> None:
        """Learn which draft tokens were accepted; children after the accepted one were not tried."""
        del draft
        if self._sampled is None:
            return
        (tree, distributions), path = self._sampled, result.accepted_path
        self._sampled = None
        tokens = tuple(tree.token_ids[node] for node in path[1:])
        for depth, (node, accepted) in enumerate(zip(path, [*path[1:], None], strict=True)):
            self._distributions.learn(tokens[:depth], logits[node])
            if node not in distributions:
                continue
            for rank, child in enumerate(np.flatnonzero(tree.parents == node).tolist()):
                self.mixer.learn(self.prediction(distributions[node], rank), child == accepted)
                if rank == 0:
                    self.mean_rate += ((child == accepted) - self.mean_rate) * 0.02
                if child == accepted:
                    break


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
