"""A draft model as a predictor: its probabilities as evidence buckets.

How far a draft model's probabilities can be trusted depends on the target, the text and the temperature, so they are
classed and the classes' worth is learned like any other evidence. A distilled model is about right from the start: of
the bundled one's first guesses with a probability between 0.5 and 0.6, 65 % were the target's choice; between 0.8 and
0.9, 87 %; above 0.98, 99 %.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from ..tree import Source
from .draft_model import DraftModel, Path
from .interface import Candidate

_EDGES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Where classes of probabilities end."""
_CLASSES: Final = len(_EDGES) + 1
_LEAST: Final = 0.02
"""A guess less likely than this is none: no row is that cheap."""
_MOST_GUESSES: Final = 3


class ModelDrafter:
    """A `CostlyDrafter`. Its state is the path of tokens behind the text.

    `temperature`, above 0, is what probabilities are read at: the target's, or 1 if it is greedy.
    """

    source: Final = Source.MODEL
    prior: Final[Sequence[float]] = (
        *((low + high) / 2 for low, high in zip((_LEAST, *_EDGES), (*_EDGES, 1.0), strict=True)),  # first guesses
        *(0.8 * (low + high) / 2 for low, high in zip((_LEAST, *_EDGES), (*_EDGES, 1.0), strict=True)),  # the others
    )

    def __init__(self, model: DraftModel, temperature: float = 1.0) -> None:
        self.model: Final = model
        self.temperature = temperature

    def follow(self, tokens: Sequence[int]) -> None:
        """Make `tokens` the text."""
        self.model.follow(tokens)

    def append(self, token: int) -> None:
        """Let the text grow by one token."""
        self.model.append(token)

    def state(self) -> Path:
        """The empty path."""
        return ()

    def after(self, state: Path, token: int) -> Path:
        """One token further; nothing is run."""
        return (*state, token)

    def seconds(self, state: Path) -> float:
        """What `candidates(state)` is expected to take now."""
        return self.model.seconds(state)

    def spent(self) -> float:
        """Seconds that the model took since this was last asked for."""
        return self.model.spent()

    def candidates(self, state: Path) -> Sequence[Candidate]:
        """The model's likeliest next tokens.

        Raises:
            EdgeError: ONNX Runtime failed; the text keeps its rows.
        """
        likely = self.model.likely(state, _MOST_GUESSES, self.temperature)
        return [
            Candidate(token, bisect_right(_EDGES, probability) + (_CLASSES if rank else 0))
            for rank, (token, probability) in enumerate(zip(*likely, strict=True))
            if probability >= _LEAST
        ]
