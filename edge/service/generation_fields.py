"""Fields that the bodies of all generating requests share, and the options that they make."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from ...errors import CancelledError, EdgeError, InputError
from ...models.json_file import shown
from ...runtime.arguments.argument_types import options_of
from ...runtime.encoders.encoder import AnyModel
from ...runtime.engine import Engine, Prompt
from ...runtime.options import GenerateOptions
from ...runtime.scheduling.answer_stream import AnswerStream
from .body_decoder import StrictStruct, about
from .message_fields import response_format
from .request_error import ErrorCode, RequestError, invalid, unsupported
from .sampler_fields import SamplerFields, named_strategies

_UNITS: Final = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")
PositiveInt: TypeAlias = Annotated[int, Meta(ge=1)]
TokenLimit: TypeAlias = Annotated[int, Meta(ge=-1)]
"""Largest number of tokens to generate; -1 for no limit, as llama.cpp has it."""
Alternatives: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
"""Number of likely tokens to return at each position."""
ReasoningEffort: TypeAlias = Annotated[
    str | None,
    about(
        "How much the model thinks, where its chat template has a variable for it: reasoning_effort, or "
        "enable_thinking and thinking, which only none makes false.",
        *("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    ),
]
Verbosity: TypeAlias = Annotated[str | None, about("Models here have no such setting.", "medium")]

KeepAlive: TypeAlias = Annotated[
    str | float | None,
    about("Extension. How long the model stays in memory unused: seconds, or 1h30m; below 0 for always."),
]


class StreamOptions(StrictStruct):
    """What a stream contains besides the answer."""

    include_usage: Annotated[bool | None, about("Whether the stream ends with the usage.")] = None
    include_obfuscation: Annotated[bool | None, about("Accepted; chunks are not padded.")] = None


def option_meta(name: str, *, extension: bool = False) -> Meta:
    """What the schema says of a field that is an option of `GenerateOptions`."""
    declared = options_of(GenerateOptions)[name]
    default = "" if declared.unset is None else f" The default is {declared.unset}."
    return about(("Extension. " if extension else "") + declared.help + default, *(declared.choices or ()))


ChoicesField: TypeAlias = Annotated[Annotated[int, Meta(ge=1, le=16)] | None, option_meta("n")]
BestOfField: TypeAlias = Annotated[Annotated[int, Meta(ge=1, le=20)] | None, option_meta("best_of")]
EarlyStopField: TypeAlias = Annotated[float | None, option_meta("early_stop", extension=True)]


class SamplingFields(SamplerFields, kw_only=True):
    """How tokens are chosen, what the answer has to look like, and when it ends: options under their names."""

    temperature: Annotated[float | None, option_meta("temperature")] = None
    top_p: Annotated[float | None, option_meta("top_p")] = None
    seed: Annotated[Annotated[int, Meta(ge=-(2**63))] | None, option_meta("seed")] = None
    stop: Annotated[str | Annotated[list[str], Meta(max_length=16)] | None, option_meta("stop")] = None
    presence_penalty: Annotated[float | None, option_meta("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, option_meta("frequency_penalty")] = None
    logit_bias: Annotated[dict[int, float] | None, option_meta("logit_bias")] = None
    top_k: Annotated[int | None, option_meta("top_k", extension=True)] = None
    min_p: Annotated[float | None, option_meta("min_p", extension=True)] = None
    repeat_penalty: Annotated[float | None, option_meta("repeat_penalty", extension=True)] = None
    ignore_eos: Annotated[bool | None, option_meta("ignore_eos", extension=True)] = None
    strategies: Annotated[
        list[dict[str, Any]] | None,
        about("Extension. Objects with a name and the options of that strategy; docs/strategies.md lists them."),
    ] = None
    least_confidence: Annotated[float | None, option_meta("least_confidence", extension=True)] = None
    adapter: Annotated[str | None, option_meta("adapter", extension=True)] = None
    control: Annotated[str | None, option_meta("control", extension=True)] = None
    control_strength: Annotated[float | None, option_meta("control_strength", extension=True)] = None
    overflow: Annotated[str | None, option_meta("overflow", extension=True)] = None
    exact: Annotated[bool | None, option_meta("exact", extension=True)] = None
    lossy: Annotated[str | None, option_meta("lossy", extension=True)] = None
    block_rule: Annotated[str | None, option_meta("block_rule", extension=True)] = None
    block_size: Annotated[PositiveInt | None, option_meta("block_size", extension=True)] = None
    lossy_block_cache: Annotated[bool | None, option_meta("lossy_block_cache", extension=True)] = None
    num_beams: Annotated[int | None, option_meta("num_beams", extension=True)] = None
    beam_groups: Annotated[int | None, option_meta("beam_groups", extension=True)] = None
    diversity_penalty: Annotated[float | None, option_meta("diversity_penalty", extension=True)] = None
    length_penalty: Annotated[float | None, option_meta("length_penalty", extension=True)] = None
    best_first: Annotated[bool | None, option_meta("best_first", extension=True)] = None
    extract: Annotated[str | None, option_meta("extract", extension=True)] = None
    cntp: Annotated[bool | None, option_meta("cntp", extension=True)] = None
    adadec: Annotated[bool | None, option_meta("adadec", extension=True)] = None
    penalty_alpha: Annotated[float | None, option_meta("penalty_alpha", extension=True)] = None
    trials: Annotated[int | None, option_meta("trials", extension=True)] = None
    entropy: Annotated[float | None, option_meta("entropy", extension=True)] = None
    vote: Annotated[bool | None, option_meta("vote", extension=True)] = None
    repetition_penalty: Annotated[float | None, about("Extension. Another name of repeat_penalty.")] = None


class RequestFields(SamplingFields, kw_only=True):
    """What all bodies of generating requests have, and what clients send to other servers and changes no answer."""

    model: Annotated[str | None, about("Name of the model; null for the first one that the server offers.")] = None
    stream: Annotated[bool | None, about("Whether to send the answer while it is generated.")] = None
    user: Annotated[str | None, about("Accepted; does not change the answer.")] = None
    safety_identifier: Annotated[str | None, about("Accepted; does not change the answer.")] = None
    metadata: Annotated[dict[str, str] | None, about("Accepted; does not change the answer.")] = None
    prompt_cache_key: Annotated[str | None, about("Accepted; the prefix cache works by itself.")] = None
    prompt_cache_retention: Annotated[str | None, about("Accepted; the prefix cache has a budget of memory.")] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, about("Accepted; the prefix cache needs no options.")] = None
    service_tier: Annotated[str | None, about("Accepted; there is one tier.")] = None
    store: Annotated[bool | None, about("Accepted; answers are not stored.")] = None
    cache_prompt: Annotated[bool | None, about("Extension. Accepted; the prefix cache gives the same text.")] = None
    id_slot: Annotated[int | None, about("Extension. Accepted; the prefix cache has no slots.")] = None
    slot_id: Annotated[int | None, about("Extension. Accepted; an older name of id_slot.")] = None
    keep_alive: KeepAlive = None
    timings_per_token: Annotated[bool | None, about("Extension. Accepted; chunks have no timings.")] = None
    return_progress: Annotated[bool | None, about("Extension. Accepted; streams begin with the first token.")] = None
    num_ctx: Annotated[PositiveInt | None, about("Extension. Accepted up to the model's context.")] = None

    def generation(
        self,
        prompts: Sequence[Prompt | tuple[int, ...]],
        others: Mapping[str, Any],
        *,
        effort: str | None = None,
        stream_options: StreamOptions | None = None,
        repeated: Mapping[str, Any] | None = None,
    ) -> GenerationRequest:
        """The request of a body.

        Args:
            prompts: what is answered.
            others: options by their name that are not fields, or have another form there; None for those not given.
            effort: how much the model thinks, as a `ReasoningEffort`.
            stream_options: what a stream contains besides the answer.
            repeated: fields that the response object repeats.

        Raises:
            RequestError: an option cannot be used, or there are options for a stream, and no stream is wanted.
        """
        variables = template_variables(getattr(self, "chat_template_kwargs", None), effort)
        options = generate_options(self, {"template_variables": variables, **others})
        if stream_options is not None and not self.stream:
            hint = "set stream to true, or leave stream_options out"
            raise invalid("stream_options", "stream_options are given without stream", hint)
        return GenerationRequest(
            model=self.model,
            prompts=prompts,
            options=options,
            stream=bool(self.stream),
            include_usage=bool(stream_options and stream_options.include_usage),
            num_ctx=self.num_ctx,
            keep_s=keep_seconds(self.keep_alive),
            repeated=repeated or {},
        )


class ConversationFields(RequestFields, kw_only=True):
    """Fields of requests with a conversation."""

    tool_choice: Annotated[str | dict[str, Any] | None, option_meta("tool_choice")] = None
    parallel_tool_calls: Annotated[bool | None, option_meta("parallel_tool_calls")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, option_meta("template_variables", extension=True)] = None
    reasoning_format: Annotated[
        str | None, about("Extension. The reasoning is always returned apart from the answer.", "auto", "deepseek")
    ] = None


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What all requests for generated text have."""

    model: str | None
    prompts: Sequence[Prompt | tuple[int, ...]]
    """What is answered: texts, conversations, or token ids. Each of them gets `options.n` answers."""
    options: GenerateOptions
    stream: bool = False
    include_usage: bool = False
    """Whether a stream ends with an object that has the usage."""
    num_ctx: int | None = None
    """The context that is expected; see `check`."""
    keep_s: float | None = None
    """Seconds for which the model stays in memory afterwards; None for what the server does by itself."""
    slot: str | None = None
    """What a newer request of the same name ends, as one of the same document does."""
    repeated: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request that the response object repeats; the Responses API has some."""

    @property
    def messages(self) -> Any:
        """The conversation of a request that has one."""
        return self.prompts[0]

    @property
    def unloads(self) -> bool:
        """Whether nothing is to be answered, and the model is to leave memory."""
        return not self.prompts and self.keep_s == 0

    def begin(self, engine: Engine, index: int = 0) -> AnswerStream:
        """Begin to answer a prompt; errors as for `Engine.stream`."""
        prompt = self.prompts[index]
        if isinstance(prompt, tuple):
            return engine.answer(prompt, self.options)
        stream = engine.stream(prompt, self.options)
        if self.slot is not None:
            stream.end_older(engine.documents, self.slot)
        return stream

    def cancelled(self) -> EdgeError:
        """The error of an answer that was cancelled, and not by its client."""
        if (document := self.options.document or self.slot) is None:
            return CancelledError("the answer was cancelled")
        what = f"a newer request for the document {shown(document)} has come"
        return RequestError(what, "wait for the answer to that one", code=ErrorCode.SUPERSEDED, param="document")

    def check(self, engine: Engine) -> None:
        """Check that a model is what the request asks for.

        Raises:
            RequestError: its context is shorter, or it does not have a token of a prompt.
        """
        if self.num_ctx is not None and not self.unloads and self.num_ctx > engine.context:
            raise unsupported(
                "num_ctx",
                f"num_ctx is {self.num_ctx}, and the context of this model is {engine.context} tokens",
                "leave num_ctx out, or start edge-run with a longer --context",
            )
        for index, prompt in enumerate(self.prompts):
            if isinstance(prompt, tuple):
                check_token_ids(engine, prompt, "prompt" if len(self.prompts) == 1 else f"prompt[{index}]")


def check_token_ids(engine: AnyModel, tokens: Sequence[int], param: str) -> None:
    """Check that a model has the tokens of a field.

    Raises:
        RequestError: it does not have one of them.
    """
    most = engine.vocab_size
    for index, token in enumerate(tokens):
        if not 0 <= token < most:
            raise invalid(f"{param}[{index}]", f"{param}[{index}] is {token}", f"the model has {most} tokens")


def generate_options(fields: SamplingFields, others: Mapping[str, Any]) -> GenerateOptions:
    """The options of an answer.

    Args:
        fields: the body.
        others: options by their name that are not fields, or have another form there; None where they were not given.

    Raises:
        RequestError: a value is out of range, or fewer answers are to be generated than returned; the error names its
            field.
    """
    given = {name: getattr(fields, name, None) for name in options_of(GenerateOptions)} | dict(others)
    n, best_of = given["n"], given["best_of"]
    if best_of is not None and best_of < (n or 1):
        hint = "best_of is the number of answers to generate, n that of the best to return"
        raise invalid("best_of", f"best_of is {best_of}, and n is {n}", hint)
    given["repeat_penalty"] = same(fields, "repeat_penalty", "repetition_penalty")
    given["strategies"] = (*fields.strategies_of_samplers(), *named_strategies(fields.strategies)) or None
    given["response_format"] = others.get("response_format") or response_format(fields)
    values = {name: value for name, value in given.items() if value is not None}
    if str(values.get("block_rule")).startswith("learned"):
        raise invalid("block_rule", "the rule learned reads a file of this machine", "give another rule")
    if values.get("max_tokens") == -1:
        del values["max_tokens"]
    if "seed" in values and values["seed"] < 0:
        values["seed"] += 2**64  # seeds of OpenAI's API have a sign
    field_of = {"template_variables": "chat_template_kwargs"}
    if fields.repeat_penalty is None:
        field_of["repeat_penalty"] = "repetition_penalty"
    for name, value in values.items():
        check_option(name, value, field_of.get(name, name))
    return GenerateOptions(**values)


def keep_seconds(keep_alive: str | float | None) -> float | None:
    """The seconds of a `keep_alive`, infinite if it is below 0.

    Raises:
        RequestError: it is not a number or a duration such as 1h30m.
    """
    if not isinstance(keep_alive, str):
        return math.inf if keep_alive is not None and keep_alive < 0 else keep_alive
    parts = _DURATION.findall(keep_alive)
    if not parts or "".join(number + unit for number, unit in parts) != keep_alive.removeprefix("-"):
        raise invalid("keep_alive", f"keep_alive is {keep_alive!r:.50}", "give seconds, or a duration such as 1h30m")
    return math.inf if keep_alive.startswith("-") else sum(float(number) * _UNITS[unit] for number, unit in parts)


def template_variables(given: Mapping[str, Any] | None, effort: str | None) -> Mapping[str, Any] | None:
    """The option of this name: an effort of reasoning under all names that templates have for it, and what is given."""
    if effort is None:
        return given
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks, **(given or {})}


def wanted_logprobs(alternatives: int | None, field: str, *, wanted: bool) -> int | None:
    """The option `logprobs`.

    Args:
        alternatives: the field top_logprobs.
        field: what asks for log-probabilities.
        wanted: whether it does.

    Raises:
        RequestError: there are to be alternatives, and no log-probabilities.
    """
    if alternatives and not wanted:
        hint = f"give {field} too, or leave top_logprobs out"
        raise invalid("top_logprobs", f"top_logprobs is {alternatives} without {field}", hint)
    return alternatives or 0 if wanted else None


def same(fields: msgspec.Struct, name: str, other: str) -> Any:
    """The value of a field that has two names.

    Raises:
        RequestError: both are given, and differ.
    """
    value, again = getattr(fields, name), getattr(fields, other)
    if value is not None and again is not None and value != again:
        hint = "they are names of one option: give one of them"
        raise invalid(other, f"{name} is {value}, and {other} is {again}", hint)
    return again if value is None else value


def check_option(name: str, value: Any, field: str) -> None:
    """Check one option by itself, so that the error can name the field that gave it."""
    try:
        GenerateOptions(**{name: value})
    except InputError as error:
        what = error.what.replace(name.replace("_", "-"), field).replace(name, field)
        what = what if field in what else f"{field}: {what}"
        raise invalid(field, what, error.hint) from error
