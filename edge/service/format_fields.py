"""Fields of a request that say what the answer has to look like, under the names that several servers have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, TypeAlias

from ...errors import InputError
from ...runtime.structure.response_format import ResponseFormat
from .body_decoder import StrictStruct, about
from .request_error import invalid

Schema: TypeAlias = dict[str, Any] | bool


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
    structured_outputs: Annotated[
        StructuredOutputs | None, about("Extension. A JSON schema, regex, grammar or choices, as vLLM has it.")
    ] = None
    guided_json: Annotated[
        Schema | str | None, about("Extension. JSON schema that the answer follows; an older name of vLLM's.")
    ] = None
    guided_regex: Annotated[
        str | None, about("Extension. Regex that the whole answer matches; an older name of vLLM's.")
    ] = None
    guided_choice: Annotated[
        list[str] | None, about("Extension. Texts of which the answer is one; an older name of vLLM's.")
    ] = None
    guided_grammar: Annotated[
        str | None, about("Extension. Lark or GBNF grammar of the answer; an older name of vLLM's.")
    ] = None
    json_schema: Annotated[
        Schema | None, about("Extension. JSON schema that the answer follows, as llama.cpp has it.")
    ] = None
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


_MAKERS: Final[Mapping[str, Callable[[Any], ResponseFormat]]] = {
    "json": ResponseFormat.json_schema,
    "json_schema": ResponseFormat.json_schema,
    "json_object": lambda _: ResponseFormat.json_object(),
    "regex": ResponseFormat.regex,
    "choice": ResponseFormat.choice,
    "grammar": ResponseFormat.grammar,
}
"""What makes the format of a field, by its name; the names may begin with `guided_`."""
