"""Strategies that strengthen what the prompt says beyond another prompt, which a second reader reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from ...errors import InputError
from ..arguments.argument_types import option
from ..sampling.logit_stage import Logits, LogitStage, log_softmax
from .second_reader import LEAST, ReaderStage
from .strategy import Strategy

if TYPE_CHECKING:
    from ..sampling.sampler import SamplingParams
    from ..text.messages import ChatPrompt
    from ..text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class _OtherPrompt(Strategy):
    """A strategy whose second reader is the same model with another prompt."""

    passes: ClassVar[str] = "2, or about 1.4 where both prompts share a pass"
    has_reader: ClassVar[bool] = True
    text: str | None = option(
        None, "The other prompt: in place of the last user message, or of a raw prompt. Without it, nothing is there."
    )

    def second_prompt(self, prompt_ids: list[int], chat: ChatPrompt | None, tokenizer: TextTokenizer) -> list[int]:
        """Token ids of the prompt with another last user message; of a raw prompt without text, its last token."""
        if chat is None:
            return tokenizer.encode(self.text, add_special_tokens=True) if self.text else prompt_ids[-1:]
        last = max((index for index, each in enumerate(chat.messages) if each["role"] == "user"), default=-1)
        other = {"role": "user", "content": self.text or ""}
        return chat.encode([other if index == last else each for index, each in enumerate(chat.messages)])


@dataclass(frozen=True)
class NegativePrompt(_OtherPrompt):
    """Classifier-free guidance."""

    name: ClassVar[str] = "negative-prompt"
    purpose: ClassVar[str] = "Follows the prompt more closely, away from what another prompt would give."
    source: ClassVar[str] = "Sanchez et al. 2023, Stay on topic with Classifier-Free Guidance"
    system: str | None = option(None, "System message in place of the prompt's; then the messages stay without `text`.")
    guidance: float = option(
        1.5,
        "How far to go from the other prompt's log-probabilities towards the prompt's; 1 changes nothing.",
        within="(0, 100]",
    )

    def second_prompt(self, prompt_ids: list[int], chat: ChatPrompt | None, tokenizer: TextTokenizer) -> list[int]:
        """Token ids of the other prompt."""
        if self.system is None:
            return super().second_prompt(prompt_ids, chat, tokenizer)
        if chat is None:
            raise InputError("a raw prompt has no system message", "give the other prompt as text")
        messages = [{"role": "system", "content": self.system}, *chat.messages[len(chat.system()) :]]
        other = replace(chat, messages=messages)
        return other.ids if self.text is None else super().second_prompt(prompt_ids, other, tokenizer)

    def start(self, params: SamplingParams, vocab_size: int, tokenizer: TextTokenizer) -> LogitStage:
        """Begin a text."""
        return _Guided(self.guidance, 0.0)


@dataclass(frozen=True)
class Cad(_OtherPrompt):
    """Context-aware decoding, with a gate by uncertainty."""

    name: ClassVar[str] = "cad"
    purpose: ClassVar[str] = (
        "Answers by what the prompt says, against what the model knows; `text` is the question alone."
    )
    source: ClassVar[str] = "Shi et al. 2023, Trusting Your Evidence; the gate is that of Wang et al. 2024, USCD"
    alpha: float = option(0.5, "Weight of the difference that the context makes.", least=0, most=100)
    least_entropy: float = option(
        0.0, "Entropy in nats, with the context, below which the model is certain and nothing is changed.", least=0
    )

    def start(self, params: SamplingParams, vocab_size: int, tokenizer: TextTokenizer) -> LogitStage:
        """Begin a text."""
        return _Guided(1 + self.alpha, self.least_entropy)


class _Guided(ReaderStage):
    """The other prompt's log-probabilities, and `guidance` times what the prompt's have more.

    With a guidance of 1 + alpha, this is context-aware decoding's (1 + alpha) with - alpha without.
    """

    def __init__(self, guidance: float, least_entropy: float) -> None:
        super().__init__()
        self._guidance: Final = guidance
        self._least_entropy: Final = least_entropy
        self.magnifies = guidance + abs(1 - guidance)

    def compared(self, logits: Logits, others: Logits) -> Logits:
        """Tokens that may not come, whose logits are -infinity, stay so."""
        if self._least_entropy:
            own = log_softmax(logits)
            if -float(np.exp(own) @ np.maximum(own, LEAST)) < self._least_entropy:
                return logits
        # A constant changes no probability, and normalizing takes a tenth of a small model's pass.
        other = np.maximum(others - others.max(), np.float32(LEAST))
        scores: Logits = logits - logits.max()
        scores -= other
        scores *= np.float32(self._guidance)
        scores += other
        return scores
