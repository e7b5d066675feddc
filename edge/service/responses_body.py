"""The body of OpenAI's Responses API, for text and images; every request brings its whole conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from .body_decoder import StrictStruct, about, decode_fields, read_object
from .generation_fields import (
    Alternatives,
    ConversationFields,
    GenerationRequest,
    PositiveInt,
    ReasoningEffort,
    Verbosity,
    wanted_logprobs,
)
from .message_fields import (
    MAX_MESSAGES,
    FlatJsonSchemaFormat,
    FunctionDefinition,
    JsonObjectFormat,
    TextFormat,
    check_count,
    checked_messages,
    function_tools,
    response_format,
)
from .request_error import invalid

_LOGPROBS: Final = "message.output_text.logprobs"


class InputText(StrictStruct, tag_field="type", tag="input_text"):
    """A part of what a user says."""

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputImage(StrictStruct, tag_field="type", tag="input_image"):
    """An image of a user's, for a model that was exported with its vision tower."""

    image_url: Annotated[str, about("A data: URL in base64; a server with --allow-image-urls fetches others.")]
    detail: Annotated[str | None, about("Accepted; the model's own resolution is used.")] = None
    file_id: Annotated[None, about("Not supported: files are not stored.")] = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputText(StrictStruct, tag_field="type", tag="output_text"):
    """A part of an earlier answer."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


ResponseContent: TypeAlias = str | list[InputText | InputImage | OutputText]


class _Item(StrictStruct, kw_only=True, tag_field="type"):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item, tag="message"):
    """A message; items without a type are messages."""

    role: Literal["user", "assistant", "system", "developer"]
    content: ResponseContent
    phase: str | None = None


class CallItem(_Item, tag="function_call"):
    """A call of a function by the assistant."""

    name: str
    arguments: str
    call_id: str


class CallOutputItem(_Item, tag="function_call_output"):
    """The result of a function."""

    output: ResponseContent
    call_id: str


class ReasoningText(StrictStruct, tag_field="type", tag="reasoning_text"):
    """A part of what the model thought."""

    text: str


class ReasoningItem(_Item, tag="reasoning"):
    """What the model thought before the assistant's next message or call."""

    content: list[ReasoningText] | None = None
    summary: list[Any] | None = None
    encrypted_content: None = None


class ResponseTool(FunctionDefinition, tag_field="type", tag="function", omit_defaults=False):
    """A function that the model may call, in the form of the Responses API."""


class TextConfig(StrictStruct):
    """The form of the answer."""

    format: TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | None = None
    verbosity: Verbosity = None


class Reasoning(StrictStruct):
    """How the model thinks."""

    effort: ReasoningEffort = None
    summary: Annotated[str | None, about("Accepted; all that the model thinks is returned.")] = None
    generate_summary: Annotated[str | None, about("Accepted; an older name of summary.")] = None
    mode: Annotated[str | None, Meta(extra_json_schema={"enum": ["standard", None]})] = None
    context: Annotated[str | None, Meta(extra_json_schema={"enum": ["auto", None]})] = None


class ResponsesStreamOptions(StrictStruct):
    """What a stream contains besides the answer."""

    include_obfuscation: Annotated[bool | None, about("Accepted; events are not padded.")] = None


class ResponsesBody(ConversationFields, kw_only=True):
    """Body of a response."""

    input: Annotated[
        str | list[MessageItem | CallItem | CallOutputItem | ReasoningItem],
        about("What the user says, or the conversation: messages, function calls and their results."),
    ]
    instructions: Annotated[str | None, about("The system message.")] = None
    max_output_tokens: Annotated[PositiveInt | None, about("Largest number of tokens to generate.")] = None
    stream_options: Annotated[ResponsesStreamOptions | None, about("What a stream contains besides.")] = None
    tools: Annotated[list[ResponseTool] | None, about("Functions that the model may call.")] = None
    text: Annotated[TextConfig | None, about("The form of the answer.")] = None
    include: Annotated[
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None,
        about("Log-probabilities of the tokens; encrypted reasoning is accepted, there is none."),
    ] = None
    top_logprobs: Annotated[Alternatives | None, about("Number of likely tokens at each position, 0 to 20.")] = None
    truncation: Annotated[str | None, about("A conversation that is too long is an error.", "disabled")] = None
    background: Annotated[bool | None, about("Answers are given at once.", False)] = None
    reasoning: Annotated[Reasoning | None, about("How the model thinks.")] = None
    client_metadata: Annotated[dict[str, str] | None, about("Extension. Accepted; does not change the answer.")] = None
    max_tool_calls: Annotated[PositiveInt | None, about("Accepted; the server has no tools of its own.")] = None

    previous_response_id: Annotated[
        None, about("Not supported: responses are not stored, send the whole conversation as input.")
    ] = None
    conversation: Annotated[None, about("Not supported: conversations are not stored, send all of it as input.")] = None
    access_programs: Annotated[None, about("Not supported.")] = None
    background_options: Annotated[None, about("Not supported: answers are given at once.")] = None
    context_management: Annotated[None, about("Not supported: nothing is cut off.")] = None
    image: Annotated[None, about("Not supported: images are parts of messages.")] = None
    moderation: Annotated[None, about("Not supported.")] = None
    prompt: Annotated[None, about("Not supported: templates of prompts are not stored, send input.")] = None

    @classmethod
    def parse(cls, body: bytes | str | Mapping[str, Any]) -> GenerationRequest:
        """What a body asks for, in which the type of messages may be left out; errors as for other bodies."""
        return decode_fields(_with_item_types(read_object(body)), cls).request()

    def request(self) -> GenerationRequest:
        """The Responses API, for text; nothing is stored."""
        tools, included, reasoning = function_tools(self.tools), self.include or (), self.reasoning or Reasoning()
        others = {
            "logprobs": wanted_logprobs(self.top_logprobs, f"include {_LOGPROBS}", wanted=_LOGPROBS in included),
            "max_tokens": self.max_output_tokens,
            "tools": tools if self.tool_choice != "none" else (),
            "response_format": response_format(self, None if self.text is None else self.text.format),
        }
        return self.generation((_conversation(self),), others, effort=reasoning.effort, repeated=_repeated(self))


def _with_item_types(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields with the type of messages, which may be left out."""
    items = fields.get("input")
    if not isinstance(items, list):
        return fields
    typed = [
        {**item, "type": "message"} if isinstance(item, Mapping) and item.get("type") is None else item
        for item in items
    ]
    return {**fields, "input": typed}


def _conversation(fields: ResponsesBody) -> Sequence[Mapping[str, Any]]:
    """The messages of a request, its instructions first.

    Raises:
        RequestError: there are none or too many, or fields of one do not fit together.
    """
    placed: list[tuple[str, dict[str, Any]]] = []
    reasoning = ""
    if fields.instructions is not None:
        placed.append(("instructions", {"role": "system", "content": fields.instructions}))
    items = [MessageItem(role="user", content=fields.input)] if isinstance(fields.input, str) else fields.input
    check_count("input", len(items), MAX_MESSAGES)
    if not items:
        raise invalid("input", "input is empty", "give a text or items")
    for index, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            reasoning += "".join(part.text for part in item.content or ())
            continue
        if isinstance(item, CallItem) and placed and placed[-1][1]["role"] == "assistant" and not reasoning:
            # What the assistant says and calls in one turn is one message.
            placed[-1][1].setdefault("tool_calls", []).append(_chat_call(item))
            continue
        message = _chat_message(item)
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = ""
        placed.append(("input" if isinstance(fields.input, str) else f"input[{index}]", message))
    return checked_messages("input", placed)


def _chat_message(item: MessageItem | CallItem | CallOutputItem) -> dict[str, Any]:
    if isinstance(item, MessageItem):
        return {"role": item.role, "content": _chat_content(item.content)}
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "content": _chat_content(item.output), "tool_call_id": item.call_id}
    return {"role": "assistant", "tool_calls": [_chat_call(item)]}


def _chat_content(content: ResponseContent) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": part.image_url}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]


def _chat_call(item: CallItem) -> dict[str, Any]:
    return {"type": "function", "id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}


_REPEATED: Final = (
    *("instructions", "max_output_tokens", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "temperature", "top_logprobs", "top_p", "user"),
)
"""Fields that a response object has as they were given."""


def _repeated(fields: ResponsesBody) -> dict[str, Any]:
    text, reasoning = fields.text or TextConfig(), fields.reasoning or Reasoning()
    return {
        **{name: getattr(fields, name) for name in _REPEATED},
        "metadata": fields.metadata or {},
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary or reasoning.generate_summary},
        "text": {"format": msgspec.to_builtins(text.format or TextFormat()), "verbosity": text.verbosity or "medium"},
        "tools": [msgspec.to_builtins(tool) for tool in fields.tools or ()],
        "tool_choice": fields.tool_choice or "auto",
    }
