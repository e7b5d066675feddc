"""The choice of drafters for an answer: all, none, or some; and how draft tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from ...errors import InputError
from .tree import Source

SOURCE_NAMES = {source: source.name.lower() for source in Source}
"""The user-visible name of each drafter, `other` for those from outside edge-run, and of an answer's grammar."""
_NAMES = {name: source for source, name in SOURCE_NAMES.items() if Source.ANCHOR < source < Source.GRAMMAR}


@dataclass(frozen=True)
class Speculation:
    """A choice of drafters. In every round only the draft tokens that pay are verified, often none."""

    sources: frozenset[Source]
    automatic: bool = False
    """Whether drafters that are not available are left out silently."""

    AUTO: ClassVar[Speculation]
    """Every available drafter."""
    OFF: ClassVar[Speculation]
    """Plain decoding: one token per pass."""

    def __post_init__(self) -> None:
        if not isinstance(self.sources, frozenset):
            raise InputError(
                f"Speculation({self.sources!r:.60}) is not a choice of drafters",
                "give Speculation.AUTO, Speculation.OFF, or Speculation.parse('suffix,model')",
            )

    @classmethod
    def of(cls, *sources: Source) -> Speculation:
        """Choose some drafters only.

        Raises:
            InputError: a source is not a drafter of edge-run.
        """
        if unknown := [source for source in sources if source not in _NAMES.values()]:
            raise InputError(f"{unknown[0]!r} is not a drafter", f"drafters are: {', '.join(_NAMES)}")
        return cls(frozenset(sources))

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """Parse a command line value: `auto`, `off`, or comma-separated names.

        Raises:
            InputError: the value is something else.
        """
        if text in ("auto", "off"):
            return cls.AUTO if text == "auto" else cls.OFF
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in _NAMES]:
            raise InputError(
                f"--spec is {text!r}, but there is no drafter {unknown[0]!r}",
                f"give auto, off, or some of {', '.join(_NAMES)}",
            )
        return cls.of(*(_NAMES[name] for name in names))

    def __repr__(self) -> str:
        return f"Speculation.parse({str(self)!r})"

    def __str__(self) -> str:
        if self.automatic:
            return "auto"
        return ",".join(name for name, source in _NAMES.items() if source in self.sources) or "off"


Speculation.AUTO = Speculation(frozenset(_NAMES.values()), automatic=True)
Speculation.OFF = Speculation(frozenset())


class DraftSampling(Enum):
    """How draft tokens are chosen from the distribution of a draft model, or of n-grams."""

    OFF = "off"
    """The most probable tokens; the text for a seed does not depend on drafting."""
    CHAIN = "chain"
    """A chain of sampled tokens, verified as a block (Sun et al. 2025)."""
    TREE = "tree"
    """Several sampled tokens at a node, verified one by one without replacement (Jeon et al. 2024)."""
    NGRAM = "ngram"
    """The same without a draft model: sampled from the model's own distributions after earlier occurrences of the last
    tokens (STAND: Song et al. 2025)."""
