"""What a decoding strategy is, and how one is found by its name.

A strategy sees the tokens of a text and the logits of its next position, and returns other logits or probabilities. As
it depends on nothing else, drafts are verified losslessly under it, a seed gives one text, and texts may share their
passes. A package of somebody else's adds one by an entry point of the group `edgerun.strategies`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ...errors import InputError
from ..arguments.argument_types import OptionRecord
from ..sampling.logit_stage import Logits, LogitStage, Weights

if TYPE_CHECKING:
    from ..sampling.sampler import SamplingParams
    from ..text.messages import ChatPrompt
    from ..text.tokenizer import TextTokenizer

ENTRY_POINTS: Final = "edgerun.strategies"
STRATEGIES: Final[Mapping[str, str]] = {
    "typical": "truncation:Typical",
    "eta": "truncation:Eta",
    "top-n-sigma": "truncation:TopNSigma",
    "xtc": "truncation:Xtc",
    "mirostat": "truncation:Mirostat",
    "dry": "repetition:Dry",
    "momentum": "repetition:Momentum",
    "cad": "guidance:Cad",
    "negative-prompt": "guidance:NegativePrompt",
    "anchored": "anchored:Anchored",
}
"""Module in this package, and class, by name."""


@dataclass(frozen=True)
class Strategy(OptionRecord):
    """The options of a strategy: the fields of a subclass, declared as those of `GenerateOptions` are."""

    name: ClassVar[str]
    purpose: ClassVar[str]
    """What it is good for, in a sentence."""
    source: ClassVar[str]
    """The paper or program that describes it."""
    passes: ClassVar[str] = "1"
    """Passes of the model for a token."""
    filters: ClassVar[bool] = False
    """Whether it only leaves tokens out, so that it does nothing without a temperature."""
    has_reader: ClassVar[bool] = False
    """Whether a second reader follows the answer; then the stage is a `second_reader.ReaderStage`."""
    reads_anchor: ClassVar[bool] = False
    """Whether the second reader is the anchor that the model was loaded with, and not the model itself."""

    def scores(self, logits: Logits, text: StrategyStage) -> Logits:
        """Return the changed logits, float32 `[V]`, after a text; `logits` is not modified."""
        del text
        return logits

    def kept(self, probabilities: Weights) -> Weights:
        """Change the probabilities, float64 `[k]`, of the tokens that may come, where the strategy `filters`.

        Returns:
            Weights `[k]`; 0 leaves a token out, and one must not be 0. The array may be the one that was given.
        """
        return probabilities

    def start(self, params: SamplingParams, vocab_size: int, tokenizer: TextTokenizer) -> LogitStage:
        """Begin a text of a model with `vocab_size` logits, whose other sampling options are `params`.

        A strategy that remembers more of a text than its tokens returns a stage of its own.
        """
        del vocab_size
        return StrategyStage(self, params, tokenizer)

    def second_prompt(self, prompt_ids: list[int], chat: ChatPrompt | None, tokenizer: TextTokenizer) -> list[int]:
        """Token ids of the prompt of the second reader; those of the prompt itself where nothing else is said.

        Args:
            prompt_ids: token ids of the prompt, without the start of the answer.
            chat: the messages that it was made of; None for a raw one.
            tokenizer: the model's.

        Raises:
            InputError: there is no such prompt.
            TemplateError: the chat template refuses its messages.
        """
        del chat, tokenizer
        return prompt_ids


class StrategyStage(LogitStage):
    """One text of a strategy.

    Args:
        strategy: says what is done.
        params: the other sampling options.
        tokenizer: the model's.
    """

    def __init__(self, strategy: Strategy, params: SamplingParams, tokenizer: TextTokenizer) -> None:
        super().__init__()
        self._strategy: Final = strategy
        self.params: Final = params
        self.tokenizer: Final = tokenizer

    def scores(self, logits: Logits) -> Logits:
        """What the strategy makes of the logits."""
        return self._strategy.scores(logits, self)

    def weights(self, ids: npt.NDArray[np.intp], weights: Weights) -> Weights:
        """What the strategy makes of the probabilities."""
        del ids
        return self._strategy.kept(weights / weights.sum()) if self._strategy.filters else weights


def strategy_class(name: str) -> type[Strategy]:
    """The strategy of a name.

    Raises:
        InputError: there is none.
    """
    if name in STRATEGIES:
        module, class_name = STRATEGIES[name].split(":")
        found: type[Strategy] = getattr(import_module(f".{module}", __package__), class_name)
        return found
    from importlib.metadata import entry_points  # noqa: PLC0415 -- importing it takes 10 ms

    others = {each.name: each for each in entry_points(group=ENTRY_POINTS)}
    if name not in others:
        known = ", ".join(sorted({*STRATEGIES, *others}))
        raise InputError(f"there is no strategy {name!r:.60}", f"strategies are: {known}")
    loaded: type[Strategy] = others[name].load()
    return loaded


def strategy(name: str, **options: Any) -> Strategy:
    """The strategy of a name, with options of its own.

    Raises:
        InputError: there is none of the name, or it has no such option, or a value is wrong.
    """
    kind = strategy_class(name)
    known = [each.name for each in fields(kind)]
    if unknown := sorted(set(options) - set(known)):
        hint = f"it has {', '.join(known)}" if known else "it has none"
        raise InputError(f"the strategy {name} has no option {unknown[0]!r:.60}", hint)
    try:
        return kind(**options)
    except InputError as error:
        raise InputError(f"strategy {name}: {error.what}", error.hint) from error


def parse_strategy(text: str) -> Strategy:
    """The strategy of a text such as `dry:multiplier=0.8,allowed_length=3`; errors as for `strategy`."""
    name, _, rest = text.partition(":")
    given: dict[str, Any] = {}
    texts = [each.name for each in fields(strategy_class(name)) if "str" in str(each.type)]
    # A comma that no option follows is part of a text.
    for part in filter(None, re.split(r",(?=\s*[\w-]+=)", rest)):
        option, _, value = part.partition("=")
        option = option.strip().replace("-", "_")
        given[option] = value.strip() if option in texts else _value(value.strip())
    return strategy(name, **given)


def _value(text: str) -> Any:
    """A number or a text, as it is written."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
