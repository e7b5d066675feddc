"""Rules that say which tokens of a block become known after a pass.

After every pass each masked position has a candidate: the token that the sampler chooses there. A rule looks at how
sure the model is of the candidates and says which of them to keep. Candidates of one pass are independent of each
other, so the more a rule keeps at once, the further the text may be from one that the model writes token by token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, InputError
from ...models.manifest import BlockDiffusion
from ...models.safetensors_file import read_safetensors
from ..arguments.argument_types import Amount, Count, NamedRule, Option, OptionRecord, Share, given_of, option

if TYPE_CHECKING:
    from ..strategies.strategy import Strategy

Chosen = npt.NDArray[np.bool_]
_PROPHET_GAPS: Final = (7.5, 5.0, 2.5)
"""Differences of logits in the first, second and last third of a block, as published."""
_DISTANCE: Final = Option("", least=0)


class Candidates(NamedTuple):
    """The candidates of the `c` masked positions of a block, in the order of the text."""

    places: npt.NDArray[np.int64]
    """Places `[c]` in the block, from 0."""
    confidence: npt.NDArray[np.float64]
    """The model's probability `[c]` of each candidate, without temperature and filters."""
    gap: npt.NDArray[np.float64]
    """Difference `[c]` of the two largest logits."""
    entropy: npt.NDArray[np.float64]
    """Entropy `[c]` of the model's distribution, in nats."""
    steady: npt.NDArray[np.int64]
    """Number `[c]` of passes one after another that had this candidate, this one included."""
    ends: Chosen
    """Whether each candidate `[c]` ends a line; false for rules without `reads_line_ends`."""
    size: int
    """Number of tokens of a block."""


def most_confident(found: Candidates, n: Count = 1) -> Chosen:
    """The `n` candidates with the highest confidence; of equal ones the first in the text.

    Source: LLaDA (arXiv 2502.09992), remasking by low confidence.
    """
    kept = np.zeros(found.places.size, np.bool_)
    kept[np.argsort(-found.confidence, kind="stable")[:n]] = True
    return kept


def _in_order(found: Candidates, n: Count = 1) -> Chosen:
    """The first candidates in the text. One at a time is the order of ordinary decoding.

    Source: SDAR's sequential order.
    """
    return np.arange(found.places.size) < n


def _threshold(found: Candidates, p: Share = 0.9) -> Chosen:
    """All candidates of at least some confidence.

    Source: Fast-dLLM (arXiv 2505.22618).
    """
    return found.confidence >= p


def _factor(found: Candidates, f: Amount = 1.0) -> Chosen:
    """The n most confident candidates for the largest n with (n + 1)(1 - confidence of the n-th) below a factor.

    Under this bound the most likely tokens of the product of the distributions are those of the joint one.

    Source: Fast-dLLM (arXiv 2505.22618), theorem 1.
    """
    ranked = -np.sort(-found.confidence)
    fits = (np.arange(ranked.size) + 2) * (1 - ranked) < f
    return most_confident(found, int(np.flatnonzero(fits).max(initial=-1)) + 1)


def _low_entropy(found: Candidates, h: Amount = 0.3) -> Chosen:
    """All candidates of distributions with an entropy of at most so many nats.

    Source: EB-Sampler (arXiv 2505.24857), position by position.
    """
    return found.entropy <= h


def _total_loss(found: Candidates, b: Amount = 0.3) -> Chosen:
    """The most confident candidates whose negative log-probabilities stay within a budget together, in nats.

    Source: Early termination by total loss.
    """
    losses = np.cumsum(-np.log(-np.sort(-np.maximum(found.confidence, 1e-300))))
    return most_confident(found, int((losses <= b).sum()))


def _prophet(found: Candidates, s: Amount = 1.0) -> Chosen:
    """All candidates at once, as soon as the two best logits are far enough apart on average; before, one at a time.

    The value is a factor on the published gaps. Source: Prophet (arXiv 2508.19982).
    """
    known = 1 - found.places.size / found.size
    gap = _PROPHET_GAPS[min(int(known * len(_PROPHET_GAPS)), len(_PROPHET_GAPS) - 1)]
    return np.full(found.places.size, bool(found.gap.mean() >= s * gap))


def _local_leap(found: Candidates, p: Share = 0.9, w: Annotated[int, _DISTANCE] = 4, q: Share = 0.75) -> Chosen:
    """Confident candidates, and less confident ones within a number of tokens of them.

    Source: LocalLeap (arXiv 2510.07081).
    """
    anchors = found.confidence >= p
    distance = np.abs(found.places[:, None] - found.places[anchors])
    is_near: Chosen = (distance <= w).any(axis=1)
    return anchors | (is_near & (found.confidence >= q))


def _stable(found: Candidates, n: Count = 2, p: Share = 0.5) -> Chosen:
    """Candidates that have stayed the same in a number of passes, and are not unlikely.

    Source: R2-dLLM's stable tokens.
    """
    return (found.steady >= n) & (found.confidence >= p)


def _unit(found: Candidates, p: Share = 0.9) -> Chosen:
    """A unit of text: the first candidates, up to the first one that is not confident enough.

    Source: lexical unit decoding (arXiv 2405.15208).
    """
    kept: Chosen = np.logical_and.accumulate(found.confidence >= p)
    return kept


def _ada_block(found: Candidates, p: Share = 0.9, e: Share = 0.3, n: Count = 16) -> Chosen:
    """Confident candidates up to the end of a line, so that blocks end where sentences and steps do.

    Without a line's end of the confidence `e`, they are within `n` tokens. Source: AdaBlock-dLLM (arXiv 2509.26432).
    There the end of a block stays as it was found in its first pass; here it is found anew in every pass, and the line
    ends that are known no longer count.
    """
    ends = np.where(found.ends, found.confidence, -1)
    last = int(ends.argmax())
    inside = found.places <= found.places[last] if ends[last] >= e else found.places < found.places[0] + n
    kept: Chosen = inside & (found.confidence >= p)
    kept[np.where(inside, found.confidence, -1).argmax()] = True
    return kept


def _learned(found: Candidates, file: str = "", p: Share = 0.9) -> Chosen:
    """Candidates that a small network takes for those of the finished text, given the confidences of the whole block.

    The file has `hidden.weight` `[h, B]`, `hidden.bias` `[h]`, `output.weight` `[B, h]` and `output.bias` `[B]`, of a
    block of B tokens. Source: Learn2PD (arXiv 2509.25188).

    Raises:
        InputError: it is for blocks of another size.
    """
    weights = _network(file)
    if (size := weights["output.bias"].size) != found.size:
        raise InputError(f"{file} is for blocks of {size} tokens, not {found.size}", "give another block_rule")
    confidence = np.ones(size)
    confidence[found.places] = found.confidence
    hidden = np.maximum(weights["hidden.weight"] @ confidence + weights["hidden.bias"], 0)
    scores = (weights["output.weight"] @ hidden + weights["output.bias"])[found.places]
    kept: Chosen = 1 / (1 + np.exp(-scores)) >= p
    return kept


@cache
def _network(file: str) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of a `Learned` network, with shapes that go together."""
    try:
        tensors = {
            name: found.items(name, 0, math.prod(found.shape)).reshape(found.shape)
            for name, found in read_safetensors(Path(file)).items()
        }
        hidden, size = tensors["hidden.weight"].shape
        shapes = {"hidden.weight": (hidden, size), "hidden.bias": (hidden,)}
        shapes |= {"output.weight": (size, hidden), "output.bias": (size,)}
        right = {name: each.shape for name, each in tensors.items()} == shapes
    except (OSError, KeyError, ValueError, CheckpointError):
        right = False
    if not right:
        raise InputError(
            f"block_rule: {file!r:.200} is not a network for this rule", "give learned:FILE, see docs/blocks.md"
        )
    return tensors


COMMIT_RULES: Final[Mapping[str, Callable[..., Chosen]]] = {
    "in-order": _in_order,
    "fixed": most_confident,
    "threshold": _threshold,
    "factor": _factor,
    "entropy": _low_entropy,
    "nll": _total_loss,
    "prophet": _prophet,
    "local-leap": _local_leap,
    "stable": _stable,
    "unit": _unit,
    "ada-block": _ada_block,
    "learned": _learned,
}
"""The rules by name. A rule says which candidates to keep, bool `[c]`, by the numbers that docs/blocks.md lists."""


class CommitRule(NamedRule):
    """Says which candidates to keep. Where it keeps none, the one with the highest confidence is kept."""

    option = "block_rule"
    table = COMMIT_RULES
    hint = f"give one of {', '.join(COMMIT_RULES)} with its numbers"

    def __post_init__(self) -> None:
        if self.name == "learned":
            _network(self.values[0])

    @property
    def reads_line_ends(self) -> bool:
        """Whether it reads `Candidates.ends`."""
        return self.name == "ada-block"


@dataclass(frozen=True)
class BlockOptions(OptionRecord):
    """How a model that fills blocks of masked tokens does so."""

    block_rule: CommitRule | str | None = option(  # noqa: RUF009 -- it returns a field
        None,
        f"Which tokens of a block a pass keeps, for models that fill blocks: {', '.join(COMMIT_RULES)}, each with its "
        "numbers, as in threshold:0.9; docs/blocks.md lists them.",
        metavar="RULE",
        unset="threshold:0.9",
    )
    block_size: int | None = option(
        None,
        "Number of tokens of a block, for models all of whose tokens attend to each other; others have their own.",
        least=1,
        unset="the model's",
    )
    lossy_block_cache: bool = option(
        False,
        "Keep what was computed of the tokens outside of a block while the block is filled, for models all of whose "
        "tokens attend to each other. Faster, and an approximation.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.block_rule, str):
            object.__setattr__(self, "block_rule", CommitRule.parse(self.block_rule))


_IN_ORDER_ONLY: Final = (
    *("response_format", "tools", "exact", "lossy", "branch", "suffix", "grammar_aligned"),
    *("num_beams", "best_first", "extract", "cntp", "adadec", "penalty_alpha", "draft_sampling"),
)
"""Options for which every token has to be chosen behind the ones before it."""


def check_block_options(options: BlockOptions, blocks: BlockDiffusion | None) -> None:
    """Check that options go with a model that has these `blocks`, None for one that generates token by token.

    Raises:
        InputError: they do not.
    """
    for name in ("block_rule", "block_size", "lossy_block_cache"):
        if getattr(options, name) and (blocks is None or (name != "block_rule" and not blocks.bidirectional)):
            has = "generates token by token" if blocks is None else "has blocks of its own"
            raise InputError(f"{name} is given, and this model {has}", "leave it out")
    for name in given_of(options, _IN_ORDER_ONLY if blocks is not None else ()):
        raise InputError(f"{name} is given, and this model fills blocks of tokens", f"leave {name} out")
    guides = getattr(options, "strategies", ()) if blocks is not None else ()
    if len(guides) > 1 or not all(_masks_prompt(each) for each in guides):
        what = "strategies are given, and this model fills blocks of tokens"
        raise InputError(what, "give none, or negative-prompt or cad without another prompt: then the prompt is masked")


def _masks_prompt(strategy: Strategy) -> bool:
    """Whether a strategy compares with a second reader, and has no prompt of its own for it."""
    own = [getattr(strategy, name, None) for name in ("text", "system")]
    return strategy.has_reader and not strategy.reads_anchor and own == [None, None]
