"""Speculation round by round: draft, prune to what pays, and learn from what was accepted.

The `Speculator` stands between the decode loop and the drafters. It knows what a pass costs (`PassCost`) and what
decoding reaches with it, turns both into prices for the growing draft, and keeps the account of every round. Drafting
that costs more than it promises is laid to rest, for waits that double as long as it stays so.
"""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..sampling import Logits
from .backoff import Backoff
from .drafters.recycling import RecyclingDrafter
from .drafters.suffix import SuffixDrafter
from .growth import Grower, Growth, Prices
from .pass_cost import PassCost
from .pruning import prune
from .tree import Source, Tree
from .verification import TokenSampler, VerifyResult, match

MAX_DRAFT_WIDTH: Final = 16
"""Most rows of a pass: it bounds the logits held, and what is grown before it is pruned."""
_RATE_HORIZON: Final = 64
"""Rounds that the rate of decoding is averaged over."""
_REFRESH: Final = 16
"""Rounds between looks at the step cost, which moves slowly."""


@dataclass(frozen=True)
class Round:
    """What one round drafted and what came of it. Counts are made when they are asked for, not between two passes."""

    tree: Tree
    """Verified."""
    grown: Tree
    """Before pruning."""
    path: tuple[int, ...]
    """The tree's accepted nodes, the anchor first."""
    expected: float
    """Tokens the round was expected to give; 1 for a plain step."""
    draft_passes: int
    draft_s: float
    target_s: float
    host_s: float
    """Looking guesses up, choosing tokens, learning."""
    note: str = ""
    """Why nothing was drafted, where there is a reason worth telling."""

    @property
    def rows(self) -> int:
        """Of the target's pass, the anchor's included."""
        return len(self.tree)

    @property
    def emitted(self) -> int:
        """Tokens the round gave."""
        return len(self.path)

    @property
    def candidates(self) -> tuple[int, ...]:
        """Nodes of the grown draft by `Source`."""
        return _by_source(self.grown.source[1:])

    @property
    def drafted(self) -> tuple[int, ...]:
        """Nodes that were verified, by `Source`."""
        return _by_source(self.tree.source[1:])

    @property
    def accepted(self) -> tuple[int, ...]:
        """Of these, the accepted ones."""
        return _by_source(self.tree.source[list(self.path[1:])])

    @property
    def drafted_by_depth(self) -> tuple[int, ...]:
        """Nodes that were verified; entry 0 is depth 1."""
        return tuple(np.bincount(self.tree.depths)[1:].tolist())


class PassTimes(NamedTuple):
    """Seconds that a round took beside drafting."""

    target: float
    """The pass over the draft."""
    again: float = 0.0
    """Passes over rows of the text that were run again, one by one."""
    checking: float = 0.0
    """Choosing tokens, and keeping the accepted rows."""


@dataclass
class Draft:
    """A pruned tree on its way through the target, and how it came about."""

    tree: Tree
    growth: Growth | None = None
    expected: float = 1.0
    advantage: float = 0.0
    draft_s: float = 0.0
    host_s: float = 0.0
    passes: int = 0
    """Of the draft model."""
    note: str = ""


_USUAL_HOST_S: Final = 1e-4
"""What a round's look-ups take, until it is known: the first ones are slow and say little."""
_NEGLIGIBLE: Final = 0.01
"""Tokens a round that looking guesses up may cost without being laid to rest."""
_LIGHT: Final = 0.08
"""Tokens a round up to which a resting speculator listens: it follows the text, a tenth of a look-up's cost."""
_TELLING: Final = 4
"""Tokens of the text's end that occurred before, from which a listening speculator wakes."""
_PLAIN_OBSERVED_EVERY: Final = 8
"""Plain passes of which one refines the step cost: there are many, and the bookkeeping takes time too."""


class Speculator:
    """Proposes what to verify with the next pass.

    Args:
        grower: the drafters.
        cost: what a pass costs; refined with every round.
        trees: whether the target can verify trees; otherwise drafts are chains.
        recycle: the predictor, also among the grower's, that learns from the target's logits.
        most_rows: most rows of a pass.
    """

    def __init__(
        self,
        grower: Grower,
        cost: PassCost,
        *,
        trees: bool = True,
        recycle: RecyclingDrafter | None = None,
        most_rows: int = MAX_DRAFT_WIDTH,
    ) -> None:
        self.grower: Final = grower
        self.cost: Final = cost
        self._trees = trees
        self._recycle = recycle
        self._most_rows = most_rows
        self.rest: Final = Backoff()
        self._tokens: list[int] = []
        self._followed = 0
        self._given = self._taken = 0.0
        self._curve: list[float] = []
        self._prices = Prices((0.0,), 0.0)
        self._rounds = 0
        self._host_s = _USUAL_HOST_S
        self._watched = next((each for each in grower.predictors if isinstance(each, SuffixDrafter)), None)
        self._light = False
        """Whether looking guesses up takes so little that a resting speculator listens."""
        self._ahead = 0.0
        """Tokens gained on plain decoding since rows were last run again."""

    @property
    def rate(self) -> float:
        """Tokens a second that decoding reaches, by the step cost's seconds; at least that of plain steps."""
        return max(self._given / self._taken, 1 / self._curve[0]) if self._taken else 1 / self._curve[0]

    @property
    def resting(self) -> bool:
        """Whether the next round is to be a plain one, without a proposal."""
        return self.rest.left > 0

    def skip(self, token: int) -> None:
        """Take in the token of a plain round."""
        self.rest.left -= 1
        self._tokens.append(token)
        if self._light and self._watched is not None:
            self._catch_up(self._tokens, self._followed)
            self._followed = len(self._tokens)
            if self._watched.state()[1] >= _TELLING:
                self.rest.wake()

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens`, the anchor included, the text."""
        self._tokens = list(tokens)
        self._followed = 0
        self._rounds = 0
        self._ahead = 0.0

    def propose(self, context: int, most: int, room: int) -> Draft:
        """What to verify next.

        Args:
            context: committed rows.
            most: tokens that may still be emitted; at least 1.
            room: rows that the pass may have; at least 1.
        """
        started = time.perf_counter()
        anchor = self._tokens[-1]
        if self._rounds % _REFRESH == 0 or not self._curve:
            self._look_at_costs(context)
        self._rounds += 1
        if min(most, room) < 2:
            return Draft(Tree.anchor_only(anchor), host_s=time.perf_counter() - started)
        if self._followed < len(self._tokens):
            self._catch_up(self._tokens, self._followed)
            self._followed = len(self._tokens)
        draft = self._draft(anchor, self._prices.up_to(room), most - 1)
        draft.host_s = time.perf_counter() - started - draft.draft_s
        return draft

    def verify(
        self, draft: Draft, logits: Logits, chooser: TokenSampler, position: int, ends: Container[int], most: int
    ) -> VerifyResult:
        """Which of the draft's guesses the text takes; arguments as of `match`."""
        if len(draft.tree) == 1:
            return VerifyResult((0,), chooser.choose(logits[0], position))
        return match(draft.tree, logits, chooser, position, ends, most)

    def observe(
        self,
        draft: Draft,
        verdict: VerifyResult,
        logits: Logits,
        context: int,
        times: PassTimes,
    ) -> Round:
        """Take in what came of a draft.

        Args:
            draft: as proposed.
            verdict: on its tree.
            logits: float32 `[n, V]` of its nodes.
            context: committed rows before the pass.
            times: what the pass and its verification took.
        """
        started = time.perf_counter()
        tree, path = draft.tree, verdict.path
        emitted = verdict.emitted(tree)
        if len(tree) > 1 or self._rounds % _PLAIN_OBSERVED_EVERY == 0:
            self.cost.observe(len(tree), context, times.target)
        self._learn(draft, verdict, logits)
        self._tokens += emitted
        decay = 1 - 1 / _RATE_HORIZON
        self._given = self._given * decay + len(emitted)
        self._taken = self._taken * decay + self._curve[len(tree) - 1] + draft.draft_s + draft.host_s
        host_s = draft.host_s + time.perf_counter() - started
        if draft.growth is not None:
            # One interrupted round says nothing about the next: what it took beyond twice the usual is not counted.
            self._host_s += 0.1 * (min(host_s, 2 * self._host_s) - self._host_s)
            price = self._host_s * self.rate
            balance = draft.advantage - price if price > _NEGLIGIBLE else 0.0
            # What the draft model takes is not counted: whether to ask it is decided anew at every node.
            lost = self._lost(len(tree), len(emitted), times.again)
            self._light = price < _LIGHT and not lost
            self.rest.observe(balance - lost, light=self._light)
        return Round(
            tree,
            draft.growth.tree if draft.growth is not None else tree,
            path,
            draft.expected,
            draft.passes,
            draft.draft_s,
            times.target + times.again,
            host_s + times.checking,
            "a near-tie: its text was run again" if times.again else draft.note,
        )

    def _lost(self, rows: int, emitted: int, again: float) -> float:
        """Tokens that running rows again for `again` seconds has cost beyond what guesses had gained until then."""
        plain = self._curve[0]
        self._ahead += emitted - self._curve[rows - 1] / plain
        if not again:
            return 0.0
        lost, self._ahead = max(again / plain - self._ahead, 0.0), 0.0
        return lost

    def _catch_up(self, text: Sequence[int], followed: int) -> None:
        """Tell the drafters the text, of which they know `followed` tokens; none means that it is another one."""
        if followed:
            self.grower.append(text[followed:])
        else:
            self.grower.follow(text)

    def _draft(self, anchor: int, prices: Prices, deepest: int) -> Draft:
        """The guesses that pay, on paths of at most `deepest` tokens."""
        growth = self.grower.grow(anchor, prices, deepest, chain=not self._trees)
        pruned = prune(growth.tree, self._curve, self.rate, self._most_rows)
        draft_s = 0.0 if self.grower.model is None else self.grower.model.spent()
        note = self._note(growth)
        return Draft(
            pruned.tree, growth, pruned.expected, pruned.advantage, draft_s, passes=growth.model_passes, note=note
        )

    def _learn(self, draft: Draft, verdict: VerifyResult, logits: Logits) -> None:
        growth, path = draft.growth, verdict.path
        if growth is None:
            return
        tokens = draft.tree.tokens.tolist()
        # The pruned tree's nodes are looked up in the grown one, where the candidates are kept.
        grown, node = [0], 0
        for pruned in path[1:]:
            child = growth.tree.child(node, tokens[pruned])
            if child is None:
                break
            node = child
            grown.append(node)
        self.grower.learn(growth, grown, verdict.next_token)
        if self._recycle is not None:
            for node in path:
                self._recycle.learn(tokens[node], logits[node])

    def _look_at_costs(self, context: int) -> None:
        curve = self.cost.curve(context, self._most_rows).tolist()
        self._curve = curve
        rate = self.rate
        rows = []
        for have in range(1, len(curve)):
            ahead = range(1, min(4, len(curve) - have) + 1)
            rows.append(rate * min((curve[have - 1 + more] - curve[have - 1]) / more for more in ahead))
        self._prices = Prices((*rows, 0.0), rate)

    def _note(self, growth: Growth) -> str:
        worth = self.grower.worth
        if self.grower.model is None or growth.model_passes:
            return ""
        return f"draft model not asked: it would gain {worth.gain:.2f} tokens for the time of {worth.cost:.2f}"


def _by_source(sources: npt.NDArray[np.uint8]) -> tuple[int, ...]:
    return tuple(np.bincount(sources, minlength=len(Source)).tolist())
