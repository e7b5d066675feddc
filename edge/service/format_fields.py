"""Fields of a request that say what the answer has to look like, under the names that several servers have for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from ...errors import InputError
from ...runtime.structure.response_format import ResponseFormat
from .request_error import ErrorCode, RequestError

Schema: TypeAlias = dict[str, Any] | bool


class TextFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Free text."""


class JsonObjectFormat(
    msgspec.Struct, kw_only=True, tag_field="type", tag="json_object", forbid_unknown_fields=True, omit_defaults=True
):
    """Any JSON object; with a schema, which llama.cpp reads here, JSON of that schema."""

    schema: Schema | None = None


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema. Answers follow it, whatever `strict` is."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """JSON of a schema, in the form of the chat API."""

    json_schema: NamedSchema


class FlatJsonSchemaFormat(
    msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True, omit_defaults=True
):
    """JSON of a schema, in the form of the Responses API."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What vLLM calls structured outputs; one of them."""

    json: Schema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class FormatFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the answer has to look like; at most one of them is given."""

    response_format: Annotated[
        TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
        Meta(description="Text, any JSON object, or JSON of a schema (needs the extra structured)."),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description="Extension. A JSON schema, regex, grammar or choices, as vLLM has it."),
    ] = None
    guided_json: Annotated[
        Schema | str | None,
        Meta(description="Extension. JSON schema that the answer follows; an older name of vLLM's."),
    ] = None
    guided_regex: Annotated[
        str | None, Meta(description="Extension. Regex that the whole answer matches; an older name of vLLM's.")
    ] = None
    guided_choice: Annotated[
        list[str] | None, Meta(description="Extension. Texts of which the answer is one; an older name of vLLM's.")
    ] = None
    guided_grammar: Annotated[
        str | None, Meta(description="Extension. Lark or GBNF grammar of the answer; an older name of vLLM's.")
    ] = None
    json_schema: Annotated[
        Schema | None, Meta(description="Extension. JSON schema that the answer follows, as llama.cpp has it.")
    ] = None
    grammar: Annotated[
        str | None, Meta(description="Extension. Lark or GBNF grammar of the answer, as llama.cpp has it.")
    ] = None


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
        raise RequestError(
            f"{named[0][0]} and {named[1][0]} are both given",
            "an answer has one format: give one of them",
            code=ErrorCode.INVALID_VALUE,
            param=named[1][0],
        )
    name, value = named[0]
    try:
        return _format_of(name, value)
    except InputError as error:
        raise RequestError(f"{name}: {error.what}", error.hint, code=ErrorCode.INVALID_VALUE, param=name) from error


def _format_of(name: str, value: Any) -> ResponseFormat:
    """The format of one field.

    Raises:
        InputError: it is wrong.
    """
    if isinstance(value, StructuredOutputs):
        return _structured(value)
    if isinstance(value, JsonObjectFormat | JsonSchemaFormat | FlatJsonSchemaFormat):
        schema = value.json_schema.schema if isinstance(value, JsonSchemaFormat) else value.schema
        return ResponseFormat.json_object() if schema is None else ResponseFormat.json_schema(schema)
    makers: dict[str, Callable[[Any], ResponseFormat]] = {
        "guided_json": ResponseFormat.json_schema,
        "json_schema": ResponseFormat.json_schema,
        "guided_regex": ResponseFormat.regex,
        "guided_choice": ResponseFormat.choice,
    }
    return makers.get(name, ResponseFormat.grammar)(value)


def _structured(fields: StructuredOutputs) -> ResponseFormat:
    given = [name for name in fields.__struct_fields__ if getattr(fields, name) not in (None, False)]
    if len(given) != 1:
        raise InputError(
            f"{' and '.join(given) or 'nothing'} is given", "give one of json, json_object, regex, choice and grammar"
        )
    if fields.json_object:
        return ResponseFormat.json_object()
    if fields.json is not None and fields.json is not False:
        return ResponseFormat.json_schema(fields.json)
    if fields.regex is not None:
        return ResponseFormat.regex(fields.regex)
    return (
        ResponseFormat.choice(fields.choice)
        if fields.choice is not None
        else ResponseFormat.grammar(fields.grammar or "")
    )
