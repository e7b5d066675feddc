"""Tokenizers that make the library panic, or that give token ids the model does not have."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun import BundleError
from edgerun.edge.cli.main import main
from edgerun.runtime.text.tokenizer_library import failures_as, panic_messages_hidden
from support.tiny_models import write_checkpoint

Settings = dict[str, Any]


def change_tokenizer(folder: Path, changes: Settings) -> None:
    file = folder / "tokenizer.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**settings, **changes}), encoding="utf-8")


PANIC_WHEN_READ: Settings = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
PANIC_AT_TEXT: Settings = {
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
}
ID_BEYOND: Settings = {
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"[X]": {"id": "[X]", "ids": [1_000_000], "tokens": ["[X]"]}},
    }
}


@pytest.mark.parametrize(
    ("changes", "prompt", "message"),
    [
        (PANIC_WHEN_READ, "a", "tokenizer.json cannot be read: Precompiled"),
        (PANIC_AT_TEXT, "a" * 40 + "!", "tokenizer.json fails: Onig"),
        (ID_BEYOND, "a", "tokenizer.json has token ids up to 1000000, but the model's vocabulary has 300"),
    ],
    ids=["when read", "at a text", "id"],
)
def test_a_damaged_tokenizer_is_one_line(
    editable_bundle: Path, capfd: pytest.CaptureFixture[str], changes: Settings, prompt: str, message: str
) -> None:
    change_tokenizer(editable_bundle, changes)
    assert main([str(editable_bundle), "-p", prompt, "--raw"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_library_call_raises_an_error_and_not_a_panic(editable_bundle: Path) -> None:
    change_tokenizer(editable_bundle, PANIC_AT_TEXT)
    with edgerun.load(editable_bundle) as engine:
        with pytest.raises(BundleError, match="use the tokenizer that belongs to this model"):
            engine.generate("a" * 40 + "!", raw=True)
        assert engine.generate("the", raw=True, max_tokens=3).text


def test_an_export_refuses_a_tokenizer_that_panics(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    change_tokenizer(checkpoint, PANIC_WHEN_READ)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    err = capfd.readouterr().err
    assert "tokenizer.json cannot be read" in err
    assert "Cannot parse precompiled_charsmap" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_and_exits_pass(interrupt: type[BaseException]) -> None:
    with pytest.raises(interrupt), panic_messages_hidden(), failures_as(BundleError):
        raise interrupt


def test_what_others_write_during_a_call_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    with panic_messages_hidden(), failures_as(BundleError):
        os.write(2, b"a message\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "a message\n"
