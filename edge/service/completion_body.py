"""The body of a text completion: prompts that are continued as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from msgspec import Meta

from .body_decoder import decode_body
from .generation_fields import (
    AcceptedFields,
    Alternatives,
    AnswerRequest,
    BestOfField,
    ChoicesField,
    EarlyStopField,
    StreamOptions,
    TokenLimit,
    generate_options,
    several_answers,
    wants_usage,
)
from .strict_json import RequestLimits
from .text_inputs import TextOrIds, TextsOrIds, texts_or_ids


class CompletionBody(AcceptedFields, kw_only=True, forbid_unknown_fields=True):
    """Body of a text completion."""

    prompt: Annotated[TextsOrIds, Meta(description="A text, a list of texts, token ids, or a list of token id lists.")]
    model: Annotated[str | None, Meta(description="Name of the model; null for the one that the server has.")] = None
    max_tokens: Annotated[
        TokenLimit | None,
        Meta(
            description="Largest number of tokens to generate; 16 by default, as OpenAI's API, and -1 for the rest of "
            "the context."
        ),
    ] = None
    n: ChoicesField = None
    best_of: BestOfField = None
    early_stop: EarlyStopField = None
    logprobs: Annotated[
        Alternatives | None,
        Meta(description="Return the log-probabilities of the tokens and of this number of likely ones, 0 to 20."),
    ] = None
    stream: Annotated[bool | None, Meta(description="Whether to send the answer while it is generated.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="What a stream contains; needs stream.")] = None
    echo: Annotated[
        bool | None, Meta(description="Answers do not repeat the prompt.", extra_json_schema={"enum": [False, None]})
    ] = None
    suffix: Annotated[None, Meta(description="Not supported: text is only generated after a prompt.")] = None


_DEFAULT_TOKENS: Final = 16


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(AnswerRequest):
    """Text completions to generate."""

    prompts: tuple[TextOrIds, ...]
    """Texts, or token ids; each of them gets `options.n` answers."""
    include_usage: bool = False
    """Whether a stream ends with a chunk that has the usage."""

    @classmethod
    def parse(cls, body: bytes | str | Mapping[str, Any], limits: RequestLimits | None = None) -> CompletionRequest:
        """Decode a body; arguments and errors as for `ChatRequest.parse`."""
        limits = limits or RequestLimits()
        fields = decode_body(body, CompletionBody, limits)
        return cls(
            model=fields.model,
            prompts=texts_or_ids("prompt", fields.prompt, limits),
            options=generate_options(
                fields,
                {
                    **several_answers(fields.n, fields.best_of, fields.early_stop),
                    "max_tokens": _DEFAULT_TOKENS if fields.max_tokens is None else fields.max_tokens,
                    "logprobs": fields.logprobs,
                    "raw": True,
                },
            ),
            stream=bool(fields.stream),
            num_ctx=fields.num_ctx,
            include_usage=wants_usage(fields.stream_options, stream=bool(fields.stream)),
        )
