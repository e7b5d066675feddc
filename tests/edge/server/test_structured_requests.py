"""Requests with a format: under every name that they have, whole and as events; what is wrong is one error."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")

from starlette.applications import Starlette

from edgerun import ResponseFormat
from edgerun.runtime.structure import grammar
from support.commands import Patch
from support.hostile_formats import HOSTILE
from support.nightly import some_nightly
from support.serving import CHAT, asked, chat_body

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}
GBNF = 'root ::= "x" [0-9]'
FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}}, ""),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, ""),
    ({"structured_outputs": {"json": SCHEMA}}, ""),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, ""),
    ({"guided_json": SCHEMA}, ""),
    ({"json_schema": SCHEMA}, ""),
    ({"structured_outputs": {"regex": "[a-c]{3}"}}, "[a-c]{3}"),
    ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"grammar": GBNF}}, "x[0-9]"),
    ({"guided_grammar": GBNF}, "x[0-9]"),
    ({"grammar": GBNF}, "x[0-9]"),
    ({"response_format": {"type": "text"}, "guided_regex": "[a-c]"}, "[a-c]"),
]
BODY = {"max_tokens": 120, "temperature": 1, "seed": 3}


def fits(text: str, pattern: str) -> bool:
    if not pattern:
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize(("fields", "pattern"), FORMATS)
def test_a_chat_completion_follows_its_format(tiny_app: Starlette, fields: dict[str, Any], pattern: str) -> None:
    (choice,) = asked(tiny_app, "POST", CHAT, json=chat_body(**BODY, **fields)).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert fits(choice["message"]["content"], pattern)
    events = asked(tiny_app, "POST", CHAT, json=chat_body(**BODY, **fields, stream=True)).text
    deltas = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    text = "".join(delta["choices"][0]["delta"].get("content") or "" for delta in deltas)
    assert text == choice["message"]["content"]


def test_other_endpoints_have_formats_too(tiny_app: Starlette) -> None:
    body = {"prompt": "the", **BODY, "guided_regex": "[a-c]{3}"}
    (choice,) = asked(tiny_app, "POST", "/v1/completions", json=body).json()["choices"]
    assert fits(choice["text"], "[a-c]{3}")
    text = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    body = {"input": "the", "max_output_tokens": 120, "temperature": 1, "seed": 3, "text": text}
    reply = asked(tiny_app, "POST", "/v1/responses", json=body).json()
    assert fits(reply["output"][0]["content"][0]["text"], "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "schema is missing"),
        ({"response_format": {"type": "xml"}}, "json_schema"),
        ({"guided_regex": "(a"}, "unclosed group"),
        ({"guided_json": {"not": {}}}, "not supported: not"),
        ({"guided_json": "{"}, "not JSON"),
        ({"guided_choice": []}, "choices"),
        ({"guided_regex": "a", "grammar": "start: foo"}, "both given"),
        ({"structured_outputs": {}}, "nothing is given"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "regex and choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structural_tag"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_wrong_format_is_one_error(tiny_app: Starlette, fields: dict[str, Any], message: str) -> None:
    refused = asked(tiny_app, "POST", CHAT, json=chat_body(**BODY, **fields))
    assert refused.status_code == 400, refused.text
    assert message in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", some_nightly(HOSTILE, every=3))
def test_hostile_formats_do_not_end_the_server(tiny_app: Starlette, name: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(grammar, "_COMPILE_S", 100.0)  # some take a second, and other programs may be running
    field, value, _ = HOSTILE[name]
    reply = asked(tiny_app, "POST", CHAT, json=chat_body(**{**BODY, "max_tokens": 40, field: value}))
    # Some are refused as bodies already, and some only where the answer comes to what is too complex.
    assert reply.status_code in (200, 400, 413), reply.text
    if reply.status_code != 200:
        message = reply.json()["error"]["message"]
        assert 0 < len(message) < 500
        assert "\n" not in message
    assert asked(tiny_app, "POST", CHAT, json=chat_body(max_tokens=2)).status_code == 200


def test_a_format_that_waits_for_others_in_vain_may_be_sent_again(tiny_app: Starlette, monkeypatch: Patch) -> None:
    """And one client does not take all places: there is one for the formats of another."""
    go_on, grammar_text = threading.Event(), grammar.grammar_text

    def stuck(response_format: ResponseFormat) -> str:
        if response_format.text.startswith("stuck"):
            assert go_on.wait(120)
        return grammar_text(response_format)

    monkeypatch.setattr(grammar, "_COMPILE_S", 0.05)
    monkeypatch.setattr(grammar, "_PLACE_S", 0.05)
    monkeypatch.setattr(grammar, "grammar_text", stuck)
    replies = [asked(tiny_app, "POST", CHAT, json=chat_body(**BODY, guided_regex=f"stuck{n}")) for n in range(3)]
    monkeypatch.setattr(grammar, "_COMPILE_S", 100.0)
    other = asked(tiny_app, "POST", CHAT, address="192.0.2.7", json=chat_body(**BODY, guided_regex="another"))
    go_on.set()
    assert other.json()["choices"][0]["message"]["content"] == "another"
    assert [reply.status_code for reply in replies] == [400, 400, 429]
    assert replies[2].json()["error"]["code"] == "busy"
    assert int(replies[2].headers["retry-after"]) > 0
