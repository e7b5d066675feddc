"""Speculation with draft tokens sampled at random from a draft model.

Where the target is sampled at a high temperature, a token sampled from the draft model's own distribution, and accepted
by comparing the two distributions, is accepted more often than the draft model's most probable token. The disadvantage:
the text for a seed then depends on how much was drafted, hence on this machine's timing. So it is never the default.
"""

from __future__ import annotations

from collections.abc import Container
from enum import Enum
from typing import Final

from ..sampling.sampler import Logits, Sampler, SamplingParams
from ..sampling.token_mask import TokenConstraint
from .draft_ahead import Continuation, DraftAhead
from .drafters.draft_model import DraftModel
from .drafters.sampled import AcceptanceEstimate, SampledContinuation, SampledDrafter
from .growth import TokenPrices, expected_replay, replay_seconds
from .pass_cost import PassCost
from .rounds import Round
from .sampled_verification import SampledDraft, verify_block, verify_recursive
from .speculator import Speculator
from .verification import TokenSampler, VerifyResult


class DraftSampling(Enum):
    """How draft tokens are chosen from a draft model's distribution."""

    OFF = "off"
    """The most probable tokens; the text for a seed does not depend on drafting."""
    CHAIN = "chain"
    """A chain of sampled tokens, verified as a block (Sun et al. 2025)."""
    TREE = "tree"
    """Several sampled tokens at a node, verified one by one without replacement (Jeon et al. 2024)."""


class SampledSpeculator(Speculator):
    """A `Speculator` whose only drafter samples from a draft model.

    Args:
        model: the draft model.
        cost: cost of target passes.
        draft_sampling: CHAIN or TREE.
        trees: whether the target can verify trees.
        estimate: what is known about the acceptance of such draft tokens; None for nothing yet.
        ahead: as for `Speculator`.
    """

    def __init__(
        self,
        model: DraftModel,
        cost: PassCost,
        draft_sampling: DraftSampling,
        *,
        trees: bool,
        estimate: AcceptanceEstimate | None = None,
        ahead: DraftAhead | None = None,
    ) -> None:
        super().__init__((), cost, trees=trees, ahead=ahead)
        self._draft_model: Final = model
        self._estimate: Final = AcceptanceEstimate() if estimate is None else estimate
        self._chain: Final = draft_sampling is DraftSampling.CHAIN or not trees
        self._drafter = SampledDrafter(model, SamplingParams(), self._estimate)
        self._sampled: SampledDraft | None = None
        self._constrained = False
        """Whether the draft follows the constraint of an answer."""

    def start_answer(self, params: SamplingParams) -> None:
        """Draft for a target that is sampled with `params`."""
        self._drafter = SampledDrafter(self._draft_model, params, self._estimate)

    def verify(
        self, draft: Round, logits: Logits, sampler: TokenSampler, position: int, ends: Container[int], max_tokens: int
    ) -> VerifyResult:
        """Decide which draft tokens are accepted by comparing the target's and the draft model's distributions."""
        if self._sampled is None or len(draft.tree) == 1:
            return super().verify(draft, logits, sampler, position, ends, max_tokens)
        if not isinstance(sampler, Sampler):
            raise TypeError("sampled draft tokens are verified against the target's distribution: give a Sampler")
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
        before = self._draft_model.passes
        self._constrained = constraint is not None
        # The draft is verified as it was sampled: pruning by the sampled tokens would change their distribution.
        self._sampled = sampled = self._drafter.sample(
            anchor, prices, max_depth, chain=self._chain, constraint=constraint
        )
        expected = float(sampled.tree.path_prob.sum())
        drafted = len(sampled.tree) - 1
        price = sum(prices.positions[:drafted])
        if self._replay is not None and drafted:
            last = sampled.tree.path_probs[-1]
            again = expected_replay(drafted, last, expected - last, self._replay)
            price += self.rate * again * replay_seconds(self._curve, self._replay + drafted)
        passes = self._draft_model.passes - before
        seconds = self._draft_model.take_seconds_spent()
        return Round(sampled.tree, None, None, expected, expected - 1 - price, passes, seconds)

    def _continuation(self, draft: Round, ahead: DraftAhead) -> Continuation | None:
        del draft, ahead
        # A thread that runs ahead would ask about paths behind tokens that are being verified.
        if self._sampled is None or self._constrained:
            return None
        return SampledContinuation(self._sampled, self._drafter)

    def _learn(self, draft: Round, result: VerifyResult, logits: Logits) -> None:
        del draft, logits
        if self._sampled is not None:
            self._drafter.learn(self._sampled, result)
            self._sampled = None
