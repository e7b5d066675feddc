"""The protocol by which long work reports its progress."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of long work."""

    def __call__(self, stage: str, fraction: float) -> None:
        """Show progress.

        Args:
            stage: a word or two for the user.
            fraction: share of that stage that is done, 0 to 1.
        """
        ...


def silent(stage: str, fraction: float) -> None:
    """Show nothing; the default `Progress`."""
