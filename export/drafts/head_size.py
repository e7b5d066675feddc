"""How many tokens a draft's head should have: what it loses in agreement against what it gains in time.

Agreement is that of the draft's likeliest token with the target's, over text that was not counted. For all sizes at
once it follows from one pass of both models: with the tokens in the order in which they would be kept, a head of n
tokens agrees where the target's token is among the first n and none of them has a higher logit in the draft. So a
position agrees from the target token's place in that order up to the place of the first better one.

The time of a draft's step falls in a straight line with the rows of its head, so two sizes are measured. The size with
the most tokens a second wins, for the length of chain that suits it best (Leviathan et al. 2023):

    (1 - a ** (g + 1)) / (1 - a) / (g * t_draft + t_target(g + 1))        a: agreement, g: drafted tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ...models.manifest import MANIFEST_NAME, Architecture, Manifest
from ...runtime.text.turn_markers import TokenArray
from ..check.contract_session import ContractSession
from .frequencies import Ranking

_LONGEST_CHAIN: Final = 7
TARGET_ROWS: Final = tuple(range(1, _LONGEST_CHAIN + 2))
"""Rows of a target's pass that have to be timed."""
_SIZES: Final = 64
"""How many sizes are considered, evenly spaced in their logarithm."""

_WORTH_IT: Final = 1.01
"""Times are not known better, and what the head lacks is missed wherever text is of another kind than what was
counted."""
_TOGETHER: Final = 32
"""Rows of logits in memory at a time."""

Agreement = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StepTimes:
    """What passes take, in seconds."""

    target: Mapping[int, float]
    """By rows, `TARGET_ROWS`."""
    whole: float
    """A draft's step with a head of all tokens."""
    least: float
    """A draft's step with a head of the fewest tokens."""

    def of_head(self, tokens: int, ranking: Ranking) -> float:
        """A draft's step with a head of that many tokens."""
        most = ranking.order.size
        share = (tokens - ranking.least) / max(1, most - ranking.least)
        return self.least + share * max(0.0, self.whole - self.least)


def agreement_by_size(
    target: Path,
    draft: Path,
    ranking: Ranking,
    texts: Sequence[TokenArray],
    starts: Sequence[int],
    progress: Callable[[float], None],
) -> Agreement:
    """Share of positions where draft and target prefer the same token, by the size of the draft's head.

    Args:
        target: its bundle.
        draft: its bundle, with a whole head of the target's ids.
        ranking: of the head's tokens.
        texts: ids int64 [n] each, at least 2; what does not fit the context of both is left out.
        starts: of each text, the first token that a draft would have to guess.
        progress: hears the fraction done.

    Returns:
        float64 [vocabulary + 1]; entry n is that of a head of the first n tokens.

    Raises:
        ExportError: a graph does not run.
    """
    place = np.empty(ranking.order.size, np.int64)
    place[ranking.order] = np.arange(ranking.order.size)
    changes = np.zeros(ranking.order.size + 2, np.int64)
    architectures = [_architecture(bundle) for bundle in (target, draft)]
    longest = min(max(map(len, texts)), *(each.context for each in architectures))
    sessions = [
        ContractSession(bundle, each, longest) for bundle, each in zip((target, draft), architectures, strict=True)
    ]
    positions = 0
    for done, (text, begin) in enumerate(zip(texts, starts, strict=True), 1):
        for session in sessions:
            session.length = 0
        read = text[: min(len(text) - 1, longest)]
        for start in range(0, len(read), _TOGETHER):
            tokens = read[start : start + _TOGETHER]
            known = max(0, begin - 1 - start)
            wanted, logits = (session.forward(tokens, np.arange(len(tokens)))[known:] for session in sessions)
            first, last = agreeing_sizes(wanted.argmax(axis=1), logits[:, : place.size], place)
            np.add.at(changes, first, 1)
            np.add.at(changes, last + 1, -1)
            positions += len(wanted)
        progress(done / len(texts))
    return np.cumsum(changes)[:-1] / max(1, positions)


def agreeing_sizes(preferred: Int64Array, logits: Float32Array, place: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Sizes of a draft's head with which it agrees with its target.

    Args:
        preferred: the target's likeliest tokens, int64 [m]. Those that the draft's head lacks, it never says.
        logits: the draft's, float32 [m, V].
        place: of each token in the order in which tokens are kept, int64 [V].

    Returns:
        The smallest and the largest size, int64 [m] each; the largest is one less where no size agrees.
    """
    size = place.size
    known = preferred < size
    wanted = np.where(known, preferred, 0)
    better = logits > logits[np.arange(len(logits)), wanted][:, None]
    last = np.where(better, place, size).min(axis=1)
    first = np.where(known, place[wanted] + 1, size + 1)
    return first, np.maximum(last, first - 1)


def best_size(ranking: Ranking, agreement: Agreement, times: StepTimes) -> int:
    """The size of head with the most tokens a second; all tokens where that gains less than `_WORTH_IT`."""
    sizes = np.unique(np.geomspace(ranking.least, ranking.order.size, _SIZES).round().astype(np.int64))
    speeds = [speed(float(agreement[size]), times.of_head(int(size), ranking), times.target) for size in sizes]
    best = int(np.argmax(speeds))
    return int(sizes[best]) if speeds[best] >= _WORTH_IT * speeds[-1] else int(sizes[-1])


def speed(agreement: float, step: float, target: Mapping[int, float]) -> float:
    """Expected tokens a second of a chain of the best length, at least one, from a draft's step and a target's passes
    in seconds."""
    return max(
        sum(agreement**kept for kept in range(chain + 1)) / (chain * step + target[chain + 1])
        for chain in range(1, _LONGEST_CHAIN + 1)
    )


def _architecture(bundle: Path) -> Architecture:
    return Manifest.from_json((bundle / MANIFEST_NAME).read_bytes()).architecture
