"""Distributions that draft tokens are sampled from, a draft model's or others, and the tokens sampled from them.

A draft model's are those after the target's temperature, filters and penalties, on each draft token's own path: the
closer they are to the target's, the more draft tokens are accepted (see `sampled_speculator`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...sampling.distribution import Distribution, Purpose, uniforms_at
from ...sampling.logit_stage import Logits
from ...sampling.sampler import Sampler, SamplingParams
from ..tree import Source, Tree
from .draft_model import DraftModel
from .interface import Path


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
