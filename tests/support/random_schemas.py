"""Random JSON schemas of the keywords that are supported, whose instances are small."""

from __future__ import annotations

from typing import Any

import numpy as np

_WORDS = ("id", "name", "a b", "größe", 'say "x"', "back\\slash", "漢字", "x")
_PATTERNS = ("^[a-f]{2,4}$", "^(x|yz)+$", "^[0-9]{3}-[A-Z]$", "^\\w{1,3}$")
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid")


def random_schema(seed: int) -> dict[str, Any]:
    """A schema; the same one for the same seed."""
    random = np.random.default_rng(seed)
    schema = _schema(random, 3)
    if random.random() < 0.2:
        node = {
            "type": "object",
            "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}, "value": schema},
            "required": ["next"],
            "additionalProperties": False,
        }
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$ref": "#/$defs/node",
            "$defs": {"node": node},
        }
    return schema


def _schema(random: np.random.Generator, depth: int) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "text"]
    kind = random.choice(kinds + ["object", "array", "any", "types", "all"] * (depth > 0))
    low = int(random.integers(-50, 50))
    match kind:
        case "string":
            least = int(random.integers(0, 3))
            return {"type": "string", "minLength": least, "maxLength": least + int(random.integers(0, 6))}
        case "text":
            if random.random() < 0.5:
                return {"type": "string", "pattern": str(random.choice(_PATTERNS))}
            return {"type": "string", "format": str(random.choice(_FORMATS))}
        case "integer":
            return {"type": "integer", "minimum": low, "maximum": low + int(random.integers(0, 200))}
        case "number":
            return {"type": "number", "exclusiveMinimum": low, "maximum": low + 1.5}
        case "enum":
            values = [1, 2.5, None, True, "x", "größe", [1, {"a": None}]]
            return {"enum": [values[i] for i in random.permutation(len(values))[:3]]}
        case "const":
            return {"const": {"k": [int(random.integers(9)), str(random.choice(_WORDS))]}}
        case "object":
            names = [str(name) for name in random.permutation(_WORDS)[: random.integers(1, 5)]]
            return {
                "type": "object",
                "properties": {name: _schema(random, depth - 1) for name in names},
                "required": [name for name in names if random.random() < 0.6],
                "additionalProperties": False,
            }
        case "array":
            least = int(random.integers(0, 2))
            items = {"type": "array", "items": _schema(random, depth - 1), "minItems": least, "maxItems": least + 2}
            return items | ({"prefixItems": [_schema(random, 0)]} if random.random() < 0.3 else {})
        case "any":
            return {"anyOf": [_schema(random, depth - 1) for _ in range(random.integers(2, 4))]}
        case "types":
            return {"type": ["null", "boolean", "integer"], "minimum": 0, "maximum": 99}
        case "all":
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 40, "multipleOf": 3}]}
    return {"type": str(kind)}
