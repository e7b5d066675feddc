"""Runs rounds of speculation: propose a draft, verify it, learn from the outcome.

A `Speculator` combines drafter probabilities with the measured pass cost to size each draft, and records per-round
statistics. Drafting that costs more than it gains is disabled for a number of rounds that doubles every time.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from typing import Final

from ..graph.bound_graph import ALONE
from ..sampling.logit_stage import Logits
from ..sampling.sampler import Sampler
from ..sampling.token_mask import TokenConstraint
from .draft_ahead import NOTHING_AHEAD, DraftAhead
from .drafters.interface import Drafter, ModelDrafter
from .growth import TokenPrices, TreeGrowth, prune
from .learned_rates import DraftingBalance, Mixer
from .pass_cost import PassCost
from .rounds import Round
from .tree import Tree
from .verification import VerifyResult, verify_tree

MAX_DRAFT_WIDTH: Final = 16
"""Maximum width of a verification pass; bounds the logits held and the tree that is grown before pruning."""
_RATE_HORIZON: Final = 64
"""Number of rounds over which the decoding rate is averaged."""
_PRICE_REFRESH: Final = 16
"""Rounds between updates of the prices; the pass cost changes slowly."""
_INITIAL_HOST_S: Final = 1e-4
"""Assumed seconds of a round's lookups before they are measured: the first rounds are slow and not typical."""
_NEGLIGIBLE: Final = 0.01
"""Lookup cost in tokens per round up to which neither it nor what a draft gains is counted."""
_CHEAP: Final = 0.08
"""Lookup cost in tokens per round below which a disabled speculator keeps its suffix automaton up to date, which takes
a tenth of a lookup."""
_WAKING_MATCH: Final = 4
"""Length of a repetition at the end of the sequence that ends the backoff of such a speculator."""
_LEAST_GAIN: Final = 0.05
"""Tokens that a pass of the draft model must be expected to gain for it to run ahead: otherwise it would take power for
nothing."""
_DOUBTFUL_WAIT: Final = 64
"""Longest wait in rounds for which drafting is disabled while the pass cost is doubtful."""
_PLAIN_OBSERVED_EVERY: Final = 8
"""One of this many plain passes refines the pass cost: there are many, and the bookkeeping takes time too."""


class Speculator:
    """Proposes drafts, verifies them and learns from the outcome, over one sequence at a time.

    Where passes are shared, a draft token takes its share of a pass that other texts wait for too. So passes are priced
    behind the tokens that the others had in the last one, and time by what all texts produce in it; they are assumed to
    produce as much as this one does.

    Args:
        drafters: free drafters, the cheapest and most reliable first.
        cost: cost of target passes; refined by every round.
        model: draft model; None for none.
        trees: whether the target can verify trees; otherwise drafts are chains.
        max_width: maximum width of a verification pass, in token positions; less if passes are never as wide.
        mixer: what is known about the drafters; None for nothing yet.
        ahead: runs the draft model while the target verifies; None if they take turns.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        cost: PassCost,
        *,
        model: ModelDrafter | None = None,
        trees: bool = True,
        max_width: int = MAX_DRAFT_WIDTH,
        mixer: Mixer | None = None,
        ahead: DraftAhead | None = None,
    ) -> None:
        self.drafters: Final = tuple(drafters)
        self.model: Final = model
        self.cost: Final = cost
        self._all_drafters: Final[Sequence[Drafter]] = (*self.drafters, *(() if model is None else (model,)))
        self.mixer: Final = Mixer({each.source: each.prior for each in self._all_drafters}) if mixer is None else mixer
        self.balance: Final = DraftingBalance()
        self.logits_needed: Final = max((drafter.logits_needed for drafter in self.drafters), default=0)
        """Number of best logits of each position that the drafters learn from."""
        self._trees = trees
        self._max_width = min(max_width, cost.max_width)
        self._ahead: Final = ahead
        self._settled = NOTHING_AHEAD
        """What was run ahead since the last draft."""
        self.others = ALONE
        """What else ran in the last pass."""
        self._priced = ALONE
        """The others that the prices are for."""
        self._token_ids: list[int] = []
        self._synced = 0
        """Number of tokens of the sequence that the drafters have; 0 if they have another sequence."""
        self._rounds = 0
        self._emitted = self._seconds = 0.0
        self._curve: list[float] = []
        self._prices = TokenPrices((0.0,), 0.0)
        self._host_s = _INITIAL_HOST_S
        self._replay: int | None = None
        """`KVArena.replay` before the last draft."""
        self._cheap = False
        """Whether lookups are so cheap that a disabled speculator watches the sequence for repetitions."""
        self._lead = 0.0
        """Tokens gained over plain decoding since near ties were last recomputed."""

    @property
    def rate(self) -> float:
        """Decoding rate of all texts of a pass in tokens per second, at least the rate of plain decoding."""
        plain = 1 / self._curve[0]
        return (1 + self.others.texts) * (max(self._emitted / self._seconds, plain) if self._seconds else plain)

    @property
    def disabled(self) -> bool:
        """Whether the next round is a plain one, without a draft."""
        return self.balance.backoff.left > 0

    def skip_round(self, token: int, seconds: float, replayed: int = 0) -> None:
        """Add the token of a plain round, run while drafting is disabled.

        Args:
            token: the token.
            seconds: what its pass took.
            replayed: number of tokens that the pass ran once more.
        """
        backoff, doubtful = self.balance.backoff, self.cost.doubt is not None
        backoff.left -= 1
        if doubtful:
            # The costs that decided against drafting may be wrong, and only drafts show what wider passes cost.
            backoff.left = min(backoff.left, _DOUBTFUL_WAIT)
        if not self.others.texts and (doubtful or backoff.left % _PLAIN_OBSERVED_EVERY == 0):
            self.cost.observe(1 + replayed, len(self._token_ids) - 1 - replayed, seconds)
        self._token_ids.append(token)
        if self._cheap:
            self._settle_ahead()
            self._sync_drafters()
            if any(drafter.repetition() >= _WAKING_MATCH for drafter in self.drafters):
                self.balance.resume()

    def reset(self, token_ids: Sequence[int]) -> None:
        """Start a new sequence, the anchor included."""
        if self._ahead is not None:
            self._ahead.end()
        self._settled = NOTHING_AHEAD
        self.others = ALONE
        self._token_ids = list(token_ids)
        self._synced = 0
        self._rounds = 0
        self._lead = 0.0

    def propose(
        self,
        context: int,
        max_tokens: int,
        room: int,
        constraint: TokenConstraint | None = None,
        replay: int | None = None,
    ) -> Round:
        """Draft the tree that the next pass verifies.

        Args:
            context: number of tokens in the KV cache.
            max_tokens: number of tokens that may still be emitted; at least 1.
            room: number of free cache slots; at least 1.
            constraint: what the answer has to follow; None if any token may come. While drafting is disabled, only
                the tokens that it forces are drafted.
            replay: see `KVArena.replay`.

        Raises:
            EdgeError: the draft model failed.
        """
        started = time.perf_counter()
        anchor = self._token_ids[-1]
        self._replay = replay
        outdated = not self._curve or self.cost.seconds(1, context) > 2 * self._curve[0]
        if self._rounds % _PRICE_REFRESH == 0 or outdated or self._priced[:2] != self.others[:2]:
            self._update_prices(context)
        self._rounds += 1
        if min(max_tokens, room) < 2:
            return Round(Tree.anchor_only(anchor), host_s=time.perf_counter() - started)
        prices = TokenPrices(self._prices.positions[:room], self._prices.second)
        if self.disabled:
            draft = self._grow((), None, anchor, prices, max_tokens - 1, constraint, chain=True)
            draft.host_s = time.perf_counter() - started
            return draft
        self._settle_ahead()
        if self._synced < len(self._token_ids):
            self._sync_drafters()
        draft = self._grow_draft(anchor, prices, max_tokens - 1, constraint)
        draft.ahead, self._settled = self._settled, NOTHING_AHEAD
        draft.draft_s += draft.ahead.waited_s
        draft.host_s = time.perf_counter() - started - draft.draft_s
        growth, worthwhile = draft.growth, self.mixer.model_value.gain >= _LEAST_GAIN
        if self._ahead is not None and growth is not None and worthwhile:
            target_s = self._curve[min((replay or 0) + len(draft.tree), len(self._curve)) - 1]
            # Behind a path that leaves room for one token only, nothing is drafted.
            longest = min(max_tokens, room) - 2
            self._ahead.start(draft.tree, growth, len(self._token_ids), target_s, longest)
        return draft

    def verify(
        self, draft: Round, logits: Logits, sampler: Sampler, position: int, ends: Container[int], max_tokens: int
    ) -> VerifyResult:
        """Decide which draft tokens are accepted; arguments as for `verify_tree`."""
        return verify_tree(draft.tree, logits, sampler, position, ends, max_tokens)

    def observe(
        self,
        draft: Round,
        result: VerifyResult,
        logits: Logits,
        context: int,
        target_s: float,
        recompute_s: float = 0.0,
        verify_s: float = 0.0,
    ) -> None:
        """Learn from the outcome of a draft, and complete its statistics.

        Args:
            draft: the draft as proposed.
            result: outcome of its verification.
            logits: float32 `[n, V]`, the target's at each node of the draft.
            context: number of tokens in the KV cache before the pass.
            target_s: seconds of the pass over the draft.
            recompute_s: seconds of passes that recomputed near ties, one token at a time.
            verify_s: seconds of choosing tokens, and of keeping the cache slots of the accepted path.
        """
        started = time.perf_counter()
        if self._ahead is not None:
            self._ahead.stop()
        tree, replayed = draft.tree, self._replay or 0
        emitted = result.emitted(tree)
        width = replayed + len(tree)
        pass_s = self._curve[min(width, len(self._curve)) - 1]
        if not self.others.texts and (len(tree) > 1 or self._rounds % _PLAIN_OBSERVED_EVERY == 1):
            self.cost.observe(width, context - replayed, target_s)
        self._learn(draft, result, logits)
        if self.model is not None and draft.draft_passes:
            accepted = sum(tree.sources[node] == self.model.source for node in result.accepted_path)
            narrower = self._curve[min(width - tree.sources.count(self.model.source), len(self._curve)) - 1]
            self.model.settle(accepted - (draft.draft_s + pass_s - narrower) / self._curve[0])
        self._token_ids += emitted
        decay = 1 - 1 / _RATE_HORIZON
        self._emitted = self._emitted * decay + len(emitted)
        self._seconds = self._seconds * decay + pass_s + draft.draft_s + draft.host_s
        host_s = draft.host_s + time.perf_counter() - started
        if self.disabled:
            self.balance.backoff.left -= 1
        elif draft.growth is not None:
            # One interrupted round says nothing about the next, so time beyond twice the average is not counted.
            self._host_s += 0.1 * (min(host_s, 2 * self._host_s) - self._host_s)
            price = self._host_s * self.rate
            gained = draft.advantage - price if price > _NEGLIGIBLE else 0.0
            # Draft model time is not counted: whether to run the model is decided at every node. Recomputing near ties
            # costs tokens beyond what draft tokens had gained until then.
            self._lead += len(emitted) - pass_s / self._curve[0]
            lost = 0.0
            if recompute_s:
                lost, self._lead = max(recompute_s / self._curve[0] - self._lead, 0.0), 0.0
            self._cheap = price < _CHEAP and not lost
            self.balance.observe(gained - lost, cheap=self._cheap)
        draft.growth = None
        draft.accepted_path = result.accepted_path
        draft.target_s, draft.host_s = target_s + recompute_s, host_s + verify_s
        if recompute_s:
            draft.note = "near tie: recomputed one token at a time"

    def _settle_ahead(self) -> None:
        """Wait until the draft model may be used."""
        if self._ahead is not None:
            self._settled |= self._ahead.settle(self._token_ids)

    def _sync_drafters(self) -> None:
        """Bring the drafters up to date with the sequence."""
        for drafter in self._all_drafters:
            if self._synced:
                for token in self._token_ids[self._synced :]:
                    drafter.append(token)
            else:
                drafter.reset(self._token_ids)
        self._synced = len(self._token_ids)

    def _grow_draft(
        self, anchor: int, prices: TokenPrices, max_depth: int, constraint: TokenConstraint | None
    ) -> Round:
        """Draft with all drafters, on paths of at most `max_depth` tokens."""
        draft = self._grow(self.drafters, self.model, anchor, prices, max_depth, constraint, chain=not self._trees)
        if self.model is not None:
            draft.draft_s = self.model.take_seconds_spent()
            value = self.mixer.model_value
            if not draft.draft_passes and value.cost < float("inf"):
                draft.note = f"draft model not run: {value.gain:.2f} tokens expected for the time of {value.cost:.2f}"
        return draft

    def _grow(
        self,
        drafters: Sequence[Drafter],
        model: ModelDrafter | None,
        anchor: int,
        prices: TokenPrices,
        max_depth: int,
        constraint: TokenConstraint | None,
        *,
        chain: bool,
    ) -> Round:
        """Grow a tree and prune it to the candidates that pay; without drafters it has what the constraint forces."""
        growth = TreeGrowth(drafters, model, self.mixer, constraint)
        tree = growth.grow(anchor, prices, max_depth, chain=chain)
        pruned, expected, advantage = prune(tree, self._curve, self.rate, self._max_width, self._replay)
        return Round(pruned, growth, tree, expected, advantage, growth.model_passes)

    def _learn(self, draft: Round, result: VerifyResult, logits: Logits) -> None:
        """Update the mixer and the drafters along the accepted path."""
        growth, path = draft.growth, result.accepted_path
        if growth is None:
            return
        tokens = draft.tree.token_ids
        # The candidates are kept by node of the grown tree, so the accepted path is looked up there.
        node: int | None = 0
        for token in result.emitted(draft.tree):
            if node is None:
                raise ValueError("the accepted path is not part of the draft")
            for candidate, prediction in growth.candidates.get(node, ()):
                self.mixer.learn(prediction, candidate == token)
            node = growth.tree.child(node, token)
        for drafter in self.drafters:
            if drafter.logits_needed:
                for place in path:
                    drafter.learn(tokens[place], logits[place])
            if drafter.reads_rejected:
                rejected = draft.tree.first_branch(path[-1])
                drafter.learn_rejected([int(logits[node].argmax()) for node in rejected], len(path))

    def _update_prices(self, context: int) -> None:
        """Update the seconds of passes by tokens of this sequence, beside those of others, and the prices."""
        self._priced = self.others
        other_tokens = self.others.tokens
        curve = self.cost.curve(context, other_tokens + self._max_width)[other_tokens:].tolist()
        # The rate is in seconds that passes were expected to take.
        self._seconds *= curve[0] / self._curve[0] if self._curve else 1.0
        self._curve = curve
        rate = self.rate
        prices = []
        for width in range(1, len(curve)):
            wider = range(1, min(4, len(curve) - width) + 1)
            prices.append(rate * min((curve[width - 1 + more] - curve[width - 1]) / more for more in wider))
        self._prices = TokenPrices((*prices, 0.0), rate)
