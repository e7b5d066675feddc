"""Speculation with guesses drawn at random from a draft model: the target's law, by another road.

Where the target is sampled at a high temperature, a guess drawn from the draft's own law, and judged by comparing the
two laws, is taken more often than the draft's likeliest token. The price is the seed's promise: the text for a seed
then depends on how much was drafted, hence on this machine's timing. So it is never the default.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum
from typing import Final

from ..sampling import Logits, Sampler, SamplingParams
from .drafters.draft_model import DraftModel
from .drafters.sampled import DrawnWorth, SampledDrafter
from .growth import Grower, Prices
from .pass_cost import PassCost
from .sampled_verification import SampledDraft, verify_block, verify_recursive
from .speculator import Draft, Speculator
from .verification import TokenSampler, VerifyResult


class DraftSampling(Enum):
    """How a draft model's guesses are made."""

    OFF = "off"
    """The likeliest tokens; a seed has one text."""
    CHAIN = "chain"
    """One drawn guess after another, judged as a block (Sun et al. 2025)."""
    TREE = "tree"
    """Several drawn guesses at a place, judged one by one without replacement (Jeon et al. 2024)."""


class SampledSpeculator(Speculator):
    """A `Speculator` whose only drafter draws. One answer at a time: `begin` says how it is sampled."""

    def __init__(self, model: DraftModel, cost: PassCost, drawing: DraftSampling, *, trees: bool) -> None:
        super().__init__(Grower(()), cost, trees=trees)
        self._model: Final = model
        self._worth: Final = DrawnWorth()
        self._chain: Final = drawing is DraftSampling.CHAIN or not trees
        self._drafter = SampledDrafter(model, SamplingParams(), self._worth)
        self._sampled: SampledDraft | None = None

    def begin(self, params: SamplingParams) -> None:
        """Draw for a target that is sampled like this."""
        self._drafter = SampledDrafter(self._model, params, self._worth)

    def verify(
        self, draft: Draft, logits: Logits, chooser: TokenSampler, position: int, ends: Container[int], most: int
    ) -> VerifyResult:
        """Judge the guesses by both laws."""
        if self._sampled is None or len(draft.tree) == 1:
            return super().verify(draft, logits, chooser, position, ends, most)
        if not isinstance(chooser, Sampler):
            raise TypeError("drawn guesses are judged by the target's law, which only a sampler has")
        judge = verify_block if self._chain else verify_recursive
        return judge(self._sampled, logits, chooser, position, ends, most)

    def _catch_up(self, text: Sequence[int], followed: int) -> None:
        if followed:
            self._drafter.append(text[followed:])
        else:
            self._drafter.follow(text)

    def _draft(self, anchor: int, prices: Prices, deepest: int) -> Draft:
        before = self._model.passes
        # Nothing may be pruned for what it turned out to be, so the draft is taken as it was drawn.
        self._sampled = sampled = self._drafter.draw(anchor, prices, deepest, chain=self._chain)
        expected = float(sampled.tree.path_prob.sum())
        price = sum(prices.rows[: len(sampled.tree) - 1])
        passes = self._model.passes - before
        return Draft(sampled.tree, None, expected, expected - 1 - price, self._model.spent(), passes=passes)

    def _learn(self, draft: Draft, verdict: VerifyResult, logits: Logits) -> None:
        del draft, logits
        if self._sampled is not None:
            self._drafter.learn(self._sampled, verdict)
            self._sampled = None
