"""How exact speculation is for a model on this machine: what was measured, and where it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ...models.json_file import is_finite, is_whole
from ..graph.bound_session import BoundSession
from .measurement_store import MeasurementStore
from .width_noise import WidthNoise, measure_width_noise

_FORM: Final = 1
_QUICK_WIDTHS: Final = (2, 4)
_QUICK_TOKENS: Final = 96
SAMPLE_TEXT: Final = """\
The library will be closed on Monday because the heating is being repaired. Books that are due on that day may be \
returned on Tuesday without a fee; the reading room on the first floor stays open until noon.

def overdue(books, today):
    return [book for book in books if book.due < today and not book.returned]

{"title": "Opening hours", "days": ["Tuesday", "Wednesday", "Friday"], "from": "9:30", "to": "18:00"}
"""
"""What noise is measured over where there is no text to decode."""


@dataclass(frozen=True)
class ComparisonCounts:
    """Speculative texts compared with plain ones."""

    texts: int
    identical: int
    tied: int
    """Texts that part from the plain one at a near-tie, and nowhere else: behind it they are other texts."""
    candidates: int
    """Guesses that were verified on the way."""
    accepted: int
    """Those of them that the texts took."""
    widest_tie: float = 0.0
    """Logits between the two tokens of the clearest of those near-ties, as plain decoding sees them."""
    again: int = 0
    """Rows of the texts that were run again to decide near-ties."""

    @property
    def failed(self) -> int:
        """Texts that part where the choice was clear."""
        return self.texts - self.identical - self.tied


@dataclass(frozen=True)
class Counterexample:
    """A text that parts from plain decoding's where it should not."""

    kind: str
    """What was compared: `greedy`, `sampled` or `exact`."""
    drafter: str
    prompt: int
    """Index among the prompts."""
    seed: int
    position: int
    """Index in the answer, in tokens."""
    expected: int
    """The token that plain decoding gives."""
    found: int
    gap: float
    """Between the two, in logits; see `comparison`."""


@dataclass(frozen=True)
class ExactnessReport:
    """What is known; the texts are None until `edge-run verify` has compared some."""

    noise: WidthNoise
    greedy: ComparisonCounts | None = None
    sampled: ComparisonCounts | None = None
    exact: ComparisonCounts | None = None
    """Greedy with near-ties decided again."""
    counterexample: Counterexample | None = None
    """The first."""

    @property
    def epsilon(self) -> float:
        """Logits; what is further apart is not in doubt."""
        return self.noise.epsilon

    @property
    def passed(self) -> bool:
        """Whether nothing speaks against this model on this machine."""
        return self.noise.sound and self.counterexample is None

    def to_json(self) -> dict[str, Any]:
        """A plain object that `from_json` reads."""
        parts = {name: None if part is None else dict(vars(part)) for name, part in vars(self).items()}
        return {**parts, "noise": self.noise.to_json(), "epsilon": self.epsilon, "passed": self.passed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ExactnessReport:
        """What `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        noise, found = data.get("noise"), data.get("counterexample")
        if not isinstance(noise, dict) or not (found is None or isinstance(found, dict)):
            raise ValueError("lacks what was measured")
        try:
            counterexample = None if found is None else Counterexample(**found)
        except TypeError as error:
            raise ValueError("holds a counterexample that is none") from error
        counts = {name: _count(data.get(name)) for name in ("greedy", "sampled", "exact")}
        return cls(WidthNoise.from_json(noise), **counts, counterexample=counterexample)


def _count(data: object) -> ComparisonCounts | None:
    if data is None:
        return None
    if not isinstance(data, dict):
        raise ValueError("holds a count that is none")
    names = ("texts", "identical", "tied", "candidates", "accepted", "again")
    if not is_finite(data.get("widest_tie")) or not all(is_whole(data.get(name), 0) for name in names):
        raise ValueError("holds a count that is none")
    return ComparisonCounts(**{name: data[name] for name in names}, widest_tie=float(data["widest_tie"]))


EXACTNESS_REPORTS: Final = MeasurementStore("exactness", 1, ExactnessReport.from_json)
"""Exactness reports of models on this machine."""


def measure_exactness(bound: BoundSession, text: Sequence[int]) -> ExactnessReport:
    """A certificate of little more than the noise over one text of at least two tokens: about a second.

    Raises:
        EdgeError: ONNX Runtime failed.
    """
    return ExactnessReport(measure_width_noise(bound, [text[:_QUICK_TOKENS]], widths=_QUICK_WIDTHS))
