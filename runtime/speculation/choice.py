"""Who may guess ahead: all drafters, none, or some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...errors import InputError
from .tree import Source

_NAMES = {
    "suffix": Source.SUFFIX,
    "history": Source.HISTORY,
    "ngram": Source.NGRAM,
    "recycle": Source.RECYCLED,
    "model": Source.MODEL,
}
SOURCE_NAMES = {source: name for name, source in _NAMES.items()}
"""What drafters are called where people read or write it."""


@dataclass(frozen=True)
class Speculation:
    """A choice of drafters. In every round the guesses that pay are verified, whoever made them, and often none."""

    sources: frozenset[Source]
    automatic: bool = False
    """Whether drafters that are not at hand are silently left out."""

    AUTO: ClassVar[Speculation]
    """Every drafter at hand."""
    OFF: ClassVar[Speculation]
    """Plain decoding: one token a pass."""

    @classmethod
    def of(cls, *sources: Source) -> Speculation:
        """Some drafters only.

        Raises:
            InputError: one of them is not a drafter of edge-run's.
        """
        if unknown := [source for source in sources if source not in SOURCE_NAMES]:
            raise InputError(f"{unknown[0]!r} is not a drafter", f"drafters are: {', '.join(_NAMES)}")
        return cls(frozenset(sources))

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """The choice that the command line writes as `auto`, `off`, or names with commas between.

        Raises:
            InputError: it is something else.
        """
        if text in ("auto", "off"):
            return cls.AUTO if text == "auto" else cls.OFF
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in _NAMES]:
            raise InputError(
                f"spec is {text!r}: {unknown[0]!r} is unknown", f"give auto, off, or some of {', '.join(_NAMES)}"
            )
        return cls.of(*(_NAMES[name] for name in names))

    def __str__(self) -> str:
        if self.automatic:
            return "auto"
        return ",".join(name for name, source in _NAMES.items() if source in self.sources) or "off"


Speculation.AUTO = Speculation(frozenset(SOURCE_NAMES), automatic=True)
Speculation.OFF = Speculation(frozenset())
