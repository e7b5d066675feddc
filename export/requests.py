"""What may be asked of an export beyond a format for all weights: calibration, mixed formats, drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import InputError
from ..models.manifest import WeightFormat
from .allocation.budget import Budget

USUAL_TOKENS: Final = 16384
"""Tokens of text that a model is observed on, unless asked otherwise."""


@dataclass(frozen=True)
class CalibrationRequest:
    """The text on which a model is observed before its weights are rounded."""

    file: Path | None = None
    """A text file, or a .jsonl file of conversations; None for text in the model's own words."""
    tokens: int = USUAL_TOKENS
    """Most that are read."""
    seed: int = 0
    """Of the model's own words, and of every draw in a search."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InputError(f"a calibration on {self.tokens} tokens says nothing", f"give {USUAL_TOKENS}, say")


@dataclass(frozen=True)
class MixRequest:
    """Formats chosen unit by unit."""

    budget: Budget | None = None
    """What all units together may take; None where a plan is given."""
    plan: Path | None = None
    """A plan file to follow and not to search for."""
    seconds: float | None = None
    """Most that the search may take; None for ten minutes."""
    repair: bool = False
    """Whether units of 2 bits may be repaired by factors of low rank."""
    zero_points: bool = False
    """Whether blocks may say which code stands for 0."""
    powers_of_two: bool = False
    """Whether scales are powers of two."""
    bandwidth: float | None = None
    """Bytes a second of a machine for which the report says what the mix would give there."""

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.plan is None):
            raise InputError(
                "mixed weights need a budget or a plan, and not both", "add --budget 3.5bpw, or --plan FILE"
            )


@dataclass(frozen=True)
class DraftRequest:
    """A draft model to go with the target."""

    source: Path | None = None
    """A checkpoint of its own; None for a draft made of the target's layers."""
    vocabulary: int | None = None
    """Tokens its head keeps; 0 for as many as pay, None for all."""
    form: WeightFormat | None = None
    """Format of a checkpoint's weights; None for the target's usual one."""

    def __post_init__(self) -> None:
        if self.vocabulary is not None and self.vocabulary < 0:
            raise InputError(f"a head of {self.vocabulary} tokens cannot be made", "give a number from 1 up, or auto")
