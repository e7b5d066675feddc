"""The bodies of requests for the token ids of a text, and for the text of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...runtime.options import GenerateOptions
from .body_decoder import decode_body
from .generation_fields import check_option, same
from .message_fields import AnyMessage, FunctionTool, conversation, tool_mappings
from .request_error import ErrorCode, RequestError
from .strict_json import RequestLimits


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a request for token ids."""

    content: Annotated[str | None, Meta(description="The text, as llama.cpp names it.")] = None
    prompt: Annotated[str | None, Meta(description="The text, as vLLM names it.")] = None
    messages: Annotated[list[AnyMessage] | None, Meta(description="A conversation instead of a text.")] = None
    model: Annotated[str | None, Meta(description="Name of the model; null for the one that the server has.")] = None
    add_special: Annotated[
        bool | None, Meta(description="Whether a text begins with the model's special tokens; not by default.")
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Another name of add_special.")] = None
    with_pieces: Annotated[bool | None, Meta(description="Whether to return the text of each token too.")] = None
    return_token_strs: Annotated[bool | None, Meta(description="Another name of with_pieces.")] = None
    tools: Annotated[list[FunctionTool] | None, Meta(description="Functions, for the chat template.")] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="What the chat template reads besides.")
    ] = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a request for the text of token ids."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(description="Token ids.")]
    model: Annotated[str | None, Meta(description="Name of the model; null for the one that the server has.")] = None


@dataclass(frozen=True)
class TokenizeRequest:
    """A text or a conversation to turn into token ids."""

    model: str | None
    text: str | None
    """None where messages are given."""
    messages: Sequence[Mapping[str, Any]] | None
    options: GenerateOptions
    """Tools and variables of the chat template."""
    add_special: bool = False
    with_pieces: bool = False

    @classmethod
    def parse(cls, body: bytes | str | Mapping[str, Any], limits: RequestLimits | None = None) -> TokenizeRequest:
        """Decode a body; arguments and errors as for `ChatRequest.parse`."""
        limits = limits or RequestLimits()
        fields = decode_body(body, TokenizeBody, limits)
        text = same(fields, "content", "prompt")
        if (text is None) == (fields.messages is None):
            raise RequestError(
                "there is neither a text nor messages" if text is None else "there are a text and messages",
                "give content, or messages",
                code=ErrorCode.MISSING_FIELD if text is None else ErrorCode.INVALID_VALUE,
                param="content",
            )
        check_option("template_variables", fields.chat_template_kwargs)
        return cls(
            model=fields.model,
            text=text,
            messages=None if fields.messages is None else conversation(fields.messages, limits),
            options=GenerateOptions(
                tools=tool_mappings(fields.tools, limits), template_variables=fields.chat_template_kwargs
            ),
            add_special=bool(same(fields, "add_special", "add_special_tokens")),
            with_pieces=bool(same(fields, "with_pieces", "return_token_strs")),
        )


@dataclass(frozen=True)
class DetokenizeRequest:
    """Token ids to turn into a text."""

    model: str | None
    tokens: tuple[int, ...]

    @classmethod
    def parse(cls, body: bytes | str | Mapping[str, Any], limits: RequestLimits | None = None) -> DetokenizeRequest:
        """Decode a body; arguments and errors as for `ChatRequest.parse`."""
        fields = decode_body(body, DetokenizeBody, limits)
        return cls(model=fields.model, tokens=tuple(fields.tokens))
