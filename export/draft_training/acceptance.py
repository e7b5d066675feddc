"""How much of a draft its target accepts, on answers that the target wrote greedily."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

CHAIN: Final = 4
"""Number of draft tokens of a chain whose acceptance length is reported."""
SCORE: Final = "tokens_per_pass"
"""The figure by which checkpoints are compared."""


@dataclass(frozen=True)
class AnswerAcceptance:
    """A draft compared with one answer of `n` tokens, whose first token the prompt's pass gives."""

    matches: npt.NDArray[np.bool_]
    """[depth, n]: whether a chain has token i as its token number `depth`, if all its tokens before are right."""
    expected: npt.NDArray[np.float64]
    """[n]: sum over tokens of min(p, q), the probability that a sampled token is accepted at position i."""


def chain_passes(matches: npt.NDArray[np.bool_]) -> int:
    """Number of verifying passes that an answer takes with greedy chains.

    Each pass gives the accepted tokens of a chain and one more, which the target chooses.

    Args:
        matches: see `AnswerAcceptance`; chains have as many tokens as it has rows.
    """
    depths, length = matches.shape
    place, passes = 1, 0
    while place < length:
        accepted = 0
        while accepted < depths and place + accepted < length and matches[accepted, place + accepted]:
            accepted += 1
        place += accepted + 1
        passes += 1
    return passes


def acceptance_figures(answers: Sequence[AnswerAcceptance]) -> dict[str, float]:
    """Figures of a draft over several answers.

    Returns:
        `tokens_per_pass`: the acceptance length, mean tokens of a verifying pass with greedy chains of
        `CHAIN` tokens; `agreement`: share of positions where the first token of a chain is the target's; `acceptance`:
        mean of the sum of min(p, q).
    """
    passes = sum(chain_passes(each.matches) for each in answers)
    positions = sum(max(0, each.matches.shape[1] - 1) for each in answers)
    return {
        SCORE: positions / max(1, passes),
        "agreement": float(sum(each.matches[0, 1:].sum() for each in answers)) / max(1, positions),
        "acceptance": float(sum(each.expected[1:].sum() for each in answers)) / max(1, positions),
    }
