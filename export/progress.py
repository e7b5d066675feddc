"""How an export says how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Hears how far an export is."""

    def __call__(self, stage: str, fraction: float) -> None:
        """`stage` is a word or two for the user; `fraction` of that stage is done, 0 to 1."""
        ...


def silent(stage: str, fraction: float) -> None:
    """A `Progress` that shows nothing."""
