"""Options of strategies that compare several continuations of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .argument_types import OptionRecord, option

_MOST_BEAMS: Final = 64
_MOST_LENGTH_PENALTY: Final = 10.0


@dataclass(frozen=True)
class SearchOptions(OptionRecord):
    """How several continuations of a prompt are compared; the defaults compare none."""

    num_beams: int = option(
        1,
        "Search for the answer with this number of beams (beam search) instead of choosing token by token; n of them "
        "are returned, the best one first. Their text comes at the end.",
        least=1,
        most=_MOST_BEAMS,
        flags=("--num-beams", "--beams"),
        metavar="N",
    )
    beam_groups: int = option(
        1, "Number of groups of beams that differ from each other (diverse beam search).", least=1, metavar="N"
    )
    diversity_penalty: float = option(
        0.0,
        "What a token's log-probability loses for every beam of an earlier group that has it at the same place.",
        least=0,
        metavar="X",
    )
    length_penalty: float = option(
        1.0,
        "Exponent of the length by which the log-probabilities of beams are divided; 0 for their sum.",
        accepts=lambda exponent: abs(exponent) <= _MOST_LENGTH_PENALTY,
        range=f"between -{_MOST_LENGTH_PENALTY:g} and {_MOST_LENGTH_PENALTY:g}",
        metavar="X",
    )
