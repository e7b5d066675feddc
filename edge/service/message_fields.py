"""Messages and tools of a request body, and what the answer has to look like.

The structs say which fields and types a message has; which of them belong together is checked by
`runtime/text/messages.py`, for programs that call the runtime too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from ...errors import InputError
from ...runtime.structure.response_format import ResponseFormat
from ...runtime.text.chat_template import Message
from ...runtime.text.messages import template_messages
from .body_decoder import StrictStruct, about
from .request_error import ErrorCode, RequestError, invalid

MAX_MESSAGES: Final = 10_000
"""Largest number of messages of a conversation, or of items of a Responses input."""
MAX_TOOLS: Final = 128
"""Largest number of tools."""
_PLACE: Final = re.compile(r"messages\[(\d+)\]((?:\[\d+\]|\.\w+)*)")
Schema: TypeAlias = dict[str, Any] | bool
_MAKERS: Final[Mapping[str, Callable[[Any], ResponseFormat]]] = {
    "json": ResponseFormat.json_schema,
    "json_schema": ResponseFormat.json_schema,
    "json_object": lambda _: ResponseFormat.json_object(),
    "regex": ResponseFormat.regex,
    "choice": ResponseFormat.choice,
    "grammar": ResponseFormat.grammar,
}
"""What makes the format of a field, by its name; the names may begin with `guided_`."""


class TextPart(StrictStruct, tag_field="type", tag="text"):
    """A part of a message's content."""

    text: Annotated[str, about("The text of the part.")]
    prompt_cache_breakpoint: dict[str, Any] | None = None


class ImageUrl(StrictStruct):
    """Where an image is."""

    url: Annotated[str, about("A data: URL in base64; a server with --allow-image-urls fetches others.")]
    detail: Annotated[str | None, about("Accepted; the model's own resolution is used.")] = None


class ImagePart(StrictStruct, tag_field="type", tag="image_url"):
    """An image, for a model that was exported with its vision tower."""

    image_url: ImageUrl
    prompt_cache_breakpoint: dict[str, Any] | None = None


Content: TypeAlias = str | list[TextPart | ImagePart]


class _Message(StrictStruct, kw_only=True, tag_field="role", omit_defaults=True):
    name: Annotated[str | None, about("Name of the author, for templates that use it.")] = None


class SystemMessage(_Message, tag="system"):
    """Instructions for the whole conversation."""

    content: Content


class DeveloperMessage(SystemMessage, tag="developer"):
    """Instructions, under the name that OpenAI's newer models have for them."""


class UserMessage(SystemMessage, tag="user"):
    """What the user says."""


class CalledFunction(StrictStruct, omit_defaults=True):
    """A function with the arguments of one call."""

    name: str
    arguments: Annotated[str, about("A JSON object as text.")] = ""


class ToolCall(StrictStruct, tag_field="type", tag="function", omit_defaults=True):
    """A call of a function by the assistant."""

    function: CalledFunction
    id: str | None = None
    index: Annotated[int | None, about("Accepted; the pieces of a stream have it.")] = None


class AssistantMessage(_Message, tag="assistant"):
    """An earlier answer."""

    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: Annotated[str | None, about("What the model thought, for templates that use it.")] = None
    refusal: Annotated[None, about("Not supported; null is accepted.")] = None
    audio: Annotated[None, about("Not supported; null is accepted.")] = None
    function_call: Annotated[None, about("Not supported, use tool_calls; null is accepted.")] = None
    annotations: Annotated[list[Any] | None, about("Not supported.", [])] = None
    provider_specific_fields: Annotated[dict[str, Any] | None, about("Accepted; LiteLLM sends it.")] = None


class ToolMessage(SystemMessage, tag="tool"):
    """The result of a function."""

    tool_call_id: str | None = None


AnyMessage: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(StrictStruct, omit_defaults=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, about("JSON Schema of the arguments.")] = None
    strict: Annotated[
        bool | None, about("Only a tool_choice that makes the model call constrains arguments to the schema.", False)
    ] = None


class FunctionTool(StrictStruct, tag_field="type", tag="function"):
    """A tool of the chat API."""

    function: FunctionDefinition


def conversation(messages: Sequence[AnyMessage]) -> list[Message]:
    """The messages as the runtime takes them.

    Raises:
        RequestError: there are none or too many, or fields of a message do not fit together.
    """
    return checked_messages("messages", [(f"messages[{i}]", _as_mapping(each)) for i, each in enumerate(messages)])


def checked_messages(field: str, placed: Sequence[tuple[str, Message]]) -> list[Message]:
    """Check messages as the runtime does; errors name the fields of the body that they come from.

    Args:
        field: path of the field that they come from.
        placed: the messages, each after the path of what it comes from.

    Raises:
        RequestError: there are none or too many, or fields of a message do not fit together.
    """
    check_count(field, len(placed), MAX_MESSAGES)
    try:
        return template_messages([message for _, message in placed])
    except InputError as error:
        what, param = error.what, field
        if found := _PLACE.match(what):
            param = f"{placed[int(found[1])][0]}{found[2]}"
            what = f"{param}{what[found.end() :]}"
        raise invalid(param, what, error.hint) from error


def base64_image(encoded: str) -> dict[str, Any]:
    """The content part of an image in base64."""
    return {"type": "image", "image": f"data:;base64,{encoded}"}


def _as_mapping(message: AnyMessage) -> dict[str, Any]:
    """A message with the fields that were given, without the ones that the runtime does not use."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    for unused in ("annotations", "provider_specific_fields"):
        fields.pop(unused, None)
    for call in fields.get("tool_calls") or ():
        call.pop("index", None)
    if isinstance(parts := fields.get("content"), list):
        kept = ("type", "text", "image_url")
        fields["content"] = [{name: part[name] for name in kept if name in part} for part in parts]
    return fields


def function_tools(functions: Sequence[Any] | None) -> tuple[dict[str, Any], ...]:
    """Tools of functions with a `name`, a `description` and `parameters`; otherwise as `tool_mappings`."""
    check_count("tools", len(functions or ()), MAX_TOOLS)
    found = ({name: getattr(each, name) for name in ("name", "description", "parameters")} for each in functions or ())
    given = ({name: value for name, value in each.items() if value is not None} for each in found)
    return tuple({"type": "function", "function": each} for each in given)


def tool_mappings(tools: Sequence[FunctionTool] | None) -> tuple[dict[str, Any], ...]:
    """The tools as chat templates read them.

    Raises:
        RequestError: there are too many.
    """
    check_count("tools", len(tools or ()), MAX_TOOLS)
    return tuple(msgspec.to_builtins(tool) for tool in tools or ())


def check_count(param: str, count: int, limit: int) -> None:
    """Check the length of a list.

    Raises:
        RequestError: it is above the limit.
    """
    if count > limit:
        hint = f"at most {limit} are read"
        raise RequestError(f"{param} has {count} items", hint, code=ErrorCode.TOO_LARGE, param=param)


class TextFormat(StrictStruct, tag_field="type", tag="text"):
    """Free text."""


class JsonObjectFormat(StrictStruct, tag_field="type", tag="json_object", omit_defaults=True):
    """Any JSON object; with a schema, which llama.cpp reads here, JSON of that schema."""

    schema: Schema | None = None


class NamedSchema(StrictStruct):
    """A JSON schema. Answers follow it, whatever `strict` is."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(StrictStruct, tag_field="type", tag="json_schema"):
    """JSON of a schema, in the form of the chat API."""

    json_schema: NamedSchema


class FlatJsonSchemaFormat(NamedSchema, tag_field="type", tag="json_schema", omit_defaults=True):
    """JSON of a schema, in the form of the Responses API."""


class StructuredOutputs(StrictStruct):
    """What vLLM calls structured outputs; one of them."""

    json: Schema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class FormatFields(StrictStruct):
    """What the answer has to look like; at most one of them is given."""

    response_format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
        about("Text, any JSON object, or JSON of a schema (needs the extra structured)."),
    ] = None
    structured_outputs: Annotated[StructuredOutputs | None, about("Extension. The format as vLLM has it.")] = None
    guided_json: Annotated[Schema | str | None, about("Extension. vLLM's older name of a JSON schema.")] = None
    guided_regex: Annotated[str | None, about("Extension. vLLM's older name of a regex of the whole answer.")] = None
    guided_choice: Annotated[list[str] | None, about("Extension. vLLM's older name of texts to choose from.")] = None
    guided_grammar: Annotated[str | None, about("Extension. vLLM's older name of a Lark or GBNF grammar.")] = None
    json_schema: Annotated[Schema | None, about("Extension. JSON schema of the answer, as llama.cpp has it.")] = None
    grammar: Annotated[str | None, about("Extension. Lark or GBNF grammar of the answer, as llama.cpp has it.")] = None


def response_format(
    fields: FormatFields, other: TextFormat | JsonObjectFormat | FlatJsonSchemaFormat | None = None
) -> ResponseFormat | None:
    """The format of an answer; None for free text.

    Args:
        fields: the body.
        other: the format that the Responses API has in `text`.

    Raises:
        RequestError: several formats are given, or one is wrong; the error names the field.
    """
    given = {name: getattr(fields, name) for name in FormatFields.__struct_fields__} | {"text.format": other}
    named = [(name, value) for name, value in given.items() if value is not None and type(value) is not TextFormat]
    if not named:
        return None
    if len(named) > 1:
        (one, _), (other_name, _) = named[:2]
        raise invalid(
            other_name, f"{one} and {other_name} are both given", "an answer has one format: give one of them"
        )
    name, value = named[0]
    try:
        return _format_of(name, value)
    except InputError as error:
        raise invalid(name, f"{name}: {error.what}", error.hint) from error


def _format_of(name: str, value: Any) -> ResponseFormat:
    """The format of one field.

    Raises:
        InputError: it is wrong.
    """
    if isinstance(value, StructuredOutputs):
        given = [each for each in value.__struct_fields__ if getattr(value, each) not in (None, False)]
        if len(given) != 1:
            what = f"{' and '.join(given) or 'nothing'} is given"
            raise InputError(what, "give one of json, json_object, regex, choice and grammar")
        name, value = given[0], getattr(value, given[0])
    elif isinstance(value, JsonSchemaFormat):
        name, value = "json_schema", value.json_schema.schema
    elif isinstance(value, JsonObjectFormat | FlatJsonSchemaFormat):
        name, value = "json_object" if value.schema is None else "json_schema", value.schema
    return _MAKERS[name.removeprefix("guided_")](value)
