"""Everything an engine needs to draft, made when first needed: step cost, tables on disk, draft model, speculators."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..models.bundle import Bundle
from .calibration import calibrate
from .complete import CachedText
from .draft.foreseen import ForeseenPredictor
from .draft.grow import Grower
from .drafting import Drafting, fits_trees
from .session import GraphSession
from .speculate import Speculator
from .speculation import Speculation
from .step_cost import StepCost
from .text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Recording:
    """An answer given beforehand, and whether drafts are to know it."""

    answer: tuple[int, ...]
    foreseen: bool = False


class Workshop:
    """Drafting for one engine.

    Args:
        graph: the target's session.
        bundle: the target's.
        tokenizer: the target's.
        draft: what the caller asked for as draft model; None for none.
        cache: whether anything is read from disk or kept there.
        history: whether conversations are kept and drafted from.
    """

    def __init__(
        self,
        graph: GraphSession,
        bundle: Bundle,
        tokenizer: TextTokenizer,
        draft: str | os.PathLike[str] | None,
        *,
        cache: bool,
        history: bool,
    ) -> None:
        self._graph = graph
        self._bundle = bundle
        self._tokenizer = tokenizer
        self._draft = draft
        self._cached = cache
        self._history = history
        self._cost: StepCost | None = None
        self._drafting: Drafting | None = None

    def step_cost(self, new_text: Callable[[], CachedText]) -> StepCost:
        """What passes cost: known from before, or measured now over an arena that `new_text` makes."""
        if self._cost is None:
            self._cost = calibrate(new_text().bound)
        return self._cost

    def speculator(
        self,
        choice: Speculation,
        new_text: Callable[[], CachedText],
        prompt: Sequence[int],
        recorded: Recording | None = None,
    ) -> Speculator | None:
        """The speculator for one answer; None for plain decoding.

        Raises:
            InputError: a drafter that was asked for is not at hand.
        """
        if choice == Speculation.OFF:
            return None
        spec = self._graph.spec
        trees = fits_trees(spec)
        cost = self.step_cost(new_text)
        if recorded is not None and recorded.foreseen:
            return Speculator(Grower([ForeseenPredictor(recorded.answer, len(prompt))]), cost, trees=trees)
        if self._drafting is None:
            self._drafting = Drafting(cost, spec.vocab_size, trees=trees)
        return self._drafting.speculator(choice, recorded=recorded is not None)

    def remember(self, tokens: Sequence[int]) -> None:
        """Keep a finished text for later conversations, where that was asked for."""

    def close(self) -> None:
        """Keep what was learned."""
        if self._drafting is not None:
            self._drafting.save()
