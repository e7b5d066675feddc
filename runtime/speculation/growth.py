"""Grows a draft tree, most probable candidate first, and prunes it to the draft tokens that pay.

All drafters propose candidates at the anchor. The mixed probabilities of the candidates wait in a heap ordered by path
probability. The best one becomes a node, the drafters propose candidates behind it, and so on, until the best remaining
candidate cannot pay for its token position (the order of Sequoia and DySpec, Chen et al. 2024, Xiong et al. 2024; on a
machine where token positions cost something the tree is small). A draft model takes part like any other drafter, except
that its passes take time: it runs only where the tokens it is expected to add are worth that time.

A pass costs t(m) seconds and produces one token for certain and one more for every accepted draft token. The highest
tokens per second over a whole text come from choosing, in every round, the set of draft tokens with the largest

    sum of their path probabilities - rate * (t(1 + draft tokens) - t(1)),

where rate is the decoding rate in tokens per second under this very policy (renewal reward; Dinkelbach 1967).
Maximizing the ratio of each round by itself would draft too much where drafts are poor and too little where they are
good. The empty draft is allowed, and usual when no candidate is probable.

Where a recurrent state cannot be cut back, a rejection has a price: the accepted tokens run once more inside the next
pass, after those that have to run again already. Of a chain of k draft tokens with path probabilities p(1) to p(k), j
are accepted with probability p(j) - p(j + 1), and then j + 1 tokens run again, the anchor included. Their expected
number is 1 + p(1) + ... + p(k - 1) - k p(k). A round without a draft leaves nothing to run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from ..sampling.token_mask import TokenConstraint
from .drafters.interface import Candidate, Drafter, ModelDrafter, State
from .learned_rates import Mixer, Prediction
from .tree import Source, Tree

_MAX_DEPTH: Final = 32
_CERTAIN: Final = 0.985
"""Acceptance rate above which no further drafters are consulted about a node."""
_MAX_SIBLING_SUM: Final = 0.98
"""Upper limit of the sum of the probabilities of siblings."""
MIN_ADVANTAGE: Final = 0.02
"""Tokens per round that a draft must gain beyond its cost; otherwise the round is a plain step."""


class TokenPrices(NamedTuple):
    """Cost of a wider pass and of time, in tokens that plain decoding would produce meanwhile."""

    positions: Sequence[float]
    """Entry n: lowest mean price of the next one to four token positions, when the tree has n + 1 nodes. The time of a
    pass rises in steps, which growth may have to cross; pruning charges the exact time. The length is the maximum
    number of nodes."""
    second: float
    """Price of a second: the decoding rate, in tokens per second."""


class TreeGrowth:
    """One draft tree while it grows; kept until the outcome of its verification is known.

    Args:
        drafters: free drafters, consulted at every node.
        model: draft model, run where it pays.
        mixer: turns the drafters' evidence into probabilities, and decides where the draft model runs.
        constraint: what the answer has to follow. Its forced tokens come before all candidates, and those that it
            forbids are left out. None if any token may come.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        model: ModelDrafter | None,
        mixer: Mixer,
        constraint: TokenConstraint | None = None,
    ) -> None:
        self._constraint = constraint
        self._drafters = drafters
        self._model = model
        self._mixer = mixer
        self.candidates: dict[int, list[tuple[int, Prediction]]] = {}
        """The tokens considered as children of each expanded node."""
        self.model_passes = 0
        """Number of draft model passes."""
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._pushed = 0

    def grow(self, anchor: int, prices: TokenPrices, max_depth: int, *, chain: bool) -> Tree:
        """Grow the draft behind the sequence.

        Args:
            anchor: last token of the sequence.
            prices: price of token positions and of time.
            max_depth: maximum number of tokens of a path.
            chain: whether only a chain can be verified.
        """
        self._prices = prices
        self._max_depth = min(max_depth, _MAX_DEPTH)
        self._tokens, self._parents, self._probs, self._sources = [anchor], [-1], [1.0], [int(Source.ANCHOR)]
        self._states: list[list[State]] = [[drafter.state() for drafter in self._drafters]]
        self._paths: list[tuple[int, ...]] = [()]
        self._forced: dict[int, Sequence[int]] = {}
        if self._max_depth:
            self._expand(0)
        positions, heap = prices.positions, self._heap
        while heap and len(self._tokens) < len(positions):
            negative, _, parent, token, source = heappop(heap)
            if -negative < positions[len(self._tokens) - 1]:
                break
            if chain and parent != len(self._tokens) - 1:
                continue
            self._add(parent, token, -negative, source)
        # The tree is valid by construction, so the checks of `Tree.of` are skipped.
        self.tree = Tree(self._tokens, self._parents, self._probs, self._sources)
        return self.tree

    def _add(self, parent: int, token: int, probability: float, source: int) -> None:
        node = len(self._tokens)
        path = (*self._paths[parent], token)
        self._paths.append(path)
        if rest := self._forced.get(parent, ())[1:]:
            self._forced[node] = rest
        self._tokens.append(token)
        self._parents.append(parent)
        self._probs.append(probability)
        self._sources.append(source)
        self._states.append(
            [drafter.after(state, token) for drafter, state in zip(self._drafters, self._states[parent], strict=True)]
        )
        positions = self._prices.positions
        # No child is more probable than its parent.
        if node + 1 < len(positions) and len(path) < self._max_depth and probability > positions[node]:
            self._expand(node)

    def _expand(self, node: int) -> None:
        """Push the candidates for the children of a node on the heap."""
        mixer, model, probability = self._mixer, self._model, self._probs[node]
        if self._constraint is not None:
            forced = self._forced.get(node) or self._constraint.forced(self._paths[node])
            if forced:  # the token that has to come is as probable as the node itself
                self._forced[node] = forced
                self._push(-probability, node, forced[0], Source.GRAMMAR)
                return
        proposals: list[tuple[int, int, dict[int, int]]] = []
        for drafter, state in zip(self._drafters, self._states[node], strict=True):
            if candidates := self._possible(node, drafter.candidates(state)):
                source, bucket = int(drafter.source), candidates[0].bucket
                proposals.append((source, mixer.objection_cell(source, bucket), dict(candidates)))
                if mixer.acceptance_rate(source, bucket) > _CERTAIN:
                    break
        mixed = self._mix(proposals)
        if model is not None:
            positions = self._prices.positions
            price = positions[min(len(self._tokens), len(positions)) - 1]
            free_prob = max((prediction.probability for _, prediction, _ in mixed), default=0.0)
            cost = model.seconds(self._paths[node]) * self._prices.second
            if mixer.model_value.pays(probability, free_prob, price, cost, at_anchor=node == 0):
                self.model_passes += 1
                if candidates := self._possible(node, model.candidates(self._paths[node])):
                    source = int(model.source)
                    cell = mixer.objection_cell(source, candidates[0].bucket)
                    proposals.append((source, cell, dict(candidates)))
                    mixed = self._mix(proposals)
                best_prob = max((prediction.probability for _, prediction, _ in mixed), default=0.0)
                mixer.model_value.observe(free_prob, best_prob)
        self.candidates[node] = [(token, prediction) for token, prediction, _ in mixed]
        total = sum(prediction.probability for _, prediction, _ in mixed)
        scale = probability * min(1.0, _MAX_SIBLING_SUM / total) if total else 0.0
        for token, prediction, source in mixed:
            self._push(-scale * prediction.probability, node, token, source)

    def _push(self, negative: float, node: int, token: int, source: int) -> None:
        self._pushed += 1
        heappush(self._heap, (negative, self._pushed, node, token, int(source)))

    def _possible(self, node: int, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Those of the candidates behind a node that the constraint allows."""
        if self._constraint is None or not candidates:
            return candidates
        allowed = self._constraint.allows(self._paths[node], [candidate.token for candidate in candidates])
        return [candidate for candidate, may_come in zip(candidates, allowed, strict=True) if may_come]

    def _mix(self, proposals: Sequence[tuple[int, int, dict[int, int]]]) -> list[tuple[int, Prediction, int]]:
        """Every proposed token, its probability, and the source with the strongest evidence for it."""
        mixer = self._mixer
        mixed: list[tuple[int, Prediction, int]] = []
        for token in dict.fromkeys([token for _, _, candidates in proposals for token in candidates]):
            # A source that did not propose the token has only its objection.
            evidence = [(source, proposed.get(token, objection)) for source, objection, proposed in proposals]
            prediction = mixer.predict(evidence)
            source, strongest = evidence[0][0], -100.0
            # There are no inputs of a single source; behind the inputs of several stands a constant.
            for (each, _, proposed), value in zip(proposals, prediction.inputs, strict=False):
                if token in proposed and value > strongest:
                    source, strongest = each, value
            mixed.append((token, prediction, source))
        return mixed


def prune(
    tree: Tree, curve: Sequence[float], rate: float, max_width: int, replay: int | None = None
) -> tuple[Tree, float, float]:
    """Keep the draft tokens that pay, most probable first.

    Args:
        tree: draft with calibrated path probabilities, no child more probable than its parent.
        curve: seconds of a pass of width 1, 2, ...; draft tokens beyond its end are dropped.
        rate: decoding rate in tokens per second.
        max_width: maximum width of the pass, in token positions.
        replay: number of tokens that the pass runs once more before the draft, where the accepted tokens of a rejected
            draft do so too; None where a rejection costs nothing.

    Returns:
        The part of the draft that pays; the number of tokens the round is expected to produce, the certain one
        included; and the tokens gained over spending the same time on plain steps, 0 for the anchor alone.
    """
    # A stable sort keeps parents before children of the same probability.
    order = sorted(range(len(tree)), key=lambda node: -tree.path_probs[node])
    probabilities = [tree.path_probs[node] for node in order[1:]]
    width, advantage, expected = best_width(probabilities, curve, rate, max_width, replay)
    return tree.kept(order[:width]), expected, advantage


def best_width(
    probabilities: Sequence[float], curve: Sequence[float], rate: float, max_width: int, replay: int | None = None
) -> tuple[int, float, float]:
    """The best pass width for draft tokens of descending path probability: (width, advantage, expected tokens).

    Arguments as for `prune`; tokens that run once more do not count as width.
    """
    pending = replay or 0
    best, advantage, expected = 1, MIN_ADVANTAGE, 1.0
    tokens = 1.0
    first = curve[min(pending, len(curve) - 1)]
    for count, probability in enumerate(probabilities[: max(min(max_width, len(curve) - pending) - 1, 0)], 1):
        tokens += probability
        gained = tokens - 1 - rate * (curve[pending + count] - first)
        if replay is not None:
            again = expected_replay(count, probability, tokens - probability, pending)
            # Each of them costs the average of what they add to a pass over one token.
            gained -= rate * again * (curve[pending + count] - curve[0]) / (pending + count)
        if gained > advantage:
            best, advantage, expected = count + 1, gained, tokens
    return best, advantage if best > 1 else 0.0, expected


def expected_replay(count: int, probability: float, before_last: float, pending: int) -> float:
    """Expected number of tokens that run once more after a chain of draft tokens.

    Args:
        count: number of draft tokens.
        probability: path probability of the last one.
        before_last: sum of the path probabilities before the last draft token, with the 1 of the anchor.
        pending: number of tokens that run once more in this pass.
    """
    return (1 - probability) * pending + before_last - count * probability
