"""Lossy decoding with two models: some tokens are the draft model's choice instead of the target's.

At every position both models have a choice, made with the same sampling parameters and the same random number. A rule
says whose is taken, from the text so far and the logits of both. So the text does not depend on how much was drafted,
on this machine's timing, or on what else runs. It is not the target's text: every rule trades quality for tokens that
the draft model chose, of which one pass of the target verifies more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple

import numpy as np

from ...errors import InputError
from ..arguments.argument_types import Amount, NamedRule, Option, OptionRecord, Share, option, refuse_beside
from ..sampling.logit_stage import Logits, LogitStage, log_softmax
from ..sampling.sampler import Sampler, SamplingParams
from ..sampling.token_mask import TokenConstraint
from ..speculation.drafters.draft_model import DraftModel
from ..speculation.rounds import Round
from ..speculation.speculator import Speculator
from ..speculation.verification import VerifyResult

_IMPOSSIBLE: Final = -1e30
"""Logit of tokens that the draft model does not have; finite, as penalties multiply it."""
_WINDOW: Final = 5
"""Number of positions over which the draft model's entropy is averaged."""
_SENTENCE_ENDS: Final = (b".", b"!", b"?", b"\xe3\x80\x82", b"\xef\xbc\x81", b"\xef\xbc\x9f")
"""The last three are UTF-8 of the full stop, the exclamation and the question mark of Chinese and Japanese."""

_TOKENS: Final = Option("", least=0)
_CONTRADICTING: Final = ("exact", "branch", "grammar_aligned", "draft_sampling", "strategies")
"""Options that are refused beside a rule."""


class Position(NamedTuple):
    """A position of an answer where both models have a choice. Rules see every position once, in order."""

    token: int
    """The draft model's choice."""
    draft: Logits
    """The draft model's logits float32 `[V]`, in the target's ids; valid until the next position, like `target`."""
    target: Logits
    """The target's logits float32 `[V]`."""
    answer: Sequence[int]
    """Token ids of the answer so far."""
    entropies: deque[float]
    """The draft model's entropies at the last positions, which the rule keeps."""
    token_bytes: Callable[[int], bytes]
    """The text of a token."""


def _bild(at: Position, a: Share, b: Amount) -> bool:
    """The draft model writes until it is unsure, and the target takes back what it finds unlikely.

    The draft model is sure of a token above a probability, and the target objects below a log-probability in nats: Big
    Little Decoder (Kim et al., NeurIPS 2023). With 0 and inf all tokens are the draft model's; with 1 or a `b` of 0 all
    are the target's.
    """
    return math.exp(_logprob(at.draft, at.token)) > a and -_logprob(at.target, at.token) <= b


def _typical(at: Position, e: Share) -> bool:
    """The draft model's token is taken where it is typical for the target.

    Its probability has to be above the smaller of a threshold, and the square root of that times exp(-entropy): typical
    acceptance (Cai et al. 2024, Medusa). With a threshold of 0 all tokens are the draft model's.
    """
    least = min(e, math.sqrt(e) * math.exp(-_entropy(at.target)))
    return math.exp(_logprob(at.target, at.token)) > least


def _low_entropy(at: Position, h: Amount) -> bool:
    """The draft model writes where it is certain of what comes, whatever the target thinks of that.

    Its mean entropy over the last positions is at most so many bits: Entropy adaptive decoding (Simonds 2025), here
    with the draft model's entropy throughout and without a shortest stay with one model.
    """
    at.entropies.append(_entropy(at.draft) / math.log(2))
    return sum(at.entropies) / len(at.entropies) <= h


def _lead(at: Position, n: Annotated[int, _TOKENS]) -> bool:
    """The target begins every sentence with a number of tokens, and the draft model completes it.

    FoReaL-Decoding (Li et al. 2025), without its random choice of the sentences that the target begins. A sentence ends
    with a token that ends with a full stop, a question or an exclamation mark, or has a line break.
    """
    begun = len(at.answer) - n
    return begun >= 0 and not any(_ends_sentence(at.token_bytes(token)) for token in at.answer[begun:])


RULES: Final[Mapping[str, Callable[..., bool]]] = {
    "bild": _bild,
    "typical": _typical,
    "entropy": _low_entropy,
    "lead": _lead,
}


class LossyRule(NamedRule):
    """Says which tokens are the draft model's choice."""

    option = "lossy"
    table = RULES
    hint = "give bild:A,B, typical:E, entropy:H or lead:N with numbers, such as bild:0.6,3"


@dataclass(frozen=True)
class LossyOptions(OptionRecord):
    """Whether the draft model chooses tokens; by default it does not."""

    lossy: LossyRule | str | None = option(  # noqa: RUF009 -- it returns a field
        None,
        "Let the draft model choose tokens, so that the text is not the model's own: bild:A,B, typical:E, entropy:H or "
        "lead:N.",
        metavar="RULE",
        unset="the model's own text",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lossy is None:
            return
        refuse_beside(self, "lossy", _CONTRADICTING)
        if isinstance(self.lossy, str):
            object.__setattr__(self, "lossy", LossyRule.parse(self.lossy))


def _ends_sentence(text: bytes) -> bool:
    return b"\n" in text or text.rstrip().endswith(_SENTENCE_ENDS)


def _logprob(logits: Logits, token: int) -> float:
    """Log-probability of a token."""
    return float(log_softmax(logits)[token])


def _entropy(logits: Logits) -> float:
    """Entropy of the distribution, in nats."""
    logprobs = log_softmax(logits)
    return -float(np.exp(logprobs) @ logprobs)


class LossySpeculator(Speculator):
    """A `Speculator` whose draft model is read while drafts are verified."""

    _passes = 0
    """Number of passes of the draft model in the verification of the latest draft."""

    def read_draft_logits(self, token_ids: Sequence[int], out: Logits) -> bool:
        """Write the draft model's logits after the sequence, or what continues it, to `out`.

        Args:
            token_ids: the sequence, and the tokens behind it.
            out: float32 `[V]`, in the target's ids; tokens that the draft model does not have are left as they are.

        Returns:
            Whether the draft model can read them.

        Raises:
            EdgeError: the draft model failed.
        """
        self._settle_ahead()
        if self._synced < len(self._token_ids):
            self._sync_drafters()
        before = self._draft_model.passes
        logits = self._draft_model.logits(tuple(token_ids[len(self._token_ids) :]))
        self._passes += self._draft_model.passes - before
        if logits is None:
            return False
        ids = self._draft_model.target_ids
        out[slice(logits.size) if ids is None else ids] = logits
        return True

    def observe(
        self,
        draft: Round,
        result: VerifyResult,
        logits: Logits,
        context: int,
        target_s: float,
        recompute_s: float = 0.0,
        verify_s: float = 0.0,
    ) -> None:
        """As for `Speculator`; passes of the draft model in the verification count as drafting."""
        spent = self._draft_model.take_seconds_spent()
        draft.draft_s += spent
        draft.draft_passes += self._passes
        self._passes = 0
        super().observe(draft, result, logits, context, target_s, recompute_s, max(verify_s - spent, 0.0))

    @property
    def _draft_model(self) -> DraftModel:
        assert isinstance(self.model, DraftModel)  # noqa: S101  `DrafterSet` checks it
        return self.model


class LossySampler(Sampler):
    """A `Sampler` that takes the draft model's choice where a rule says so.

    Args:
        params: how both models choose.
        constraint: which tokens may come.
        rule: the rule.
        speculator: has the draft model.
        token_bytes: the text of a token of the target.
        by_draft: receives, for every token that is chosen, whether it is the draft model's choice.

    Raises:
        InputError: the speculator does not read a draft model.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        constraint: TokenConstraint | None,
        rule: LossyRule,
        speculator: Speculator | None,
        token_bytes: Callable[[int], bytes],
        by_draft: list[bool],
    ) -> None:
        self._text: Final = LogitStage()
        super().__init__(params, vocab_size, constraint, (self._text,))
        if not isinstance(speculator, LossySpeculator):
            raise InputError("lossy decoding needs drafts, and there are none", "leave lossy out, or --spec off")
        self._rule: Final = rule
        self._speculator: Final = speculator
        self._token_bytes: Final = token_bytes
        self._by_draft: Final = by_draft
        self._begun = False
        self._entropies = deque[float](maxlen=_WINDOW)
        self._draft_logits = np.full(vocab_size, _IMPOSSIBLE, np.float32)

    def choose(self, logits: Logits, position: int) -> int:
        """Choose the draft model's token or the target's; errors as for `Sampler.choose`, and of the draft model."""
        if not self._begun:  # the speculator has another sequence, until the first token is known
            self._speculator.reset(self._text.tokens)
            self._begun = True
        draft, takes = self._draft_logits, False
        if self._speculator.read_draft_logits(self._text.tokens, draft):
            token = super().choose(draft, position)
            answer = self._text.tokens[self._text.prompt_length :]
            at = Position(token, draft, logits, answer, self._entropies, self._token_bytes)
            takes = bool(self._rule.apply(at)) and draft.item(token) > _IMPOSSIBLE / 2
        self._by_draft.append(takes)
        return token if takes else super().choose(logits, position)
