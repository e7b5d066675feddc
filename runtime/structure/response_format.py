"""What an answer has to look like: a JSON schema, any JSON object, a regex, a grammar, or one of some texts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ...errors import InputError
from ...models.json_file import shown

CLIENT: Final = ContextVar("client", default="")
"""Who asks for the formats that are compiled in this context: a server sets the address of its client."""
MAX_FORMAT_BYTES: Final = 4 << 20
"""Largest schema, regex or grammar, in bytes of UTF-8."""
_MAX_CHOICES: Final = 10_000
_LARK: Final = re.compile(r"(?m)^[^\S\n]*+(?:%llguidance\b|start\s*+(?:\[[^\]\n]*+\]\s*+)?+:(?!:=))")
"""The beginning of a grammar in Lark. It reads no character more than a few times, whatever the text is."""


class FormatKind(StrEnum):
    """The language in which a format is described."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    """Lark, in the dialect of llguidance, or GBNF, which llama.cpp reads."""
    CHOICE = "choice"


@dataclass(frozen=True)
class ResponseFormat:
    """What an answer has to look like. Make one with `json_schema`, `json_object`, `regex`, `grammar` or `choice`."""

    kind: FormatKind
    text: str
    """The schema as JSON, the regex, the grammar, or the choices as a JSON list."""
    after: str = ""
    """A text of the answer after which the format begins, such as `</think>`; empty for the beginning. White space may
    come in between."""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, FormatKind) or not isinstance(self.text, str) or not isinstance(self.after, str):
            raise InputError(
                f"ResponseFormat({shown(self.kind)}, {shown(self.text)}, {shown(self.after)}) is not a format",
                "make one with ResponseFormat.json_schema, json_object, regex, grammar or choice",
            )
        try:
            size = len(self.text.encode())
            self.after.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the {self.kind.name.lower()} of the answer is not valid Unicode", "remove the lone surrogates"
            ) from error
        if size > MAX_FORMAT_BYTES:
            raise InputError(
                f"the {self.described} of the answer has {size} bytes", f"at most {MAX_FORMAT_BYTES} are allowed"
            )
        if not self.text.strip() and self.kind is not FormatKind.REGEX:
            raise InputError(f"the {self.described} of the answer is empty", "leave it out for free text")

    @property
    def described(self) -> str:
        """What it is, in a sentence."""
        return {
            FormatKind.JSON_SCHEMA: "JSON schema",
            FormatKind.REGEX: "regex",
            FormatKind.GRAMMAR: "grammar",
            FormatKind.CHOICE: "list of choices",
        }[self.kind]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, after: str = "") -> ResponseFormat:
        """An answer that is JSON of a schema (draft 2020-12).

        Args:
            schema: the schema, parsed or as JSON text.
            after: text after which it begins; see the attribute.

        Raises:
            InputError: the schema is not JSON.
        """
        if isinstance(schema, str):
            try:
                parsed = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise InputError(f"the JSON schema is not JSON: {error}", "give a JSON schema") from error
            if not isinstance(parsed, dict | bool):
                raise InputError(f"the JSON schema is {shown(parsed)}", "it must be an object")
            return cls(FormatKind.JSON_SCHEMA, schema, after)
        if not isinstance(schema, Mapping | bool):
            raise InputError(f"the JSON schema is {shown(schema)}", "it must be an object")
        try:
            text = json.dumps(schema if isinstance(schema, bool) else dict(schema), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"the JSON schema is not JSON: {error}", "give a JSON schema") from error
        return cls(FormatKind.JSON_SCHEMA, text, after)

    @classmethod
    def json_object(cls, after: str = "") -> ResponseFormat:
        """An answer that is any JSON object."""
        return cls.json_schema({"type": "object"}, after)

    @classmethod
    def regex(cls, pattern: str, after: str = "") -> ResponseFormat:
        """An answer that matches a regex as a whole; look-around and back references do not exist in it."""
        return cls(FormatKind.REGEX, pattern, after)

    @classmethod
    def grammar(cls, text: str, after: str = "") -> ResponseFormat:
        """An answer of a grammar in Lark, as llguidance writes it, or in llama.cpp's GBNF."""
        return cls(FormatKind.GRAMMAR, text, after)

    @classmethod
    def choice(cls, texts: Sequence[str], after: str = "") -> ResponseFormat:
        """An answer that is one of some texts.

        Raises:
            InputError: there are none, or one is not text.
        """
        if isinstance(texts, str) or not texts or not all(isinstance(each, str) and each for each in texts):
            raise InputError(f"the choices are {shown(texts)}", "give a list of texts that are not empty")
        if len(texts) > _MAX_CHOICES:
            raise InputError(f"there are {len(texts)} choices", f"at most {_MAX_CHOICES} are allowed")
        return cls(FormatKind.CHOICE, json.dumps(list(texts)), after)

    @classmethod
    def of_openai(cls, value: Mapping[str, Any]) -> ResponseFormat | None:
        """The format of OpenAI's `response_format`; None for plain text.

        Raises:
            InputError: the value is something else.
        """
        kind = value.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            schema = value.get("schema")  # llama.cpp has a schema here too
            return cls.json_object() if schema is None else cls.json_schema(schema)
        if kind == "json_schema":
            inner = value.get("json_schema", value)
            if isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping | bool):
                return cls.json_schema(inner["schema"])
            raise InputError("response_format has no schema", "give json_schema: {name, schema}")
        raise InputError(f"response_format has the type {shown(kind)}", "it must be text, json_object or json_schema")


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF, whose rules are written with `::=`, and not Lark."""
    return _LARK.search(text) is None and "::=" in text
