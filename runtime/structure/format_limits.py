"""Limits of response formats, which are checked before they are compiled: compiling recurses, and takes time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from ...errors import InputError
from .response_format import FormatKind, ResponseFormat

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
