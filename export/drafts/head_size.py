"""Tokens of a draft's LM head: their ranking, and their number by agreement lost against time gained.

Agreement means that draft and target prefer the same token, on text in which tokens were not counted. One pass of both
models gives it for all sizes at once: with the tokens in the order in which they would be kept, a head of n tokens
agrees where the target's token is among the first n and none of them has a higher logit in the draft. So a position
agrees from the place of the target's token in that order up to the place of the first token with a higher logit.

The time of a draft's step is linear in the number of rows of its head, so it is measured for two sizes. The size with
the most tokens per second wins, at the chain length that suits it best (Leviathan et al. 2023):

    (1 - a ** (g + 1)) / (1 - a) / (g * t_draft + t_target(g + 1))        a: agreement, g: drafted tokens

Tokens are counted in text that the target wrote itself, which is what a draft has to predict (VocabTrim). Some tokens
are always kept: special tokens, tokens that end a text, and the template that all texts begin with. Tokens that
do not occur come last, in the order of their ids, since earlier ids are more frequent in most vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...runtime.text.turn_markers import TokenArray, answer_start, read_markers
from ..bundle_content import read_manifest
from ..calibration.calibration_text import CalibrationText
from ..check.contract_session import ContractSession
from ..checkpoint.source import Float32Array

_MAX_CHAIN: Final = 7
TARGET_WIDTHS: Final = tuple(range(1, _MAX_CHAIN + 2))
"""Widths of the target's passes that have to be timed."""
_SIZES: Final = 64
"""Number of sizes that are considered, evenly spaced in their logarithm."""
_MIN_GAIN: Final = 1.01
"""Smallest speed-up for which a head is trimmed: times are not more precise, and missing tokens cost more on text of
another kind than the counted one."""
_LOGITS_BATCH: Final = 32
"""Number of positions whose logits are in memory at a time."""

Agreement = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


class TokenRanking(NamedTuple):
    """A vocabulary in descending order of importance."""

    order: Int64Array
    """Token ids, int64 [vocabulary]."""
    min_tokens: int
    """Number of tokens at the beginning of the order that are always kept."""

    def kept(self, tokens: int) -> TokenArray:
        """Ids of the first `tokens` tokens, in ascending order.

        Raises:
            InputError: `tokens` is less than `min_tokens` or more than the vocabulary.
        """
        if not self.min_tokens <= tokens <= self.order.size:
            raise InputError(
                f"a draft's head cannot have {tokens} tokens",
                f"give {self.min_tokens} to {self.order.size}: {self.min_tokens} are always kept",
            )
        return np.sort(self.order[:tokens])


def rank_tokens(texts: Sequence[TokenArray], vocabulary: int, always: Collection[int]) -> TokenRanking:
    """Order a vocabulary by the number of occurrences in texts.

    Args:
        texts: Token ids, int64 [n] each.
        vocabulary: Number of tokens of the head.
        always: Tokens that are always kept, besides those that all texts begin with; ids beyond the vocabulary are
            ignored.

    Raises:
        InputError: No text is given.
    """
    if not sum(map(len, texts)):
        raise InputError("no text to count tokens in", "give a text with --calibration")
    counts = np.bincount(np.concatenate(texts), minlength=vocabulary)[:vocabulary]
    kept = np.zeros(vocabulary, np.bool_)
    forced = [*always, *_common_prefix(texts)]
    kept[[token for token in forced if 0 <= token < vocabulary]] = True
    order = np.lexsort((np.arange(vocabulary), -counts, ~kept))
    # A head has at least one row.
    return TokenRanking(order.astype(np.int64), max(1, int(kept.sum())))


def ranked_text(folder: Path, vocabulary: int, text: CalibrationText) -> tuple[TokenRanking, list[int]]:
    """Rank a head's tokens by the calibration part of a text.

    Args:
        folder: The target's bundle, whose special tokens and tokens that end a text are always kept.
        vocabulary: Number of tokens of the head.
        text: Text of the target.

    Returns:
        The ranking; and for each held-out text the index of the first token that a draft would predict.

    Raises:
        InputError: No text is given.
    """
    markers = read_markers(folder)
    ranking = rank_tokens(text.calibration, vocabulary, markers.special | markers.ending)
    return ranking, [answer_start(each, markers) for each in text.held_out]


def kept_share(texts: Sequence[TokenArray], starts: Sequence[int], kept: TokenArray) -> float:
    """Share of the tokens of answers, which begin at `starts`, that are kept."""
    answers = np.concatenate([each[start:] for each, start in zip(texts, starts, strict=True)])
    return float(np.isin(answers, kept).mean())


def _common_prefix(texts: Sequence[TokenArray]) -> list[int]:
    """The tokens that all texts begin with; none for a single text, which does not show a template."""
    if len(texts) == 1:
        return []
    shortest = min(map(len, texts))
    same = np.all([text[:shortest] == texts[0][:shortest] for text in texts], axis=0)
    return [int(token) for token in texts[0][: int(np.argmin(np.append(same, False)))]]


def agreement_by_size(
    target: Path,
    draft: Path,
    ranking: TokenRanking,
    texts: Sequence[TokenArray],
    starts: Sequence[int],
    progress: Callable[[float], None],
) -> Agreement:
    """Measure the share of positions where draft and target prefer the same token, by the size of the draft's head.

    Args:
        target: The target's bundle.
        draft: The draft's bundle, with a whole head of the target's ids.
        ranking: Ranking of the head's tokens.
        texts: Token ids, int64 [n] each, at least 2; what exceeds either context is left out.
        starts: For each text, the index of the first token that a draft would predict.
        progress: Receives the fraction done.

    Returns:
        float64 [vocabulary + 1]; entry n is the agreement of a head of the first n tokens.

    Raises:
        ExportError: A graph does not run.
    """
    contexts = (read_manifest(bundle).architecture.context for bundle in (target, draft))
    longest = min(max(map(len, texts)), *contexts)
    sessions = (ContractSession(target, longest), ContractSession(draft, longest))

    def pairs() -> Iterable[tuple[Int64Array, Float32Array]]:
        for done, (text, begin) in enumerate(zip(texts, starts, strict=True), 1):
            for session in sessions:
                session.reset()
            read = text[: min(len(text) - 1, longest)]
            for start in range(0, len(read), _LOGITS_BATCH):
                tokens = read[start : start + _LOGITS_BATCH]
                prompt = max(0, begin - 1 - start)
                wanted, logits = (session.forward(tokens, np.arange(len(tokens)))[prompt:] for session in sessions)
                yield wanted.argmax(axis=1), logits[:, : ranking.order.size]
            progress(done / len(texts))

    return count_agreement(pairs(), ranking)


def count_agreement(pairs: Iterable[tuple[Int64Array, Float32Array]], ranking: TokenRanking) -> Agreement:
    """Agreement by the size of the head, float64 [vocabulary + 1].

    Args:
        pairs: Preferred tokens of the target, int64 [m], and logits of the draft, float32 [m, vocabulary].
        ranking: Ranking of the head's tokens.
    """
    size = ranking.order.size
    places = np.argsort(ranking.order)
    changes = np.zeros(size + 2, np.int64)
    positions = 0
    for preferred, logits in pairs:
        known = preferred < size  # a draft never agrees on a token that its head lacks
        wanted = np.where(known, preferred, 0)
        better = logits > logits[np.arange(len(logits)), wanted][:, None]
        first = np.where(known, places[wanted] + 1, size + 1)
        last = np.maximum(np.where(better, places, size).min(axis=1), first - 1)
        np.add.at(changes, first, 1)
        np.add.at(changes, last + 1, -1)
        positions += len(preferred)
    return np.cumsum(changes)[:-1] / max(1, positions)


def best_size(
    ranking: TokenRanking, agreement: Agreement, target: Mapping[int, float], whole: float, smallest: float
) -> int:
    """The size with the most tokens per second; the whole vocabulary where that gains less than `_MIN_GAIN`.

    Args:
        ranking: Ranking of the head's tokens.
        agreement: Agreement by the size of the head.
        target: Seconds of the target's passes by their widths, for `TARGET_WIDTHS`.
        whole: Seconds of a draft's step with a head of all tokens.
        smallest: Seconds of a draft's step with the smallest head.
    """
    sizes = np.unique(np.geomspace(ranking.min_tokens, ranking.order.size, _SIZES).round().astype(np.int64)).tolist()
    shares = [(size - sizes[0]) / max(1, sizes[-1] - sizes[0]) for size in sizes]
    speeds = [
        tokens_per_second(float(agreement[size]), smallest + share * max(0.0, whole - smallest), target)
        for size, share in zip(sizes, shares, strict=True)
    ]
    best = int(np.argmax(speeds))
    return int(sizes[best] if speeds[best] >= _MIN_GAIN * speeds[-1] else sizes[-1])


def tokens_per_second(agreement: float, step: float, target: Mapping[int, float]) -> float:
    """Expected tokens per second of draft chains of the best length, at least one token.

    Args:
        agreement: Share of positions where draft and target agree.
        step: Seconds of a draft's step.
        target: Seconds of the target's passes by their widths, for `TARGET_WIDTHS`.
    """
    return max(
        sum(agreement**accepted for accepted in range(chain + 1)) / (chain * step + target[chain + 1])
        for chain in range(1, _MAX_CHAIN + 1)
    )
