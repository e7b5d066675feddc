"""What an export made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .check.parity import Parity
from .report import ModelReport


@dataclass(frozen=True)
class ExportReport:
    """What an export made."""

    bundle: Path
    file_bytes: Mapping[str, int]
    """Size by file name, `edge.json` included."""
    bits_per_weight: float
    """Stored bits, scales included, over the weights of all units."""
    seconds: float
    parity: Parity
    notes: tuple[str, ...] = ()
    """What the user did not ask for and should know, a line each."""
    report: ModelReport | None = None
    """What was chosen and what it costs, of an export by text."""
