"""Random bodies of requests: fields that the schema of a body allows, and others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st

NUMBERS = st.sampled_from((0, -1, 1, 0.5, 2, 1e-9, 1e9, 2**64 - 1, -(2**63), 2**1000, -(2**1000)))
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
NAMES = (
    st.sampled_from(("self", "template", "tokenizer", "loop", "caller", "documents", "tools", "range", ""))
    | st.sampled_from((f"a` - at `$[{'9' * 5000}]", "type", "role", "text", "9" * 5000))
    | TEXTS
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
_PLAIN: Mapping[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "integer": st.integers(-1, 3) | NUMBERS,
    "number": NUMBERS,
    "string": TEXTS,
}


@st.composite
def bodies(draw: st.DrawFn, kind: type[msgspec.Struct], required: Mapping[str, Any]) -> dict[str, Any]:
    """A body with the required fields and a few others, any of which may be replaced by something of another form.

    Args:
        draw: hypothesis' own.
        kind: the body.
        required: its required fields, and others that every body has.
    """
    definitions = msgspec.json.schema(kind)["$defs"]
    fields = definitions[kind.__name__]["properties"]
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True))
    body = {**required, **{name: draw(_values(fields[name], definitions)) for name in names}}
    if draw(st.integers(0, 3)) == 0:
        body[draw(st.sampled_from(sorted(fields)) | NAMES)] = draw(JSON)
    return body


def _values(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values of a schema; ranges are not kept."""
    if "$ref" in schema:
        return st.deferred(lambda: _values(definitions[schema["$ref"].rpartition("/")[2]], definitions))
    if "anyOf" in schema:
        return st.one_of([_values(each, definitions) for each in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("type") == "array":
        return st.lists(_values(schema.get("items", {}), definitions), max_size=2)
    if "properties" in schema:
        fields = {name: _values(each, definitions) for name, each in schema["properties"].items()}
        needed = {name: fields.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional=fields)
    if schema.get("type") == "object":
        return st.dictionaries(NAMES, JSON, max_size=3)
    return _PLAIN.get(schema.get("type", ""), JSON)
