"""The drafters of one engine: which are at hand, and the speculators made of them.

What is learned about a model lasts as long as its engine; what is worth keeping longer (the cost of its passes, its
recycled candidates) is saved when the engine closes, in the cache, where nothing is that cannot be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...errors import InputError
from ..sampling import SamplingParams
from .choice import SOURCE_NAMES, Speculation
from .drafters.interface import Drafter
from .drafters.model import ModelDrafter
from .drafters.recycling import RecyclingDrafter
from .drafters.suffix import SuffixDrafter
from .growth import Grower
from .pass_cost import PassCost
from .sampled_speculator import DraftSampling, SampledSpeculator
from .speculator import Speculator
from .tree import Source


class Drafting:
    """Makes and keeps one speculator for every choice of drafters.

    Args:
        cost: what a pass of the target costs.
        vocab_size: of the target.
        trees: whether the target can verify trees.
        tables: predictors over what lies on disk (n-gram counts, earlier conversations).
        model: the draft model.
        recycled: file of the recycled candidates; None keeps them in memory only.
    """

    def __init__(
        self,
        cost: PassCost,
        vocab_size: int,
        *,
        trees: bool,
        tables: Sequence[Drafter] = (),
        model: ModelDrafter | None = None,
        recycled: Path | None = None,
    ) -> None:
        self.cost: Final = cost
        self._trees = trees
        self._model = model
        self._recycle = RecyclingDrafter(vocab_size)
        self._recycled = recycled
        if recycled is not None:
            self._recycle.load(recycled)
        free: list[Drafter] = [SuffixDrafter(), *tables, self._recycle]
        self._free: Final = {predictor.source: predictor for predictor in free}
        self._speculators: dict[tuple[frozenset[Source], bool, bool], Speculator] = {}
        self._drawing: dict[DraftSampling, SampledSpeculator] = {}

    @property
    def sources(self) -> frozenset[Source]:
        """Of the drafters at hand."""
        return frozenset(self._free) | (frozenset() if self._model is None else {self._model.source})

    def speculator(self, choice: Speculation, *, recorded: bool = False, exact: bool = False) -> Speculator | None:
        """The speculator for a choice of drafters; None for plain decoding.

        With a `recorded` answer the graph's own logits mean nothing, and what depends on them is left out. What pays in
        `exact` answers, where near-ties cost much, is learned apart.

        Raises:
            InputError: a drafter that was asked for is not at hand.
        """
        missing = choice.sources - self.sources
        if missing and not choice.automatic:
            name = SOURCE_NAMES[min(missing)]
            raise InputError(f"there is nothing for --spec {name} to draft with", _HOW_TO_GET[min(missing)])
        chosen = choice.sources & self.sources
        if recorded:
            chosen -= {Source.RECYCLED}
        if not chosen:
            return None
        key = (chosen, recorded, exact)
        if key not in self._speculators:
            recycle = self._recycle if Source.RECYCLED in chosen else None
            predictors = [predictor for source, predictor in self._free.items() if source in chosen]
            model = self._model if Source.MODEL in chosen else None
            self._speculators[key] = Speculator(
                Grower(predictors, model), self.cost, trees=self._trees, recycle=recycle
            )
        return self._speculators[key]

    def drawing(self, drawing: DraftSampling, sampling: SamplingParams) -> SampledSpeculator:
        """The speculator that draws guesses from the draft model, for an answer sampled like this.

        Raises:
            InputError: there is no draft model.
        """
        if self._model is None:
            raise InputError("there is no draft model to draw guesses from", _HOW_TO_GET[Source.MODEL])
        if drawing not in self._drawing:
            self._drawing[drawing] = SampledSpeculator(self._model.model, self.cost, drawing, trees=self._trees)
        speculator = self._drawing[drawing]
        speculator.begin(sampling)
        return speculator

    def save(self) -> None:
        """Keep what was learned; a disk that refuses it costs nothing but that."""
        if self._recycled is not None and self._recycle.changed:
            with suppress(OSError):
                self._recycle.save(self._recycled)


_HOW_TO_GET: Final = {
    Source.MODEL: "give a draft model with --draft",
    Source.HISTORY: "keep conversations with --history",
    Source.NGRAM: "make a table with edge-run tune --text",
    Source.SUFFIX: "leave it out",
    Source.RECYCLED: "leave it out",
}
