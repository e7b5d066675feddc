"""Options of one answer, a model's defaults for them, and the request that they make of a prompt."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import BundleError, InputError, TemplateError
from ..models.bundle import Bundle
from ..models.json_file import shown
from ..models.variants import GENAI_CONFIG
from .arguments.argument_types import documented, option, refuse_beside, same_option
from .arguments.load_options import LoadOptions
from .arguments.search_options import SearchOptions, SteeringOptions
from .blocks.commit_rules import BlockOptions
from .graph.bound_graph import ImagesOfText
from .kv.arena import shared_tokens
from .overflow import Overflow
from .sampling.logit_stage import check_biases
from .sampling.logprobs import MAX_ALTERNATIVES
from .sampling.sampler import SamplingParams
from .speculation.choice import DraftSampling, Speculation
from .speculation.replay import Recording
from .strategies.lossy import LossyOptions
from .strategies.strategy import Strategy
from .structure.response_format import ResponseFormat
from .text.detokenizer import AnswerStart
from .text.messages import ChatPrompt
from .tools.answer_format import AnswerReading
from .tools.calls import check_tool_choice

if TYPE_CHECKING:  # llguidance is an extra
    from .strategies.search import Search
    from .structure.expected_futures import ExpectedFutures
    from .structure.grammar import Grammar

MOST_ANSWERS = 128
"""Largest number of answers to one prompt, as in OpenAI's API."""
LEAST_CONFIDENCE = 0.5
"""Smallest value of `GenerateOptions.early_stop`: below it, an answer would be stopped that probably is the best."""
_MOST_SAMPLES = 10_000
"""Largest number of answers that an aligned one is sampled after."""
_OWN_VARIABLES = ("messages", "tools", "mark", "special_tokens_in_messages")
_FILTERS = ("top_k", "top_p", "min_p")
_Number = TypeVar("_Number", int, float)
_LARGEST = 1e30


@documented
@dataclass(frozen=True)
class GenerateOptions(SearchOptions, SteeringOptions, LossyOptions, BlockOptions):
    """Options of one answer. None takes the value of the model's generation_config.json, or else greedy decoding."""

    max_tokens: int | None = option(
        None,
        "Maximum tokens of an answer.",
        least=1,
        flags=("-n", "--max-tokens"),
        metavar="N",
        unset="no limit but the context",
    )
    stop: str | Sequence[str] | None = option(
        (), "Text before which the answer ends; several may be given.", metavar="TEXT"
    )
    temperature: float | None = same_option(SamplingParams, "temperature", None)
    top_k: int | None = same_option(SamplingParams, "top_k", None)
    top_p: float | None = same_option(SamplingParams, "top_p", None)
    min_p: float | None = same_option(SamplingParams, "min_p", None)
    repeat_penalty: float | None = same_option(SamplingParams, "repeat_penalty", None)
    presence_penalty: float = same_option(SamplingParams, "presence_penalty", 0.0)
    frequency_penalty: float = same_option(SamplingParams, "frequency_penalty", 0.0)
    logit_bias: Mapping[int, float] | None = same_option(SamplingParams, "logit_bias", None)
    strategies: Sequence[Strategy] = option(
        (),
        "Ways to choose a token besides, in the order in which they apply: NAME or NAME:OPTION=VALUE,...; "
        "docs/strategies.md lists them. Those that only filter need a temperature.",
        flags=("--strategy",),
        metavar="NAME",
    )
    least_confidence: float = option(
        0.0,
        "End the answer before the token with which the geometric mean of its tokens' probabilities falls below this; "
        "0 for never.",
        within="[0, 1)",
        metavar="P",
    )
    ignore_eos: bool = option(
        False, "Go on after end-of-sequence tokens, up to the maximum of tokens or the end of the context."
    )
    logprobs: int | None = option(
        None,
        "List every token with its log-probability and this number of alternatives.",
        least=0,
        most=MAX_ALTERNATIVES,
        metavar="K",
        unset="no list",
    )
    n: int = option(
        1,
        f"Number of answers to the prompt, 1 to {MOST_ANSWERS}. The first has the seed, the next 1 more, and so on. "
        "Without sampling all of them are equal, so one is generated.",
        within=f"[1, {MOST_ANSWERS}]",
        flags=("--n", "--answers"),
        metavar="N",
    )
    best_of: int | None = option(
        None,
        "Generate this number of answers and return those with the largest mean log-probability of their tokens, as "
        "many as n says, the best one first. Their text comes at the end.",
        metavar="N",
        unset="n",
    )
    early_stop: float = option(
        1.0,
        f"Confidence, {LEAST_CONFIDENCE} to 1, at which an answer of best_of is stopped because it will not be "
        "returned; at 1, once it cannot be.",
        within=f"[{LEAST_CONFIDENCE}, 1]",
        metavar="P",
    )
    branch: bool = option(
        False,
        "Let the first of several answers begin with the likeliest token, the second with the next one, and so on; "
        "they go on as usual, so they differ without sampling too.",
    )
    seed: int | None = same_option(SamplingParams, "seed", None)
    suffix: str | None = option(
        None,
        "The text behind a gap, which the answer fills: the prompt is the text before it, without a chat template. "
        "The model must have tokens for filling in the middle.",
        metavar="TEXT",
    )
    suffix_first: bool | None = option(
        None,
        "Put the suffix before the prefix in the prompt, so that prompts of a text that grows before the gap have most "
        "of it in common.",
        unset="the order of the model's template",
    )
    extra: Sequence[Mapping[str, str]] = option(
        (),
        'Other files for filling in the middle, the most important one last: `{"filename": ..., "text": ...}`.',
    )
    document: str | None = option(
        None,
        "Name of the file with the gap. A newer request with a suffix for the same document ends the older one.",
        metavar="NAME",
    )
    raw: bool = option(False, "Continue the prompt as it is, without the chat template.")
    system: str | None = option(None, "System message.", metavar="TEXT")
    answer_start: str | Sequence[int] = option(
        "",
        "What the answer begins with: a text, in which special tokens are plain text, or token ids. Only what follows "
        "is returned; `AnswerStream.start_text` has the text before that.",
    )
    special_tokens_in_messages: bool = option(
        False, "Turn the text of special tokens in messages, such as <|end|>, into these tokens."
    )
    tools: Sequence[Mapping[str, Any]] = option(
        (),
        'Functions that the model may call: `{"type": "function", "function": {"name": ...}}`. Its calls are in '
        "`Reply.tool_calls`.",
    )
    tool_choice: str | Mapping[str, Any] = option(
        "auto",
        "auto shows the tools to the model, none does not; required makes it call one, and the name of a function that "
        "one. A grammar enforces it, with arguments of the schema (extra structured).",
    )
    parallel_tool_calls: bool = option(
        True, "Whether an answer may have several calls; otherwise it ends with the first one."
    )
    parse_answer: bool = option(
        True,
        "Whether reasoning and calls of functions are taken out of the text, where the chat template has a form for "
        "them.",
    )
    template_variables: Mapping[str, Any] | None = option(
        None, "What the chat template reads besides, such as enable_thinking or documents."
    )
    speculation: Speculation = option(
        Speculation.AUTO,
        "Drafters for speculative decoding: auto, off, or some of suffix,edit,recycle,ngram,history,model,eagle,medusa,"
        "mtp,sparse. The text does not depend on it, except in near ties where activations have 8 bits.",
        flags=("--spec",),
        metavar="NAMES",
    )
    exact: bool = option(
        False,
        "Give exactly the text of plain decoding, whatever runs besides and was asked before: recompute near ties, and "
        "do not speculate when sampling.",
    )
    draft_sampling: DraftSampling = option(
        DraftSampling.OFF,
        "Sample the draft model's tokens (a chain or a tree of them) instead of taking the most likely ones; or ngram, "
        "sample what the model gave a probability after the same few tokens before. This is faster at high "
        "temperatures and keeps the distribution, but a seed no longer fixes the text.",
    )
    explain: bool = option(False, "Report what each round drafted, verified and took.")
    overflow: str | None = same_option(LoadOptions, "overflow", None, unset="what the model was loaded with")
    keep_prefix: bool = option(
        False,
        "Keep the KV cache of what the conversation begins with, its system messages and tools, on disk, where later "
        "processes find it.",
    )
    response_format: ResponseFormat | None = option(
        None,
        "What the answer has to look like, its start included: a JSON schema, a regex or a grammar; None for free "
        "text (extra structured).",
    )
    grammar_aligned: int = option(
        0,
        "Sample this number of answers of the format one after the other and give the last one, which comes closer to "
        "the model's own distribution the larger it is (Park et al. 2024); needs a temperature, and no filters.",
        least=0,
        most=_MOST_SAMPLES,
        metavar="N",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_biases((self.logit_bias or {}).values())
        if self.best_of is not None and not self.n <= self.best_of <= MOST_ANSWERS:
            hint = f"it must be between {self.n} (n) and {MOST_ANSWERS}"
            raise InputError(f"best_of is {self.best_of}", hint)
        if taken := [name for name in self.template_variables or {} if name in _OWN_VARIABLES]:
            raise InputError(f"template_variables has {taken[0]!r}", "give that with the prompt or as an option")
        check_tool_choice(self.tool_choice)
        if self.suffix is not None:
            object.__setattr__(self, "raw", True)
        if any("text" not in each for each in self.extra):
            raise InputError("extra has a file without text", 'give {"filename": ..., "text": ...}')
        documents = (self.template_variables or {}).get("documents")
        is_list = isinstance(documents, Sequence) and not isinstance(documents, str)
        if documents is not None and not (is_list and all(isinstance(each, Mapping) for each in documents)):
            raise InputError(f"template_variables: documents is {shown(documents)}", "it must be a list of objects")
        if self.response_format is not None:
            refuse_beside(self, "response_format", ("ignore_eos",), "an answer of a format ends where the format does")
        self._check_alignment()
        if not all(self.stops):
            raise InputError(f"stop is {self.stop!r}", "it must be a non-empty string, or several")

    def _check_alignment(self) -> None:
        """Check that grammar-aligned sampling is possible.

        Raises:
            InputError: it is not.
        """
        if not self.grammar_aligned:
            return
        if self.response_format is None:
            raise InputError("grammar_aligned is given without response_format", "give the format of the answer")
        others = [name for name in _FILTERS if name != "top_p" or self.top_p != 1]
        others += ["exact", "branch", "draft_sampling", "strategies"]
        hint = "aligned answers have the model's whole distribution: leave one of them out"
        refuse_beside(self, "grammar_aligned", others, hint)

    @property
    def candidates(self) -> int:
        """Number of answers to generate."""
        return self.n if self.best_of is None else self.best_of

    @property
    def ranked(self) -> bool:
        """Whether answers are compared by their mean log-probability."""
        return self.candidates > self.n

    @property
    def offered_tools(self) -> Sequence[Mapping[str, Any]]:
        """The functions that the model is told of."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop sequences."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Combine these options with the defaults of a model.

        A temperature or a filter (top-k, top-p, min-p) given here switches sampling on. Filters that are not given
        come from the model if it samples by default, and are off otherwise, and for aligned answers.

        Raises:
            InputError: a value is out of range, or aligned answers have no temperature.
        """
        given = {name: value for name in _FILTERS if (value := getattr(self, name)) is not None}
        temperature = self.temperature
        if temperature is None:
            # Contrastive search does not sample, and top_k is its number of candidates.
            temperature = 0.0 if self.penalty_alpha else 1.0 if given and defaults.greedy else defaults.temperature
        filters = {name: getattr(defaults, name) for name in _FILTERS} | given
        if self.grammar_aligned:
            if not temperature:
                raise InputError("grammar_aligned is given without a temperature", "give one above 0, such as 1")
            filters = {}
        if not temperature and (idle := next((each for each in self.strategies if each.filters), None)):
            raise InputError(f"the strategy {idle.name} is given without a temperature", "give one above 0, such as 1")
        return SamplingParams(
            temperature=temperature,
            repeat_penalty=defaults.repeat_penalty if self.repeat_penalty is None else self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            **filters,
        )


@dataclass(frozen=True)
class Request:
    """One answer to generate: token ids of the prompt, the options, and what the model's files make of them."""

    prompt_ids: Sequence[int]
    """Token ids of the prompt, which end with the answer's start."""
    options: GenerateOptions
    sampling: SamplingParams
    start: AnswerStart | None = None
    """What the answer begins with; None for nothing."""
    recording: Recording | None = None
    """Recorded answer to give instead of the model's own; None to generate one."""
    chat: ChatPrompt | None = None
    """The messages of the prompt; None for a raw one."""
    overflow: Overflow = Overflow.ERROR
    grammar: Grammar | None = None
    """What the answer has to follow; None for free text."""
    images: ImagesOfText | None = None
    """The images among the tokens of the prompt."""
    futures: ExpectedFutures | None = None
    """What the earlier samples of an aligned answer have shown; None if it is not aligned with them."""
    rank: int | None = None
    """Which of the likeliest tokens the answer begins with, counted from 0; None for the one that is chosen."""
    reading: AnswerReading | None = None
    """How reasoning and calls are found in the answer; None where it is text alone."""
    search: Search | None = None
    """What searches for the answer; None for the decode loop."""
    second_prompts: Sequence[list[int]] = ()
    """Token ids of the prompts of second readers, which end with the answer's start."""

    @property
    def needs_logprobs(self) -> bool:
        """Whether the log-probabilities of the answer's tokens are computed."""
        options = self.options
        return options.ranked or options.least_confidence > 0 or (options.logprobs, options.lossy) != (None, None)

    def kept_tokens(self, token_ids: Sequence[int]) -> int:
        """Number of tokens at the beginning of the answered sequence whose slots are to be kept on disk."""
        if not self.options.keep_prefix:
            return 0
        try:
            kept = self.prompt_ids if self.chat is None or self.options.raw else self.chat.beginning()
        except TemplateError:  # the template takes no such messages without others
            return 0
        return shared_tokens(kept, token_ids)


def model_defaults(bundle: Bundle) -> SamplingParams:
    """How a model samples by default: greedily, where its files do not say that it samples.

    Raises:
        BundleError: a value is not a number, or out of range.
    """
    name = "generation_config.json"
    config = bundle.json_file(name)
    if not config and isinstance(search := bundle.json_file(GENAI_CONFIG).get("search"), dict):
        name, config = GENAI_CONFIG, search
    try:
        sampled = SamplingParams(
            temperature=_number(config, "temperature", 1.0),
            top_k=_number(config, "top_k", 0),
            top_p=_number(config, "top_p", 1.0),
            min_p=_number(config, "min_p", 0.0),
            repeat_penalty=_number(config, "repetition_penalty", 1.0),
        )
    except InputError as error:
        raise BundleError(f"{bundle.folder / name}: {error.what}", error.hint) from error
    return sampled if config.get("do_sample") else SamplingParams(repeat_penalty=sampled.repeat_penalty)


def _number(config: Mapping[str, Any], name: str, default: _Number) -> _Number:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_LARGEST < value < _LARGEST:
        raise InputError(f"{name} is {value!r:.60}", "it must be a number")
    return type(default)(value)
