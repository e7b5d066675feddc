"""Samples draft tokens from distributions, a draft model's or others, for verification that compares distributions.

A draft model's are those after the target's temperature, filters and penalties, on each draft token's own path: the
closer they are to the target's, the more draft tokens are accepted (see `sampled_speculator`). The number of children
of a node is decided before they are sampled, which keeps verification exact; and as in any draft, only while another
token position, or another pass of the draft model, pays. Where none does, one token is drafted occasionally all the
same, after waits that double, because texts change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...sampling.distribution import Distribution, Purpose, uniforms_at
from ...sampling.logit_stage import Logits
from ...sampling.sampler import Sampler, SamplingParams
from ..growth import TokenPrices
from ..learned_rates import Backoff
from ..tree import Source, Tree
from ..verification import VerifyResult
from .draft_model import DraftModel
from .interface import Path

_BINS: Final = 10
_RANKS: Final = 2
"""Number of rank classes: the first child of a node, and all others."""
_PRIOR_WEIGHT: Final = 12.0
_MIN_STEP: Final = 1 / 400
_MAX_CHILDREN: Final = 4
_FIRST_WAIT: Final = 16
_MAX_WAIT: Final = 1024


class SampledDraft(NamedTuple):
    """A tree whose draft tokens were sampled, and the distributions they were sampled from.

    Whether a node gets children, and how many, may depend on anything known before they are sampled: the path, the
    distributions, the cost of a pass. Once sampled, none may be dropped because of the token it turned out to be;
    otherwise it would no longer follow its distribution.
    """

    tree: Tree
    """Children of a node with a distribution are in the order they were sampled in; others were not sampled."""
    distributions: Mapping[int, Distribution]
    """For every node whose children were sampled, the distribution of the first child; see `sample_children`."""


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


class AcceptanceEstimate:
    """Learns how often sampled draft tokens are accepted, by the largest probability of their distribution."""

    def __init__(self) -> None:
        confidence = [(index + 0.5) / _BINS for index in range(_BINS)]
        # Even flat distributions overlap; a second child meets what the first one has left of the target's
        # distribution.
        self._rates = [[0.3 + 0.65 * each for each in confidence], [0.15 + 0.3 * each for each in confidence]]
        self._seen = [[_PRIOR_WEIGHT] * _BINS for _ in range(_RANKS)]
        self.mean = 0.6
        """Acceptance rate of first children, whatever their distribution."""

    def rate(self, distribution: Distribution, rank: int) -> float:
        """Probability that child number `rank`, sampled from `distribution`, is accepted if those before it are not."""
        return self._rates[min(rank, _RANKS - 1)][_bin(distribution)]

    def learn(self, distribution: Distribution, rank: int, accepted: bool) -> None:
        """Learn whether such a child was accepted."""
        kind, index = min(rank, _RANKS - 1), _bin(distribution)
        self._seen[kind][index] += 1
        step = max(1 / self._seen[kind][index], _MIN_STEP)
        self._rates[kind][index] += (accepted - self._rates[kind][index]) * step
        if rank == 0:
            self.mean += (accepted - self.mean) * 0.02


class DistributionSource(Protocol):
    """Where draft tokens are sampled from: distributions of the next token after one sequence and a path behind it.

    Verification is exact for any distribution that was computed before its tokens were sampled.
    """

    source: Source
    """What its draft tokens are counted under."""

    @property
    def passes(self) -> int:
        """Number of passes of a model that it has run so far."""
        return 0

    def start(self, params: SamplingParams) -> None:
        """Begin an answer for which the target is sampled with `params`."""

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""

    def distribution(self, path: Path) -> Distribution | None:
        """The distribution after the sequence and `path`, in target ids; None if it is not known."""

    def seconds(self, path: Path) -> float:
        """Expected seconds of `distribution(path)` now."""
        del path
        return 0.0

    def take_seconds_spent(self) -> float:
        """Seconds of passes since the last call of this method."""
        return 0.0

    def learn(self, path: Path, logits: Logits) -> None:
        """Learn the target's logits float32 `[V]` after the sequence and `path`, which was accepted."""
        del path, logits


class ModelDistributions(DistributionSource):
    """The distributions of a draft model, after the target's temperature, filters and penalties.

    Args:
        model: the draft model.
    """

    def __init__(self, model: DraftModel) -> None:
        self.source = model.source
        self._model: Final = model
        self.start(SamplingParams())

    @property
    def passes(self) -> int:
        """Number of passes of the draft model so far."""
        return self._model.passes

    def start(self, params: SamplingParams) -> None:
        """Begin an answer for which the target is sampled with `params`."""
        biases = [(place, bias) for token, bias in params.logit_bias for place in self._head_places((token,)).tolist()]
        self._params = replace(params, logit_bias=tuple(biases))
        self._sampler = Sampler(self._params, self._model.head)

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self._model.reset(token_ids)
        self._sampler = Sampler(self._params, self._model.head)
        self._sampler.observe_prompt(self._head_places(token_ids))

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        for token in token_ids:
            self._model.append(token)
        self._sampler.observe(self._head_places(token_ids))

    def distribution(self, path: Path) -> Distribution | None:
        """The draft model's distribution; None if it cannot be run."""
        logits = self._model.logits(path)
        if logits is None:
            return None
        with self._sampler.rollback():
            self._sampler.observe(self._head_places(path))
            distribution = Distribution.of(self._sampler, logits)
        if self._model.target_ids is not None:
            ids = self._model.target_ids[distribution.ids].astype(np.intp)
            order = np.argsort(ids)
            distribution = Distribution(ids[order], distribution.probs[order])
        return distribution

    def seconds(self, path: Path) -> float:
        """Expected seconds of the draft model."""
        return self._model.seconds(path)

    def take_seconds_spent(self) -> float:
        """Seconds that the draft model has run since the last call of this method."""
        return self._model.take_seconds_spent()

    def _head_places(self, tokens: Sequence[int]) -> npt.NDArray[np.intp]:
        """Indices of target tokens in the LM head; tokens that it does not have are left out."""
        ids, target_ids = np.asarray(tokens, np.intp), self._model.target_ids
        if target_ids is None:
            return ids[ids < self._model.head]
        order = np.argsort(target_ids)
        at = np.searchsorted(target_ids, ids, sorter=order)
        places: npt.NDArray[np.intp] = order[np.minimum(at, order.size - 1)]
        known: npt.NDArray[np.intp] = places[target_ids[places] == ids]
        return known


class SampledDrafter:
    """Samples drafts for one sequence.

    Args:
        distributions: what draft tokens are sampled from.
        params: sampling parameters of the target. A greedy target accepts only draft tokens that match its choice.
        estimate: acceptance estimate to share between sequences; None for a new one.
    """

    def __init__(
        self, distributions: DistributionSource, params: SamplingParams, estimate: AcceptanceEstimate | None = None
    ) -> None:
        self.distributions: Final = distributions
        self.estimate: Final = AcceptanceEstimate() if estimate is None else estimate
        distributions.start(params)
        self._params: Final = params
        self._length = 0
        """Number of tokens of the whole text."""
        self._backoff = Backoff(_FIRST_WAIT, _MAX_WAIT)
        self._backoff.start()

    def reset(self, token_ids: Sequence[int]) -> None:
        """Replace the sequence."""
        self.distributions.reset(token_ids)
        self._length = self._params.first_position + len(token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the sequence."""
        self.distributions.append(token_ids)
        self._length += len(token_ids)

    def sample(self, anchor: int, prices: TokenPrices, max_depth: int, *, chain: bool) -> SampledDraft:
        """Sample a draft behind the sequence; the anchor alone if nothing pays.

        Args:
            anchor: last token of the sequence.
            prices: price of token positions and of time.
            max_depth: maximum number of tokens of a path.
            chain: whether to sample one child per node, for `verify_block`; otherwise a tree, for `verify_recursive`.
        """
        tokens, parents, path_probs = [anchor], [-1], [1.0]
        paths: list[Path] = [()]
        distributions: dict[int, Distribution] = {}
        heap = [(-1.0, 0)] if max_depth else []
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
            price = prices.positions[len(tokens) - 1]
            cost = price + prices.second * self.distributions.seconds(paths[node])
            pays = path_probs[node] * self.estimate.mean > cost
            if not pays and not (trying and node == 0):
                continue
            distribution = self.distributions.distribution(paths[node])
            if distribution is None:
                continue
            max_children = 1 if chain else _MAX_CHILDREN
            chances = self._children(distribution, path_probs[node], prices.positions[len(tokens) - 1 :], max_children)
            if trying and not chances:
                chances = [self.estimate.rate(distribution, 0)]
            sampled = sample_children(distribution, min(len(chances), left), self._params.seed, self._length, node)
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
        sources = [Source.ANCHOR, *[self.distributions.source] * (len(tokens) - 1)]
        return SampledDraft(Tree.of(tokens, parents, path_probs, sources), distributions)

    def learn(self, draft: SampledDraft, result: VerifyResult, logits: Logits) -> None:
        """Learn which draft tokens were accepted; children after the accepted one were not tried.

        Args:
            draft: the draft.
            result: outcome of its verification.
            logits: float32 `[n, V]`, the target's at each node.
        """
        tree, path = draft.tree, result.accepted_path
        tokens = tuple(tree.token_ids[node] for node in path[1:])
        for depth, (node, accepted) in enumerate(zip(path, [*path[1:], None], strict=True)):
            self.distributions.learn(tokens[:depth], logits[node])
            if node not in draft.distributions:
                continue
            for rank, child in enumerate(np.flatnonzero(tree.parents == node).tolist()):
                self.estimate.learn(draft.distributions[node], rank, child == accepted)
                if child == accepted:
                    break

    def _children(
        self, distribution: Distribution, path_prob: float, prices: Sequence[float], max_children: int
    ) -> list[float]:
        """Path probabilities of as many children of a node as pay for their positions, before they are sampled."""
        chances: list[float] = []
        rejected = 1.0
        for rank, price in zip(range(max_children), prices, strict=False):
            rate = self.estimate.rate(distribution, rank)
            if path_prob * rejected * rate <= price:
                break
            chances.append(path_prob * rejected * rate)
            rejected *= 1 - rate
        return chances


def _bin(distribution: Distribution) -> int:
    return min(int(distribution.probs.max() * _BINS), _BINS - 1)
