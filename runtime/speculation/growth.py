"""Growing a draft: the likeliest continuation first, for as long as another row pays.

All predictors are asked at the anchor; their guesses, mixed into probabilities, wait in a heap ordered by path
probability. The best one becomes a node, the predictors are asked again behind it, and so on, until the best that is
left cannot pay for its row (the order is that of Sequoia and DySpec, Chen et al. 2024, Xiong et al. 2024; on a machine
where rows cost something the tree is small). A draft model takes part like any other predictor, except that asking it
costs time: it is asked where the tokens it is expected to add are worth that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

import numpy as np

from .draft_value import DraftWorth
from .drafters.interface import CostlyDrafter, Drafter, State
from .mixing import Mixer, Prediction
from .tree import Source, Tree

_DEEPEST: Final = 32
_SURE: Final = 0.985
"""A guess that comes true this often is not discussed with further predictors."""
_SIBLINGS_TOGETHER: Final = 0.98
"""What the guesses for one position may add up to."""


@dataclass(frozen=True)
class Prices:
    """What a round's rows cost, in tokens that plain time would have given."""

    rows: Sequence[float]
    """Entry n: of the cheapest next row, per row, when there are n + 1 rows; its length is the most rows a tree has."""
    second: float
    """Of a second: the rate decoding reaches."""

    def up_to(self, most_rows: int) -> Prices:
        """The prices of a pass with room for few rows."""
        return self if most_rows >= len(self.rows) else Prices(self.rows[:most_rows], self.second)


@dataclass
class Growth:
    """A draft as it grew, kept until its outcome is known."""

    tree: Tree
    candidates: dict[int, list[tuple[int, Prediction]]] = field(default_factory=dict)
    """By node: the tokens considered to follow it."""
    model_passes: int = 0
    """Passes of the draft model."""


class Grower:
    """Grows drafts from predictors and learns from their outcomes.

    Args:
        predictors: free ones; asked at every node.
        model: asked where it pays.
    """

    def __init__(self, predictors: Sequence[Drafter], model: CostlyDrafter | None = None) -> None:
        self.predictors: Final = tuple(predictors)
        self.model: Final = model
        everyone = (*self.predictors, *(() if model is None else (model,)))
        self.mixer: Final = Mixer({each.source: each.prior for each in everyone})
        self.worth: Final = DraftWorth()

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text."""
        for predictor in self.predictors:
            predictor.follow(tokens)
        if self.model is not None:
            self.model.follow(tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """Let the text grow."""
        for predictor in self.predictors:
            for token in tokens:
                predictor.append(token)
        if self.model is not None:
            for token in tokens:
                self.model.append(token)

    def grow(self, anchor: int, prices: Prices, deepest: int, *, chain: bool) -> Growth:
        """The draft behind the text, whose last token is `anchor`.

        Args:
            anchor: the text's last token.
            prices: what rows and seconds cost.
            deepest: most tokens of a path.
            chain: whether only a chain can be verified.
        """
        growing = _Growing(self, anchor, prices, min(deepest, _DEEPEST), chain=chain)
        return growing.run()

    def learn(self, growth: Growth, path: Sequence[int], next_token: int) -> None:
        """Take in which nodes were accepted and which token came after them."""
        tokens = growth.tree.tokens
        for node, following in zip(path, [*(int(tokens[node]) for node in path[1:]), next_token], strict=True):
            for token, prediction in growth.candidates.get(node, ()):
                self.mixer.learn(prediction, token == following)


class _Growing:
    """One draft while it grows."""

    def __init__(self, grower: Grower, anchor: int, prices: Prices, deepest: int, *, chain: bool) -> None:
        self._grower = grower
        self._prices = prices
        self._deepest = deepest
        self._chain = chain
        self._tokens, self._parents, self._probs, self._sources = [anchor], [-1], [1.0], [int(Source.ANCHOR)]
        self._depths = [0]
        self._states: list[list[State]] = [[predictor.state() for predictor in grower.predictors]]
        self._model_states: list[State] = [None if grower.model is None else grower.model.state()]
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._order = 0
        self._candidates: dict[int, list[tuple[int, Prediction]]] = {}
        self._model_passes = 0

    def run(self) -> Growth:
        if self._deepest:
            self._expand(0)
        prices, heap = self._prices.rows, self._heap
        while heap and len(self._tokens) < len(prices):
            negative, _, parent, token, source = heappop(heap)
            if -negative < prices[len(self._tokens) - 1]:
                break
            if self._chain and parent != len(self._tokens) - 1:
                continue
            self._add(parent, token, -negative, source)
        # A tree by the way it was grown, so it need not be checked like one from outside.
        tree = Tree(
            np.array(self._tokens, np.int32),
            np.array(self._parents, np.int32),
            np.array(self._probs, np.float32),
            np.array(self._sources, np.uint8),
        )
        return Growth(tree, self._candidates, self._model_passes)

    def _add(self, parent: int, token: int, probability: float, source: int) -> None:
        node = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._probs.append(probability)
        self._sources.append(source)
        self._depths.append(self._depths[parent] + 1)
        grower = self._grower
        self._states.append(
            [
                predictor.after(state, token)
                for predictor, state in zip(grower.predictors, self._states[parent], strict=True)
            ]
        )
        self._model_states.append(
            None if grower.model is None else grower.model.after(self._model_states[parent], token)
        )
        prices = self._prices.rows
        # Behind a node, nothing is likelier than the node itself.
        if node + 1 < len(prices) and self._depths[node] < self._deepest and probability > prices[node]:
            self._expand(node)

    def _expand(self, node: int) -> None:
        """Put what may follow a node on the heap."""
        grower, mixer = self._grower, self._grower.mixer
        probability = self._probs[node]
        speakers: list[tuple[int, int, dict[int, int]]] = []
        for predictor, state in zip(grower.predictors, self._states[node], strict=True):
            candidates = predictor.candidates(state)
            if candidates:
                source, bucket = int(predictor.source), candidates[0].bucket
                speakers.append((source, mixer.against(source, bucket), dict(candidates)))
                if mixer.share(source, bucket) > _SURE:
                    break
        mixed = self._mix(speakers)
        model = grower.model
        if model is not None:
            price = self._prices.rows[min(len(self._tokens), len(self._prices.rows)) - 1]
            state = self._model_states[node]
            free = max((prediction.probability for _, prediction, _ in mixed), default=0.0)
            cost = model.seconds(state) * self._prices.second
            if grower.worth.pays(probability, free, price, cost, first=node == 0):
                candidates = model.candidates(state)
                self._model_passes += 1
                source = int(model.source)
                if candidates:
                    speakers.append((source, mixer.against(source, candidates[0].bucket), dict(candidates)))
                    mixed = self._mix(speakers)
                best = max((prediction.probability for _, prediction, _ in mixed), default=0.0)
                grower.worth.observe(free, best)
        self._candidates[node] = [(token, prediction) for token, prediction, _ in mixed]
        together = sum(prediction.probability for _, prediction, _ in mixed)
        scale = probability * min(1.0, _SIBLINGS_TOGETHER / together) if together else 0.0
        for token, prediction, source in mixed:
            self._order += 1
            heappush(self._heap, (-scale * prediction.probability, self._order, node, token, source))

    def _mix(self, speakers: Sequence[tuple[int, int, dict[int, int]]]) -> list[tuple[int, Prediction, int]]:
        """Every guessed token, its probability, and the source that is surest of it."""
        mixer = self._grower.mixer
        mixed: list[tuple[int, Prediction, int]] = []
        done: set[int] = set()
        for _, _, candidates in speakers:
            for token in candidates:
                if token in done:
                    continue
                done.add(token)
                evidence = [(source, guessed.get(token, against)) for source, against, guessed in speakers]
                prediction = mixer.predict(evidence)
                source = evidence[0][0]
                if len(evidence) > 1:
                    surest = -100.0
                    for (each, _, guessed), value in zip(speakers, prediction.inputs, strict=False):
                        if token in guessed and value > surest:
                            source, surest = each, value
                mixed.append((token, prediction, source))
        return mixed
