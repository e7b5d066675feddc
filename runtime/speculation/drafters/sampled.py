"""Guesses drawn at random from a draft model's own laws, for verification that compares laws (see `verify_sampled`).

The draft's laws are those after the target's temperature, filters and penalties, on each guess's own path: the nearer
they are to the target's, the more is taken. How many children a node gets is decided from what is known before they are
drawn, which keeps verification exact; and as in any draft, only for as long as another row, or another pass of the
draft model, pays. Where none does, one guess is drawn once in a while all the same, with doubling waits: texts change.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final

import numpy as np
import numpy.typing as npt

from ...distribution import Distribution
from ...sampling import Sampler, SamplingParams
from ..growth import Prices
from ..sampled_verification import SampledDraft, draw_children
from ..tree import Source, Tree
from ..verification import VerifyResult
from .draft_model import DraftModel, Path

_BINS: Final = 10
_RANKS: Final = 2
"""The first child of a node, and the others."""
_PRIOR_WEIGHT: Final = 12.0
_SLOWEST: Final = 1 / 400
_MOST_CHILDREN: Final = 4
_FIRST_WAIT: Final = 16
_LONGEST_WAIT: Final = 1024


class DrawnWorth:
    """How often drawn guesses are taken, by how sure the law was that they were drawn from."""

    def __init__(self) -> None:
        sure = [(index + 0.5) / _BINS for index in range(_BINS)]
        # Even where neither law is sure of anything they overlap; a second guess meets what the first has left over.
        self._shares = [[0.3 + 0.65 * each for each in sure], [0.15 + 0.3 * each for each in sure]]
        self._seen = [[_PRIOR_WEIGHT] * _BINS for _ in range(_RANKS)]
        self._mean = 0.6

    @property
    def mean(self) -> float:
        """Share of first guesses that are taken, whatever their law."""
        return self._mean

    def share(self, law: Distribution, rank: int) -> float:
        """Probability that a guess drawn as number `rank` from a law, those before it not taken, is taken."""
        return self._shares[min(rank, _RANKS - 1)][_bin(law)]

    def learn(self, law: Distribution, rank: int, taken: bool) -> None:
        """Take in what became of such a guess."""
        kind, index = min(rank, _RANKS - 1), _bin(law)
        self._seen[kind][index] += 1
        rate = max(1 / self._seen[kind][index], _SLOWEST)
        self._shares[kind][index] += (taken - self._shares[kind][index]) * rate
        if rank == 0:
            self._mean += (taken - self._mean) * 0.02


class SampledDrafter:
    """Draws drafts for one text.

    Args:
        model: the draft model.
        params: the target's. A greedy target takes no drawn guesses that it would not take anyway.
        worth: kept from one text to the next, if it is to be learned from all.
    """

    def __init__(self, model: DraftModel, params: SamplingParams, worth: DrawnWorth | None = None) -> None:
        self.model: Final = model
        self.worth: Final = DrawnWorth() if worth is None else worth
        self._params = params
        self._sampler = Sampler(params, model.head)
        self._length = 0
        self._idle = 0
        self._wait = _FIRST_WAIT

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text."""
        self.model.follow(tokens)
        self._sampler = Sampler(self._params, self.model.head)
        self._sampler.observe(self._in_head(tokens))
        self._length = len(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Let the text grow."""
        for token in tokens:
            self.model.append(token)
        self._sampler.observe(self._in_head(tokens))
        self._length += len(tokens)

    def law(self, path: Path) -> Distribution | None:
        """The draft's law, in the target's ids, after the text and `path`; None if the model cannot be asked."""
        logits = self.model.logits(path)
        if logits is None:
            return None
        with self._sampler.rollback():
            self._sampler.observe(self._in_head(path))
            law = self._sampler.distribution(logits)
        if self.model.target_ids is None:
            return law
        ids = self.model.target_ids[law.ids].astype(np.intp)
        order = np.argsort(ids)
        return Distribution(ids[order], law.probs[order])

    def draw(self, anchor: int, prices: Prices, deepest: int, *, chain: bool) -> SampledDraft:
        """A draft behind the text, of the anchor alone if nothing pays.

        Args:
            anchor: the text's last token.
            prices: what rows and seconds cost.
            deepest: most tokens of a path.
            chain: whether to draw one child at a time, for `verify_block`; else a tree, for `verify_recursive`.
        """
        tokens, parents, reached = [anchor], [-1], [1.0]
        paths: list[Path] = [()]
        laws: dict[int, Distribution] = {}
        waiting = [(-1.0, 0)] if deepest else []
        trying = self._due()
        while waiting:
            node = heappop(waiting)[1]
            left = len(prices.rows) - len(tokens)
            if left < 1:
                break
            price = prices.rows[len(tokens) - 1]
            pays = reached[node] * self.worth.mean > price + prices.second * self.model.seconds(paths[node])
            if not pays and not (trying and node == 0):
                continue
            law = self.law(paths[node])
            if law is None:
                continue
            chances = self._chances(law, reached[node], prices.rows[len(tokens) - 1 :], 1 if chain else _MOST_CHILDREN)
            if trying and not chances:
                chances = [self.worth.share(law, 0)]
            drawn = draw_children(law, min(len(chances), left), self._params.seed, self._length, node)
            if drawn:
                laws[node] = law
            for token, chance in zip(drawn, chances, strict=False):
                if len(paths[node]) + 1 < deepest:
                    heappush(waiting, (-chance, len(tokens)))
                tokens.append(token)
                parents.append(node)
                reached.append(chance)
                paths.append((*paths[node], token))
        if len(tokens) > 1 and not trying:
            self._idle, self._wait = 0, _FIRST_WAIT
        sources = [Source.ANCHOR, *[Source.MODEL] * (len(tokens) - 1)]
        return SampledDraft(Tree.of(tokens, parents, reached, sources), laws)

    def learn(self, draft: SampledDraft, verdict: VerifyResult) -> None:
        """Take in which guesses were taken; those after the first that was taken at a node were not tried."""
        tree, path = draft.tree, verdict.path
        for node, taken in zip(path, [*path[1:], None], strict=True):
            if node not in draft.laws:
                continue
            for rank, child in enumerate(np.flatnonzero(tree.parents == node).tolist()):
                self.worth.learn(draft.laws[node], rank, child == taken)
                if child == taken:
                    break

    def _due(self) -> bool:
        """Whether a guess is to be drawn against expectation; to be asked once a round."""
        self._idle += 1
        if self._idle <= self._wait:
            return False
        self._idle, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
        return True

    def _chances(self, law: Distribution, reached: float, prices: Sequence[float], most: int) -> list[float]:
        """Path probabilities of a node's children, as many as pay for their rows; known before they are drawn."""
        chances: list[float] = []
        refused = 1.0
        for rank, price in zip(range(most), prices, strict=False):
            share = self.worth.share(law, rank)
            if reached * refused * share <= price:
                break
            chances.append(reached * refused * share)
            refused *= 1 - share
        return chances

    def _in_head(self, tokens: Sequence[int]) -> npt.NDArray[np.intp]:
        """Places of tokens in the head; those that it does not have are left out."""
        ids = np.asarray(tokens, np.intp)
        if self.model.target_ids is None:
            return ids[ids < self.model.head]
        order = np.argsort(self.model.target_ids)
        at = np.searchsorted(self.model.target_ids, ids, sorter=order)
        places: npt.NDArray[np.intp] = order[np.minimum(at, order.size - 1)]
        known: npt.NDArray[np.intp] = places[self.model.target_ids[places] == ids]
        return known


def _bin(law: Distribution) -> int:
    return min(int(law.probs.max() * _BINS), _BINS - 1)
