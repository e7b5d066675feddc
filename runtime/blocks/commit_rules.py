"""Rules that say which tokens of a block become known after a pass.

After every pass each masked position has a candidate: the token that the sampler chooses there. A rule looks at how
sure the model is of the candidates and says which of them to keep. Candidates of one pass are independent of each
other, so the more a rule keeps at once, the further the text may be from one that the model writes token by token.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import CheckpointError, InputError
from ...models.block_diffusion import BlockDiffusion
from ...models.safetensors_file import read_safetensors
from ..arguments.argument_types import OptionRecord, option

if TYPE_CHECKING:
    from ..strategies.strategy import Strategy

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
    ends: Chosen
    """Whether each candidate `[c]` ends a line; false for rules without `reads_line_ends`."""
    size: int
    """Number of tokens of a block."""


class CommitRule(OptionRecord):
    """Says which candidates to keep. Where it keeps none, the one with the highest confidence is kept."""

    reads_line_ends: ClassVar[bool] = False
    """Whether it reads `Candidates.ends`."""

    @abstractmethod
    def keeps(self, found: Candidates) -> Chosen:
        """Which candidates to keep: bool `[c]`."""

    @staticmethod
    def parse(text: str) -> CommitRule:
        """Parse a name and its numbers, such as `local-leap:0.9,4,0.75`; numbers may be left out from the last one on.

        Raises:
            InputError: the text is something else, or a number is out of range.
        """
        name, _, numbers = text.partition(":")
        kind = COMMIT_RULES.get(name)
        values = [_parsed(each) for each in numbers.split(",")] if numbers else []
        if kind is None or len(values) > len(fields(kind)):  # type: ignore[arg-type]
            raise InputError(f"block_rule is {text!r:.60}", f"give one of {', '.join(COMMIT_RULES)} with its numbers")
        return kind(*values)


def _parsed(value: str) -> float | int | str:
    try:
        return int(value) if value.isdecimal() else float(value)
    except ValueError:
        return value


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


@dataclass(frozen=True)
class Unit(CommitRule):
    """A unit of text: the first candidates, up to the first one that is not confident enough.

    Source: lexical unit decoding (arXiv 2405.15208).
    """

    least: float = option(0.9, "Least confidence.", least=0, most=1, label="block rule: unit P")

    def keeps(self, found: Candidates) -> Chosen:
        """The first ones as long as they are confident."""
        kept: Chosen = np.logical_and.accumulate(found.confidence >= self.least)
        return kept


@dataclass(frozen=True)
class AdaBlock(CommitRule):
    """Confident candidates up to the end of a line, so that blocks end where sentences and steps do.

    Source: AdaBlock-dLLM (arXiv 2509.26432). There the end of a block stays as it was found in its first pass; here it
    is found anew in every pass, and the line ends that are known no longer count.
    """

    reads_line_ends: ClassVar[bool] = True
    least: float = option(0.9, "Least confidence.", least=0, most=1, label="block rule: ada-block P")
    ending: float = option(0.3, "Least confidence of a line's end.", least=0, most=1, label="block rule: ada-block E")
    length: int = option(16, "Tokens of a block without such an end.", least=1, label="block rule: ada-block N")

    def keeps(self, found: Candidates) -> Chosen:
        """Those within the block, at least one."""
        ends = np.where(found.ends, found.confidence, -1)
        last = int(ends.argmax())
        if ends[last] >= self.ending:
            inside = found.places <= found.places[last]
        else:
            inside = found.places < found.places[0] + self.length
        kept: Chosen = inside & (found.confidence >= self.least)
        kept[np.where(inside, found.confidence, -1).argmax()] = True
        return kept


@dataclass(frozen=True)
class Learned(CommitRule):
    """Candidates that a small network takes for those of the finished text, given the confidences of the whole block.

    The file has `hidden.weight` `[h, B]`, `hidden.bias` `[h]`, `output.weight` `[B, h]` and `output.bias` `[B]`, of a
    block of B tokens. Source: Learn2PD (arXiv 2509.25188).
    """

    file: str = option("", "Safetensors file of the network.", label="block rule: learned FILE")
    least: float = option(0.9, "Least probability.", least=0, most=1, label="block rule: learned P")

    def __post_init__(self) -> None:
        super().__post_init__()
        _network(self.file)

    def keeps(self, found: Candidates) -> Chosen:
        """Those that the network is sure of.

        Raises:
            InputError: it is for blocks of another size.
        """
        weights = _network(self.file)
        if (size := weights["output.bias"].size) != found.size:
            raise InputError(f"{self.file} is for blocks of {size} tokens, not {found.size}", "give another block_rule")
        confidence = np.ones(size)
        confidence[found.places] = found.confidence
        hidden = np.maximum(weights["hidden.weight"] @ confidence + weights["hidden.bias"], 0)
        scores = (weights["output.weight"] @ hidden + weights["output.bias"])[found.places]
        kept: Chosen = 1 / (1 + np.exp(-scores)) >= self.least
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
    "unit": Unit,
    "ada-block": AdaBlock,
    "learned": Learned,
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
    defaults = {each.name: each.default for each in fields(options)}
    for name in _IN_ORDER_ONLY if blocks is not None else ():
        if (value := getattr(options, name, None)) and value != defaults[name]:
            raise InputError(f"{name} is given, and this model fills blocks of tokens", f"leave {name} out")
    guides = getattr(options, "strategies", ()) if blocks is not None else ()
    if len(guides) > 1 or not all(_masks_prompt(each) for each in guides):
        what = "strategies are given, and this model fills blocks of tokens"
        raise InputError(what, "give none, or negative-prompt or cad without another prompt: then the prompt is masked")


def _masks_prompt(strategy: Strategy) -> bool:
    """Whether a strategy compares with a second reader, and has no prompt of its own for it."""
    own = [getattr(strategy, name, None) for name in ("text", "system")]
    return strategy.has_reader and not strategy.reads_anchor and own == [None, None]
