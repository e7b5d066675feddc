"""Finished answers of a schema validate: random schemas, and the test suite of JSON Schema where it is at hand."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")

import numpy as np

import edgerun
from edgerun import Engine, FinishReason, GenerateOptions, InputError, ResponseFormat, Speculation
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.nightly import some_nightly
from support.tiny_models import write_bundle

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


SUITE = os.environ.get("EDGERUN_JSON_SCHEMA_SUITE")
"""The folder `tests/draft2020-12` of the JSON Schema Test Suite."""
SEEDS = 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A random model with a longer context, in which nearly every draft token pays."""
    bundle = write_bundle(tmp_path_factory.mktemp("schemas"), max_position_embeddings=1024)
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        yield engine


def finished_answers(engine: Engine, schema: Any, seeds: int) -> int:
    """Generate answers, check those that end by themselves, and return their number."""
    # What ends strings, arrays and objects is made likelier: a random model would fill its context.
    closing = {engine.tokenizer.encode(text, add_special_tokens=False)[0]: 3.0 for text in '"]}'}
    options = GenerateOptions(
        raw=True,
        max_tokens=300,
        temperature=1.0,
        logit_bias=closing,
        response_format=ResponseFormat.json_schema(schema),
    )
    finished = 0
    for seed in range(seeds):
        speculation = (Speculation.AUTO, Speculation.OFF)[seed % 2]
        reply = engine.generate("the", options, seed=seed, speculation=speculation)
        if reply.finish_reason is FinishReason.STOP:
            finished += 1
            validator = jsonschema.Draft202012Validator
            jsonschema.validate(json.loads(reply.text), schema, validator, format_checker=validator.FORMAT_CHECKER)
        else:
            assert reply.finish_reason is FinishReason.LENGTH
    return finished


@pytest.mark.parametrize("first", some_nightly(range(0, 300, 20), every=15))
def test_finished_answers_of_random_schemas_validate(engine: Engine, first: int) -> None:
    finished = sum(finished_answers(engine, random_schema(seed), SEEDS) for seed in range(first, first + 20))
    assert finished >= 20


def names_a_cause(message: str, schema: Any) -> bool:
    """Whether a refusal names a keyword or a value of a schema, or says that nothing is valid."""
    why = message.removeprefix("the JSON schema of the answer ").rpartition(";")[0].replace("Property ", "Properties ")
    text = json.dumps(schema)
    words = set(re.findall(r"[$\w]{2,}", text))
    if '"$ref": "https://json-schema.org/' in text:
        words.add("$dynamicAnchor")  # in the schema of schemas, which is known
    return "nsatisfiable" in why or bool(words & set(re.findall(r"[$\w]{2,}", why)))


@pytest.mark.nightly
@pytest.mark.skipif(SUITE is None, reason="EDGERUN_JSON_SCHEMA_SUITE names no folder")
def test_finished_answers_of_the_test_suite_validate(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Schemas are accepted and followed, or refused in one line that names what is not supported, or says why."""
    accepted = answered = refused = 0
    for file in sorted(Path(SUITE or "").glob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            try:
                finished = finished_answers(engine, case["schema"], SEEDS)
            except InputError as error:
                refused += 1
                if not names_a_cause(str(error), case["schema"]):
                    pytest.fail(f"{error}: {case['schema']}")
                continue
            accepted += 1
            answered += finished
    with capsys.disabled():
        print(f"{accepted} schemas accepted, {refused} refused; {answered} answers finished and validated")
    assert answered > accepted > 0
