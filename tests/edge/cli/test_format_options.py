"""`--json-schema`, `--regex`, `--grammar`, `--choice` and `--grammar-aligned`: answers that follow a format."""

from __future__ import annotations

import builtins
import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")

from support.commands import Capture, Patch, fails, json_of

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}


def answer(bundle: Path, capsys: Capture, *options: str) -> dict[str, Any]:
    asked = (bundle, "--raw", "-p", "the", "-n", "150", "--json", "--threads", "1")
    return json_of(capsys, *asked, *options)


def test_an_answer_follows_each_option(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    grammar.write_text('start: "x=" /[0-9]{2}/', encoding="utf-8")
    sampled = ("-t", "1", "--seed", "3")
    reply = answer(tiny_bundle, capsys, "--json-schema", str(schema), *sampled)
    jsonschema.validate(json.loads(reply["text"]), SCHEMA)
    assert reply["finish_reason"] == "stop"
    assert re.fullmatch("x=[0-9]{2}", answer(tiny_bundle, capsys, "--grammar", str(grammar))["text"])
    assert re.fullmatch("[a-c]{4}", answer(tiny_bundle, capsys, "--regex", "[a-c]{4}")["text"])
    assert answer(tiny_bundle, capsys, "--choice", "yes", "--choice", "no")["text"] in ("yes", "no")
    aligned = answer(tiny_bundle, capsys, "--regex", "[a-c]{4}", "--grammar-aligned", "3", *sampled)
    assert re.fullmatch("[a-c]{4}", aligned["text"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--regex", "a", "--choice", "b"), "--regex and --choice are both given"),
        (("--json-schema", "missing.json"), "missing.json"),
        (("--grammar-aligned", "3"), "without response_format"),
    ],
)
def test_a_wrong_format_is_one_line(tiny_bundle: Path, capsys: Capture, options: tuple[str, ...], message: str) -> None:
    assert message in fails(capsys, tiny_bundle, "--raw", "-p", "the", *options)


def test_without_the_extra_the_error_says_what_to_install(
    tiny_bundle: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    for name in ("grammar", "matcher"):
        monkeypatch.delitem(sys.modules, f"edgerun.runtime.structure.{name}", raising=False)
    imported = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "llguidance":
            raise ModuleNotFoundError(name, name=name)
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert 'pip install "edge-run[structured]"' in fails(capsys, tiny_bundle, "--raw", "-p", "the", "--regex", "a")
