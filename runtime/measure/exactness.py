"""The exactness report of a model on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from ...models.json_file import WholeNumber, record_from_json, record_to_json
from ..graph.bound_graph import BoundGraph
from ..result import DraftCounts
from .measurement_store import MeasurementStore
from .width_noise import WidthNoise, measure_width_noise

_QUICK_WIDTHS: Final = (2, 4)
_QUICK_TOKENS: Final = 96
SAMPLE_TEXT: Final = """\
The library will be closed on Monday because the heating is being repaired. Books that are due on that day may be \
returned on Tuesday without a fee; the reading room on the first floor stays open until noon.

def overdue(books, today):
    return [book for book in books if book.due < today and not book.returned]

{"title": "Opening hours", "days": ["Tuesday", "Wednesday", "Friday"], "from": "9:30", "to": "18:00"}
"""
"""The text over which noise is measured before any text is generated."""


@dataclass(frozen=True)
class ComparisonCounts:
    """Counts of speculative texts that were compared with plain ones."""

    texts: WholeNumber = 0
    """Number of texts that were compared."""
    identical: WholeNumber = 0
    """Number of texts that equal the plain one."""
    near_ties: WholeNumber = 0
    """Number of texts that differ from the plain one from a near tie on; after it they are different texts."""
    widest_near_tie: float = 0.0
    """Largest margin of those near ties, in logits of plain decoding."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Draft tokens that were verified and accepted."""
    recomputed: WholeNumber = 0
    """Number of positions that were recomputed one by one to decide near ties."""

    def __add__(self, other: ComparisonCounts) -> ComparisonCounts:
        return ComparisonCounts(
            self.texts + other.texts,
            self.identical + other.identical,
            self.near_ties + other.near_ties,
            max(self.widest_near_tie, other.widest_near_tie),
            self.drafts + other.drafts,
            self.recomputed + other.recomputed,
        )

    @property
    def failed(self) -> int:
        """Number of texts that differ where the choice was clear."""
        return self.texts - self.identical - self.near_ties


@dataclass(frozen=True)
class Counterexample:
    """A speculative text that differs from plain decoding where it must not."""

    kind: str
    """What was compared: `greedy`, `sampled` or `exact`."""
    drafter: str
    """Name of the drafter: `oracle`, `oracle tree` or `auto`."""
    prompt: int
    """Index of the prompt."""
    seed: int
    """Seed of a sampled text."""
    position: int
    """Index of the first differing token in the answer."""
    expected: int
    """Token id of plain decoding."""
    found: int
    """Token id of the speculative text; -1 if it ends there."""
    gap: float
    """Distance between the two in logits; see `comparison`."""


@dataclass(frozen=True)
class ExactnessReport:
    """What was measured; the counts are None until `edge-run verify` has compared texts."""

    noise: WidthNoise
    greedy: ComparisonCounts | None = None
    sampled: ComparisonCounts | None = None
    exact: ComparisonCounts | None = None
    """Greedy decoding that recomputes near ties."""
    counterexample: Counterexample | None = None
    """The first text that differs where it must not."""

    @property
    def epsilon(self) -> float:
        """Margin in logits above which a choice is certain."""
        return self.noise.epsilon

    @property
    def passed(self) -> bool:
        """Whether wide passes differ by noise only and no text differs where it must not."""
        return self.noise.sound and self.counterexample is None

    def to_json(self) -> dict[str, Any]:
        """Convert to a plain JSON object."""
        return {**record_to_json(self), "epsilon": self.epsilon, "passed": self.passed}


EXACTNESS_REPORTS: Final = MeasurementStore(
    "exactness", 2, partial(record_from_json, ExactnessReport), ExactnessReport.to_json
)
"""Exactness reports of models on this machine."""


def measure_exactness(bound: BoundGraph, text: Sequence[int]) -> ExactnessReport:
    """Measure little more than the noise over one text of at least two tokens, in about a second.

    Raises:
        EdgeError: ONNX Runtime failed.
    """
    return ExactnessReport(measure_width_noise(bound, [text[:_QUICK_TOKENS]], widths=_QUICK_WIDTHS))
