"""Options of strategies that compare several continuations of a prompt, and of what steers an answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from .argument_types import OptionRecord, option

_MOST_BEAMS: Final = 64


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return False
    return True


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
        within="[-10, 10]",
        metavar="X",
    )
    best_first: bool = option(
        False,
        "Search a list of choices for the most probable ones exactly; n of them are returned, the best one first.",
    )
    extract: str | None = option(
        None, "A document in which to search for the most probable answers exactly: runs of its tokens.", metavar="TEXT"
    )
    cntp: bool = option(
        False,
        "Where the model is uncertain, sample several trials up to a punctuation mark, and go on with the likeliest.",
    )
    adadec: bool = option(
        False, "Where the model is uncertain, rank its likeliest tokens by looking some tokens ahead."
    )
    penalty_alpha: float = option(
        0.0,
        "Contrastive search: of the top_k likeliest tokens, or 4, take the one whose hidden state is least like those "
        "of the text before it; this is the weight of the likeness. The model must give hidden states.",
        least=0,
        most=1,
        metavar="X",
    )
    trials: int = option(4, "Number of trials of cntp and adadec.", least=2, most=_MOST_BEAMS, metavar="N")
    entropy: float = option(
        1.0, "Entropy in nats above which the model is uncertain, for cntp and adadec.", least=0, metavar="NATS"
    )
    vote: bool = option(
        False,
        "Let the answers of best_of vote: those with the same text form a group, weighted with the sum of their "
        "probabilities, and the most probable answers of the n heaviest groups are returned.",
    )
    vote_by: str | None = option(
        None,
        "Let the answers of best_of vote by the last match of this regular expression instead of their text.",
        accepts=_is_expression,
        range="a regular expression",
        metavar="REGEX",
    )

    @property
    def votes(self) -> bool:
        """Whether answers vote."""
        return self.vote or self.vote_by is not None


@dataclass(frozen=True)
class SteeringOptions(OptionRecord):
    """What a model that was loaded with adapters or control vectors answers with."""

    adapter: str | None = option(
        None, "Name of a LoRA adapter that the model was loaded with.", metavar="NAME", unset="the model itself"
    )
    control: str | None = option(
        None, "Name of a control vector that the model was loaded with.", metavar="NAME", unset="none"
    )
    control_strength: float = option(
        1.0,
        "Factor on the control vector; below 0, it steers the other way.",
        # Much larger factors only overflow, which would look like damaged weights.
        within="[-1000, 1000]",
        metavar="X",
    )
