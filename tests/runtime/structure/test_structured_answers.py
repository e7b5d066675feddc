"""Answers of a real engine follow their format, whatever is drafted; bad formats are one clear error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")

import edgerun
from edgerun import Engine, FinishReason, GenerateOptions, InputError, Reply, ResponseFormat, Speculation
from edgerun.runtime.sampling.logprobs import MAX_ALTERNATIVES
from support.tiny_models import write_bundle

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["invoice", "letter"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
ANY = GenerateOptions(raw=True, max_tokens=200, temperature=1.0, seed=1)
OFF = Speculation.OFF


def counts_add_up(reply: Reply) -> bool:
    stats = reply.stats
    return stats.completion_tokens == 1 + stats.accepted + stats.decode_passes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_of_a_schema_is_valid_and_does_not_depend_on_drafting(
    eager_engine: Engine, seed: int, temperature: float
) -> None:
    options = ANY.changed({"response_format": ResponseFormat.json_schema(PERSON), "seed": seed})
    reply = eager_engine.generate("the thing", options, temperature=temperature, repeat_penalty=1.3)
    plain = eager_engine.generate("the thing", options, temperature=temperature, repeat_penalty=1.3, speculation=OFF)
    assert reply.finish_reason is FinishReason.STOP
    assert reply.text == plain.text
    assert reply.finish_reason is plain.finish_reason
    assert reply.stats.completion_tokens == plain.stats.completion_tokens
    jsonschema.validate(json.loads(reply.text), PERSON)
    assert counts_add_up(reply)
    assert counts_add_up(plain)
    # Every token is drafted that leaves no choice, and the one behind it comes from the same pass.
    assert reply.stats.by_source["grammar"].accepted >= 40
    assert reply.stats.decode_passes < plain.stats.decode_passes


FORMATS = {
    "regex": (ResponseFormat.regex(r"[a-f]{3}-[0-9]{2,4}(é|漢)?"), r"[a-f]{3}-[0-9]{2,4}(é|漢)?"),
    "choice": (ResponseFormat.choice(["yes", "no", 'so "so"']), r'yes|no|so "so"'),
    "lark": (ResponseFormat.grammar('start: "x" digits\ndigits: /[0-9]{2}/'), "x[0-9]{2}"),
    "gbnf": (ResponseFormat.grammar('root ::= "x" digit digit\ndigit ::= [0-9]'), "x[0-9]{2}"),
    "embedded": (ResponseFormat.grammar('start: "f=" %json {"type": "boolean"} ";"'), "f=(true|false);"),
    "object": (ResponseFormat.json_object(), r"(?s)\{.*\}"),
    "any": (ResponseFormat.json_schema(True), r'(?s)\{.*\}|\[.*\]|".*"|-?[0-9].*|true|false|null'),
}


@pytest.mark.parametrize("name", FORMATS)
def test_answers_have_the_form_of_every_kind_of_format(eager_engine: Engine, name: str) -> None:
    response_format, pattern = FORMATS[name]
    finished = 0
    for seed in range(8):
        reply = eager_engine.generate("the other", ANY, seed=seed, response_format=response_format)
        plain = eager_engine.generate("the other", ANY, seed=seed, response_format=response_format, speculation=OFF)
        assert reply.text == plain.text
        if reply.finish_reason is FinishReason.STOP:
            finished += 1
            assert re.fullmatch(pattern, reply.text)
    assert finished > 0


def test_special_tokens_of_a_grammar_are_tokens(eager_engine: Engine) -> None:
    grammar = ResponseFormat.grammar('start: <|user|> "no" <[2]>')
    reply = eager_engine.generate("the", ANY, response_format=grammar, logprobs=0)
    assert (
        next(token.token_id for token in reply.logprobs)
        == eager_engine.tokenizer.encode("<|user|>", add_special_tokens=False)[0]
    )
    assert reply.logprobs[-1].token_id == 2
    assert reply.text == "no"


def test_an_answer_that_is_cut_says_so(eager_engine: Engine) -> None:
    for speculation in (Speculation.AUTO, OFF):
        reply = eager_engine.generate(
            "the", ANY, response_format=ResponseFormat.json_schema(PERSON), max_tokens=9, speculation=speculation
        )
        assert reply.finish_reason is FinishReason.LENGTH
        assert reply.stats.completion_tokens == 9


def test_a_format_covers_the_start_of_an_answer(eager_engine: Engine) -> None:
    schema = ResponseFormat.json_schema(PERSON)
    start = '{"name": "Jo'
    reply = eager_engine.generate("the", ANY, response_format=schema, answer_start=start)
    jsonschema.validate(json.loads(start + reply.text), PERSON)
    with pytest.raises(InputError, match="does not allow what the answer begins with"):
        eager_engine.generate("the", ANY, response_format=schema, answer_start="Certainly")


def test_a_format_begins_after_a_text(eager_engine: Engine) -> None:
    """The text before it is free, but for its end."""
    response_format = ResponseFormat.regex("[0-9]{3}", after="the")
    thinking = "in the"
    for speculation in (Speculation.AUTO, OFF):
        reply = eager_engine.generate(
            "a", ANY, response_format=response_format, answer_start=thinking, speculation=speculation
        )
        assert re.fullmatch(r"\s*[0-9]{3}", reply.text)
    free = eager_engine.generate("a", ANY, max_tokens=20, response_format=ResponseFormat.regex("[0-9]", after="qqqq"))
    assert free.finish_reason is FinishReason.LENGTH
    assert free.text == eager_engine.generate("a", ANY, max_tokens=20, logit_bias={0: -100.0}).text


def test_other_options_keep_the_format(eager_engine: Engine) -> None:
    for speculation in (Speculation.AUTO, OFF):
        options = ANY.changed({"response_format": ResponseFormat.choice(["yes", "no"]), "speculation": speculation})
        reply = eager_engine.generate("the", options, logprobs=MAX_ALTERNATIVES)
        assert "".join(token.text for token in reply.logprobs) == reply.text
    greedy = GenerateOptions(raw=True, max_tokens=60, response_format=ResponseFormat.json_schema(PERSON))
    exact = eager_engine.generate("the", greedy, exact=True)
    assert exact.text == eager_engine.generate("the", greedy, speculation=OFF).text
    several = eager_engine.generate("the", ANY, n=3, response_format=ResponseFormat.regex("[a-z]{4}"))
    assert all(re.fullmatch("[a-z]{4}", choice.text) for choice in several.choices)


def test_a_model_without_an_end_token_ends_with_its_format(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path)
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        config = json.loads((bundle / name).read_text(encoding="utf-8"))
        config = {key: value for key, value in config.items() if "eos" not in key}
        (bundle / name).write_text(json.dumps(config), encoding="utf-8")
    (bundle / "edge.json").unlink()
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        reply = engine.generate("the", ANY, response_format=ResponseFormat.choice(["yes", "yes, no"]))
        assert reply.finish_reason is FinishReason.STOP
        assert reply.text == "yes, no"


BAD = {
    "keywords": (
        lambda: ResponseFormat.json_schema({"type": "array", "contains": {}, "uniqueItems": True}),
        "contains, uniqueItems",
    ),
    "one of several": (
        lambda: ResponseFormat.json_schema({"oneOf": [{"type": "integer"}, {"minimum": 2}]}),
        "oneOf with alternatives that may be true of one value",
    ),
    "false": (lambda: ResponseFormat.json_schema(False), "schema is false"),
    "type": (lambda: ResponseFormat.json_schema({"type": "strin"}), "strin"),
    "not JSON": (lambda: ResponseFormat.json_schema("{"), "not JSON"),
    "no schema": (lambda: ResponseFormat.json_schema("[1]"), "must be an object"),
    "unsatisfiable": (lambda: ResponseFormat.json_schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
    "remote": (lambda: ResponseFormat.json_schema({"$ref": "http://localhost/a"}), "localhost"),
    "regex": (lambda: ResponseFormat.regex("(a"), "unclosed group"),
    "look-around": (lambda: ResponseFormat.regex("(?=a)b"), "look-around"),
    "grammar": (lambda: ResponseFormat.grammar("start: foo"), "foo"),
    "gbnf": (lambda: ResponseFormat.grammar("root ::= ("), "grammar"),
    "empty grammar": (lambda: ResponseFormat.grammar(" "), "empty"),
    "choices": (lambda: ResponseFormat.choice([]), "choices"),
    "deep": (lambda: ResponseFormat.json_schema('{"items":' * 5000 + "{}" + "}" * 5000), "JSON schema"),
    "too large": (lambda: ResponseFormat.regex("a" * (5 << 20)), "bytes"),
    "surrogates": (lambda: ResponseFormat.regex("\ud800"), "Unicode"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_format_is_one_clear_error(eager_engine: Engine, name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        eager_engine.generate("the", ANY, response_format=make())
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_a_format_and_ignored_ends_contradict_each_other() -> None:
    with pytest.raises(InputError, match="ignore_eos"):
        GenerateOptions(response_format=ResponseFormat.json_object(), ignore_eos=True)
