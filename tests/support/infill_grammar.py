"""A tiny language whose lines follow from their neighbours, for a model that is trained to fill in the middle of it.

A program opens, reads and closes names one after the other, `open f`, `read f`, `close f`, each on a line; between two
lines there may be a note, `note x`, whose letter nothing tells. A line that is missing is certain unless it is a note.
"""

from __future__ import annotations

import random
from itertools import count as numbers
from itertools import islice
from typing import Final, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL: Final = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
"""Ids 0 to 3."""
TRAINING: Final = range(96_000)
"""Seeds of the programs that the model is trained on."""
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_NOTES: Final = 0.15
"""Share of lines that are followed by a note."""


class Hole(NamedTuple):
    """A program without one of its lines."""

    prefix: str
    line: str
    """The line, with its end."""
    suffix: str

    @property
    def is_certain(self) -> bool:
        """Whether the line follows from the others."""
        return not self.line.startswith("note")


def hole(seed: int, names: int = 3) -> Hole:
    """A program of that many names without a line."""
    choice = random.Random(seed)
    lines: list[str] = []
    for name in choice.sample(_LETTERS, names):
        for verb in ("open", "read", "close"):
            lines.append(f"{verb} {name}\n")
            if choice.random() < _NOTES:
                lines.append(f"note {choice.choice(_LETTERS)}\n")
    place = choice.randrange(1, len(lines))
    return Hole("".join(lines[:place]), lines[place], "".join(lines[place + 1 :]))


def held_out(count: int) -> list[Hole]:
    """Programs without a line that the model has not seen."""
    seen = {hole(seed) for seed in TRAINING}
    return list(islice((found for seed in numbers(10**9) if (found := hole(seed)) not in seen), count))


def tokenizer() -> Tokenizer:
    """A token for every letter, the space, the line end, and the special tokens."""
    characters = [*SPECIAL, *_LETTERS, "Ġ", "Ċ"]
    library = Tokenizer(models.BPE({character: index for index, character in enumerate(characters)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return library
