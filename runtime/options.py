"""Options of one answer, defaults of a model, and the request that both make."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import BundleError, InputError
from ..models.bundle import Bundle
from ..models.json_file import shown
from ..models.variants import GENAI_CONFIG
from .argument_types import check_fields
from .sampling.logprobs import MAX_ALTERNATIVES
from .sampling.sampler import SamplingParams
from .speculation.choice import Speculation
from .speculation.replay import Recording
from .speculation.sampled_speculator import DraftSampling
from .text.answer_start import AnswerStart

_Number = TypeVar("_Number", int, float)
_LARGEST = 1e30
_MOST_CHOICES = 128
"""Largest number of answers to one prompt: each has a KV cache while it is generated."""
_OWN_VARIABLES = ("messages", "tools", "mark", "special_tokens_in_messages")
_FILTERS = ("top_k", "top_p", "min_p")


@dataclass(frozen=True)
class GenerateOptions:
    """Options of one answer. None takes the value of the model's generation_config.json, or else greedy decoding."""

    max_tokens: int | None = None
    """Largest number of tokens to generate; None to go on until the model ends or the context is full."""
    stop: str | Sequence[str] | None = ()
    """Stop sequence, or several, or None; the answer ends before the first one."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float = 0.0
    """What is subtracted from the logits of all tokens that the answer has already."""
    frequency_penalty: float = 0.0
    """What is subtracted from the logit of a token for every time that the answer has it already."""
    logit_bias: Mapping[int, float] | None = None
    """What is added to the logits of some token ids."""
    ignore_eos: bool = False
    """Whether the answer goes on after end-of-sequence tokens, up to `max_tokens` or the end of the context."""
    logprobs: int | None = None
    """Number of alternatives to list with every token, 0 to 20, besides its own log-probability; None to list none."""
    n: int = 1
    """Number of answers to the prompt, which `Chunk.index` and `Reply.choices` tell apart. Each has a seed of its own:
    the first one that of a single answer, the next one 1 more, and so on."""
    seed: int | None = None
    """The same seed gives the same text; None takes a random one."""
    raw: bool = False
    """Continue the prompt as it is, without the chat template."""
    system: str | None = None
    """System message."""
    answer_start: str | Sequence[int] = ""
    """What the answer begins with: a text, in which special tokens are plain text, or token ids. The model continues
    it, and only what follows is returned; `AnswerStream.start_text` has the text before that."""
    special_tokens_in_messages: bool = False
    """Whether the text of a special token in a message becomes that token. By default it stays text: only the chat
    template writes control tokens."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the model may call, for the chat template: `{"type": "function", "function": {"name": ...}}`."""
    template_variables: Mapping[str, Any] | None = None
    """What the chat template reads besides, such as `enable_thinking` or `documents`."""
    speculation: Speculation = Speculation.AUTO
    """Which drafters to use. The text does not depend on it, except in near ties where activations have 8 bits: there
    wide passes differ from narrow ones in the last bits. `exact` answers do not depend on it at all."""
    exact: bool = False
    """Whether the text is that of plain decoding whatever the hardware: near ties are recomputed one token per pass,
    and sampled text is not drafted."""
    draft_sampling: DraftSampling = DraftSampling.OFF
    """Whether to sample the draft model's tokens instead of taking the likeliest: same distribution and faster at high
    temperatures, but a seed has no fixed text."""
    explain: bool = False
    """Whether to keep the statistics of every round, in `Stats.rounds`."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(f"max_tokens is {self.max_tokens}", "it must be 1 or more")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_ALTERNATIVES:
            raise InputError(f"logprobs is {self.logprobs}", f"it must be between 0 and {MAX_ALTERNATIVES}")
        if not 1 <= self.n <= _MOST_CHOICES:
            raise InputError(f"n is {self.n}", f"it must be between 1 and {_MOST_CHOICES}")
        if taken := [name for name in self.template_variables or {} if name in _OWN_VARIABLES]:
            raise InputError(f"template_variables has {taken[0]!r}", "give that with the prompt or as an option")
        documents = (self.template_variables or {}).get("documents", ())
        if documents is not None and not (
            isinstance(documents, Sequence)
            and not isinstance(documents, str)
            and all(isinstance(each, Mapping) for each in documents)
        ):
            raise InputError(f"template_variables: documents is {shown(documents)}", "it must be a list of objects")
        if not all(self.stops):
            raise InputError(f"stop is {self.stop!r}", "it must be a non-empty string, or several")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop sequences."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def changed(self, changes: Mapping[str, Any]) -> GenerateOptions:
        """Return a copy with some fields replaced.

        Raises:
            InputError: an option is unknown, or its value is out of range.
        """
        known = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(set(changes) - known):
            raise InputError(f"unknown option {unknown[0]!r}", f"options are: {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)

    def sampling(self, defaults: ModelDefaults) -> SamplingParams:
        """Combine these options with the defaults of a model.

        A temperature or a filter (top-k, top-p, min-p) given here switches sampling on. Filters that are not given
        come from the model if it samples by default, and are off otherwise.
        """
        given = self.temperature is not None or any(getattr(self, name) is not None for name in _FILTERS)
        temperature = self.temperature
        if temperature is None:
            temperature = defaults.temperature if defaults.samples else 1.0 if given else 0.0
        filters = {
            name: getattr(defaults, name) if defaults.samples and getattr(self, name) is None else getattr(self, name)
            for name in _FILTERS
        }
        return SamplingParams(
            temperature=temperature,
            repeat_penalty=defaults.repeat_penalty if self.repeat_penalty is None else self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            **{name: value for name, value in filters.items() if value is not None},
        )

    def request(
        self,
        prompt_ids: Sequence[int],
        defaults: ModelDefaults,
        start: AnswerStart | None = None,
        recording: Recording | None = None,
    ) -> GenerationRequest:
        """The request that these options make of a prompt and the start of its answer, for a model with these defaults.

        `prompt_ids` does not have the tokens of `start` yet.
        """
        return GenerationRequest(
            prompt_ids=prompt_ids if start is None else [*prompt_ids, *start.token_ids],
            start=start,
            sampling=self.sampling(defaults),
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
            stop_sequences=self.stops,
            speculation=self.speculation,
            draft_sampling=self.draft_sampling,
            exact=self.exact,
            recording=recording,
            keep_rounds=self.explain,
        )


@dataclass(frozen=True)
class GenerationRequest:
    """One answer to generate: token ids of the prompt, and every option with its value."""

    prompt_ids: Sequence[int]
    """Token ids of the prompt; those of the answer's start are the last of them."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    start: AnswerStart | None = None
    """What the answer begins with; None for nothing."""
    max_tokens: int | None = None
    """Largest number of tokens to generate; None for the rest of the context."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives to list with every token; None to list no tokens."""
    stop_sequences: tuple[str, ...] = ()
    speculation: Speculation = Speculation.AUTO
    draft_sampling: DraftSampling = DraftSampling.OFF
    exact: bool = False
    recording: Recording | None = None
    """Recorded answer to give instead of the model's own; None to generate one."""
    keep_rounds: bool = False
    """Whether the statistics hold those of every round."""


@dataclass(frozen=True)
class Persistence:
    """What an engine keeps between answers, on disk and in memory."""

    cache: bool = True
    """Whether to cache what is measured and prepared for this machine: packed weights, pass cost, n-gram tables."""
    history: bool = False
    """Whether to keep conversations, and to draft from earlier ones."""
    learned: bool = True
    """Whether to keep in the cache what drafters learn from answers."""
    prefix_bytes: int = 0
    """Maximum memory for the KV caches of finished sequences, which later prompts continue; 0 for none."""


@dataclass(frozen=True)
class ModelDefaults:
    """Sampling defaults of a model, from generation_config.json or the `search` section of genai_config.json."""

    samples: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0

    @classmethod
    def of(cls, bundle: Bundle) -> ModelDefaults:
        """Read the defaults of a bundle; a value that its files do not give is that of this class.

        Raises:
            BundleError: a value is not a number, or out of range.
        """
        name = "generation_config.json"
        config = bundle.json_file(name)
        if not config and isinstance(search := bundle.json_file(GENAI_CONFIG).get("search"), dict):
            name, config = GENAI_CONFIG, search
        try:
            defaults = cls(
                samples=bool(config.get("do_sample")),
                temperature=_number(config, "temperature", 1.0),
                top_k=_number(config, "top_k", 0),
                top_p=_number(config, "top_p", 1.0),
                min_p=_number(config, "min_p", 0.0),
                repeat_penalty=_number(config, "repetition_penalty", 1.0),
            )
            SamplingParams(
                defaults.temperature,
                defaults.top_k,
                defaults.top_p,
                defaults.min_p,
                repeat_penalty=defaults.repeat_penalty,
            )
        except InputError as error:
            raise BundleError(f"{bundle.folder / name}: {error.what}", error.hint) from error
        return defaults


def _number(config: Mapping[str, Any], name: str, default: _Number) -> _Number:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_LARGEST < value < _LARGEST:
        raise InputError(f"{name} is {value!r:.60}", "it must be a number")
    return type(default)(value)
