"""Rules that say which tokens of a block become known after a pass.

After every pass each masked position has a candidate: the token that the sampler chooses there. A rule looks at how
sure the model is of the candidates and says which of them to keep. Candidates of one pass are independent of each
other, so the more a rule keeps at once, the further the text may be from one that the model writes token by token.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ...models.block_diffusion import BlockDiffusion
from ..arguments.argument_types import OptionRecord, option

Chosen = npt.NDArray[np.bool_]
_PROPHET_GAPS: Final = (7.5, 5.0, 2.5)
"""Differences of logits in the first, second and last third of a block, as published."""


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
    size: int
    """Number of tokens of a block."""


class CommitRule(OptionRecord):
    """Says which candidates to keep. Where it keeps none, the one with the highest confidence is kept."""

    @abstractmethod
    def keeps(self, found: Candidates) -> Chosen:
        """Which candidates to keep: bool `[c]`."""

    @staticmethod
    def of(options: BlockOptions) -> CommitRule:
        """The rule that options ask for."""
        return options.block_rule if isinstance(options.block_rule, CommitRule) else Threshold()

    @staticmethod
    def parse(text: str) -> CommitRule:
        """Parse a name and its numbers, such as `local-leap:0.9,4,0.75`; numbers may be left out from the last one on.

        Raises:
            InputError: the text is something else, or a number is out of range.
        """
        name, _, numbers = text.partition(":")
        kind = COMMIT_RULES.get(name)
        try:
            values = [int(each) if each.isdecimal() else float(each) for each in numbers.split(",")] if numbers else []
        except ValueError:
            kind, values = None, []
        if kind is None or len(values) > len(fields(kind)):  # type: ignore[arg-type]
            raise InputError(f"block_rule is {text!r:.60}", f"give one of {', '.join(COMMIT_RULES)} with its numbers")
        return kind(*values)


def most_confident(found: Candidates, count: int) -> Chosen:
    """The `count` candidates with the highest confidence; of equal ones the first in the text."""
    kept = np.zeros(found.places.size, np.bool_)
    kept[np.argsort(-found.confidence, kind="stable")[:count]] = True
    return kept


@dataclass(frozen=True)
class InOrder(CommitRule):
    """The first candidates in the text. One at a time is the order of ordinary decoding.

    Source: SDAR's sequential order.
    """

    count: int = option(1, "Number of tokens that a pass keeps.", least=1, label="block rule: in-order N")

    def keeps(self, found: Candidates) -> Chosen:
        """The first ones."""
        return np.arange(found.places.size) < self.count


@dataclass(frozen=True)
class Fixed(CommitRule):
    """A fixed number of candidates, those with the highest confidence.

    Source: LLaDA (arXiv 2502.09992), remasking by low confidence.
    """

    count: int = option(1, "Number of tokens that a pass keeps.", least=1, label="block rule: fixed N")

    def keeps(self, found: Candidates) -> Chosen:
        """The most confident ones."""
        return most_confident(found, self.count)


@dataclass(frozen=True)
class Threshold(CommitRule):
    """All candidates of at least some confidence.

    Source: Fast-dLLM (arXiv 2505.22618).
    """

    least: float = option(0.9, "Least confidence.", least=0, most=1, label="block rule: threshold P")

    def keeps(self, found: Candidates) -> Chosen:
        """Those that are confident enough."""
        return found.confidence >= self.least


@dataclass(frozen=True)
class Factor(CommitRule):
    """The n most confident candidates for the largest n with (n + 1)(1 - confidence of the n-th) below a factor.

    Under this bound the most likely tokens of the product of the distributions are those of the joint one.

    Source: Fast-dLLM (arXiv 2505.22618), theorem 1.
    """

    factor: float = option(1.0, "The factor.", least=0, label="block rule: factor F")

    def keeps(self, found: Candidates) -> Chosen:
        """As many as the bound allows."""
        ranked = -np.sort(-found.confidence)
        fits = (np.arange(ranked.size) + 2) * (1 - ranked) < self.factor
        return most_confident(found, int(np.flatnonzero(fits).max(initial=-1)) + 1)


@dataclass(frozen=True)
class LowEntropy(CommitRule):
    """All candidates of distributions with little entropy.

    Source: EB-Sampler (arXiv 2505.24857), position by position.
    """

    most: float = option(0.3, "Largest entropy, in nats.", least=0, label="block rule: entropy H")

    def keeps(self, found: Candidates) -> Chosen:
        """Those of certain distributions."""
        return found.entropy <= self.most


@dataclass(frozen=True)
class TotalLoss(CommitRule):
    """The most confident candidates as long as their negative log-probabilities stay within a budget together.

    Source: Early termination by total loss.
    """

    nats: float = option(0.3, "Largest sum of negative log-probabilities, in nats.", least=0, label="block rule: nll B")

    def keeps(self, found: Candidates) -> Chosen:
        """Those within the budget."""
        losses = np.cumsum(-np.log(-np.sort(-np.maximum(found.confidence, 1e-300))))
        return most_confident(found, int((losses <= self.nats).sum()))


@dataclass(frozen=True)
class Prophet(CommitRule):
    """All candidates at once, as soon as the two best logits are far enough apart on average; before, one at a time.

    Source: Prophet (arXiv 2508.19982).
    """

    scale: float = option(1.0, "Factor on the published gaps.", least=0, label="block rule: prophet S")

    def keeps(self, found: Candidates) -> Chosen:
        """All, or the most confident one."""
        known = 1 - found.places.size / found.size
        gap = _PROPHET_GAPS[min(int(known * len(_PROPHET_GAPS)), len(_PROPHET_GAPS) - 1)]
        return np.full(found.places.size, bool(found.gap.mean() >= self.scale * gap))


@dataclass(frozen=True)
class LocalLeap(CommitRule):
    """Confident candidates, and less confident ones near them.

    Source: LocalLeap (arXiv 2510.07081).
    """

    anchor: float = option(0.9, "Least confidence of an anchor.", least=0, most=1, label="block rule: local-leap P")
    radius: int = option(4, "Distance from an anchor in tokens.", least=0, label="block rule: local-leap W")
    near: float = option(0.75, "Least confidence near an anchor.", least=0, most=1, label="block rule: local-leap Q")

    def keeps(self, found: Candidates) -> Chosen:
        """Anchors and their neighbours."""
        anchors = found.confidence >= self.anchor
        distance = np.abs(found.places[:, None] - found.places[anchors])
        is_near: Chosen = (distance <= self.radius).any(axis=1)
        return anchors | (is_near & (found.confidence >= self.near))


@dataclass(frozen=True)
class Stable(CommitRule):
    """Candidates that have stayed the same, and are not unlikely.

    Source: R2-dLLM's stable tokens.
    """

    passes: int = option(2, "Passes with the same candidate.", least=1, label="block rule: stable N")
    least: float = option(0.5, "Least confidence.", least=0, most=1, label="block rule: stable P")

    def keeps(self, found: Candidates) -> Chosen:
        """The steady ones."""
        return (found.steady >= self.passes) & (found.confidence >= self.least)


COMMIT_RULES: Final[dict[str, type[CommitRule]]] = {
    "in-order": InOrder,
    "fixed": Fixed,
    "threshold": Threshold,
    "factor": Factor,
    "entropy": LowEntropy,
    "nll": TotalLoss,
    "prophet": Prophet,
    "local-leap": LocalLeap,
    "stable": Stable,
}


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.block_rule, str):
            object.__setattr__(self, "block_rule", CommitRule.parse(self.block_rule))


_IN_ORDER_ONLY: Final = (
    *("response_format", "tools", "exact", "lossy", "branch", "suffix", "grammar_aligned", "strategies"),
    *("num_beams", "best_first", "extract", "cntp", "adadec", "penalty_alpha", "draft_sampling"),
)
"""Options for which every token has to be chosen behind the ones before it."""


def check_block_options(options: BlockOptions, blocks: BlockDiffusion | None) -> None:
    """Check that options go with a model that has these `blocks`, None for one that generates token by token.

    Raises:
        InputError: they do not.
    """
    if blocks is None and options.block_rule is not None:
        raise InputError("block_rule is given, and this model generates token by token", "leave it out")
    defaults = {each.name: each.default for each in fields(options)}
    for name in _IN_ORDER_ONLY if blocks is not None else ():
        if (value := getattr(options, name, None)) and value != defaults[name]:
            raise InputError(f"{name} is given, and this model fills blocks of tokens", f"leave {name} out")
