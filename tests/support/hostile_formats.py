"""Response formats that are wrong, huge, recursive or explosive, as requests have them."""

from __future__ import annotations

from typing import Any, Final

from edgerun import ResponseFormat

_NAMES: Final = [f"p{number}" for number in range(10_000)]


def _chain(length: int) -> dict[str, Any]:
    links = {f"d{n}": {"properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "null"}}}


def _rules(length: int) -> str:
    links = "\n".join(f'r{n}: "x" r{n + 1} | "y"' for n in range(length))
    return f'start: r0\n{links}\nr{length}: "z"'


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


_HOSTILE: Final[dict[str, dict[str, tuple[Any, str]]]] = {
    "guided_json": {
        "keyword": ({"not": {}}, "not supported: not"),
        "reference to itself": ({"$ref": "#"}, "nothing can follow"),
        "references in a circle": (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
            "nothing can follow",
        ),
        "recursive": (
            {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "additionalProperties": {"$ref": "#/$defs/n"}}}},
            "",
        ),
        "long chain of references": (_chain(1500), ""),
        "too long chain of references": (_chain(20_000), "levels deep"),
        "nested": (_nested(300), "recursion limit"),
        "10,000 required properties": (
            {"type": "object", "properties": {key: {"type": "boolean"} for key in _NAMES}, "required": _NAMES},
            "",
        ),
        "10,000 optional properties": ({"properties": {key: {} for key in _NAMES}}, "optional properties"),
        "10,000 pattern properties": (
            {"patternProperties": {f"^{name}": {} for name in _NAMES}},
            "10000 patternProperties",
        ),
        "100,000 constants": ({"enum": list(range(100_000))}, "too big"),
        "a million items": ({"type": "array", "minItems": 10**6, "items": {"type": "null"}}, "too complex"),
        "a billion characters": ({"type": "string", "minLength": 10**9}, ""),
        "combinations": (
            {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for i in range(8)]} for j in range(8)]},
            "too large",
        ),
        "explosive pattern": ({"type": "string", "pattern": "^((a{1,1000}){1,1000}){1,1000}$"}, "too many expressions"),
        "a list of long constants": (
            {"type": "array", "minItems": 5000, "prefixItems": [{"const": f"{n}{'a' * 400}"} for n in range(5000)]},
            " parts in ",
        ),
    },
    "guided_regex": {
        "explosive regex": ("((a{1,1000}){1,1000}){1,1000}", "too many expressions"),
        "exponential regex": ("[ab]*a[ab]{200}", ""),
        "nested regex": ("(" * 5000 + "a" + ")*" * 5000, "nested parentheses"),
    },
    "guided_grammar": {
        "rules in a circle": ("start: a\na: b\nb: a", "nothing can follow"),
        "ambiguous": ('start: e\ne: e e e | e e | "a" | "aa" | ""', ""),
        "long chain of rules": (_rules(4000), ""),
        "too long chain of rules": (_rules(30_000), "levels deep"),
        "2,000 optional parts": ("start: " + '"a"? ' * 2000, "too complex"),
        "200,000 alternatives": ("start: " + " | ".join(f'"a{n}"' for n in range(200_000)), " parts in "),
        "a long sequence": ("start: " + " ".join(f'"a{n}"' for n in range(40_000)), " parts in "),
        "a sequence of long texts": ("start: " + " ".join(f'"{n}{"a" * 400}"' for n in range(5000)), " parts in "),
        "a million blank lines": ('root ::= "a"' + "\n" * 1_000_000, ""),
        "nested GBNF": ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deep"),
    },
    "guided_choice": {
        "10,000 choices": ([f"choice {name}" for name in _NAMES], ""),
        "too many choices": ([f"choice {n}" for n in range(10_001)], "10001 choices"),
    },
}
HOSTILE: Final = {
    name: (field, value, said) for field, cases in _HOSTILE.items() for name, (value, said) in cases.items()
}
"""The field of a request, its value, and what the error says; empty where an answer is possible."""


def response_format_of(field: str, value: Any) -> ResponseFormat:
    """The format of a field."""
    make = {
        "guided_json": ResponseFormat.json_schema,
        "guided_regex": ResponseFormat.regex,
        "guided_grammar": ResponseFormat.grammar,
        "guided_choice": ResponseFormat.choice,
    }
    return make[field](value)
