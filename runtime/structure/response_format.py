"""What an answer has to look like: a JSON schema, any JSON object, a regex, a grammar, or one of some texts.

Limits are checked before a format is compiled: compiling recurses, and takes time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
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
COMPILER_STACK_BYTES: Final = 256 << 20
"""Stack of the thread that compiles; what is not used of it takes no memory."""
_MOST_LEVELS: Final = 20_000
"""Largest depth of recursion in compiling. llguidance takes up to 8 KB of stack for a level, and ends the process where
there is no more."""
_MOST_OPTIONAL: Final = 2000
"""Largest number of optional properties of an object: the time to compile them grows with the square."""
_MOST_PATTERNS: Final = 200
"""Largest number of `patternProperties` of an object, of which each is compared with all others."""
_MOST_WORK: Final = 4_000_000_000
"""Largest product of the number of a format's parts and of its length. The time to compile alternatives, and the memory
for text that is the only one possible, grow with it: to seconds and half a gigabyte."""
_GRAMMAR_PART: Final = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|\w++')
"""A text, a name, or a word of a regex. It goes over each character once, whatever the grammar is."""


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
        return {FormatKind.JSON_SCHEMA: "JSON schema", FormatKind.CHOICE: "list of choices"}.get(self.kind, self.kind)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, after: str = "") -> ResponseFormat:
        """An answer that is JSON of a schema (draft 2020-12).

        Args:
            schema: the schema, parsed or as JSON text.
            after: text after which it begins; see the attribute.

        Raises:
            InputError: the schema is not JSON.
        """
        try:
            parsed: Any = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(parsed, Mapping | bool):
                raise InputError(f"the JSON schema is {shown(parsed)}", "it must be an object")
            plain = dict(parsed) if isinstance(parsed, Mapping) else parsed
            text = schema if isinstance(schema, str) else json.dumps(plain, ensure_ascii=False, allow_nan=False)
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


def is_gbnf(text: str) -> bool:
    """Whether a grammar is GBNF, whose rules are written with `::=`, and not Lark."""
    return _LARK.search(text) is None and "::=" in text


def check_limits(response_format: ResponseFormat) -> None:
    """Refuse a format that compiling could not deal with.

    Raises:
        InputError: it is nested too deep, has too many parts, or an object of too many optional or pattern properties.
    """
    kind, text = response_format.kind, response_format.text
    if kind is FormatKind.GRAMMAR:
        # Rules, groups and the schemas in a grammar recurse, and have at least one of these each.
        levels = sum(map(text.count, ":([{"))
        parts: Iterator[Any] = _GRAMMAR_PART.finditer(text)
    elif kind is FormatKind.JSON_SCHEMA:
        schema = json.loads(text)
        objects = [value for value in _values(schema) if isinstance(value, dict)]
        for value in objects:
            _check_object(value)
        levels, parts = _levels(schema), iter(objects)
    else:
        return
    if levels > _MOST_LEVELS:
        raise InputError(
            f"the {response_format.described} of the answer may be nested {levels} levels deep",
            f"at most {_MOST_LEVELS} are allowed; simplify it",
        )
    most = _MOST_WORK // len(text)
    if next(islice(parts, most, None), None) is not None:
        raise InputError(
            f"the {response_format.described} of the answer has more than {most} parts in {len(text)} characters",
            "simplify it; where the answer is one of many texts, give them as choices or as a regex",
        )


def _check_object(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and len(properties) > _MOST_OPTIONAL:
        optional = len(properties.keys() - set(map(str, required if isinstance(required, list) else ())))
        if optional > _MOST_OPTIONAL:
            raise InputError(
                f"the JSON schema of the answer has an object with {optional} optional properties",
                f"at most {_MOST_OPTIONAL} are allowed; list the others as required",
            )
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > _MOST_PATTERNS:
        raise InputError(
            f"the JSON schema of the answer has an object with {len(patterns)} patternProperties",
            f"at most {_MOST_PATTERNS} are allowed",
        )


def _values(root: Any) -> Iterator[Any]:
    """Every value of a JSON value, itself included."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, list):
            waiting.extend(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())


def _levels(schema: Any) -> int:
    """Upper bound of how deep a schema is nested when its references are followed, each of them once."""
    values = list(_values(schema))
    depths: dict[int, int] = {}
    for value in reversed(values):  # parts come behind what they are parts of
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        depths[id(value)] = 1 + max((depths[id(part)] for part in parts), default=0)
    whole = depths[id(schema)]
    references = {value["$ref"] for value in values if isinstance(value, dict) and isinstance(value.get("$ref"), str)}
    return whole + sum(depths[id(_target(schema, reference))] for reference in references)


def _target(schema: Any, reference: str) -> Any:
    """What a reference leads to; the whole schema where it is not a path of names within it."""
    value = schema
    for part in reference[2:].split("/") if reference.startswith("#/") else ():
        value = value.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
        if value is None:
            return schema
    return value
