"""`--prefix FILE`, a document that the next start does not read again, and `--overflow`, what is too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgerun.edge.cli.main import main
from edgerun.runtime.kv.prefix_files import prefix_folder
from support.commands import Capture, Patch, fails, json_of

DOCUMENT = "the other and the one who is at the end of it, and on to " * 4


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def document(tmp_path: Path) -> Path:
    file = tmp_path / "document.txt"
    file.write_text(DOCUMENT, encoding="utf-8")
    return file


def reply(capsys: Capture, *arguments: object) -> dict[str, Any]:
    return json_of(capsys, *arguments, "-n", "8", "--json")


def test_the_second_start_does_not_read_the_document(tiny_bundle: Path, document: Path, capsys: Capture) -> None:
    asked = [tiny_bundle, "-p", "in the"]
    expected = reply(capsys, *asked, "--system", f"Be brief.\n\n{DOCUMENT}")
    assert not prefix_folder().exists()
    with_document = [*asked, "--system", "Be brief.", "--prefix", document]
    first, second = reply(capsys, *with_document), reply(capsys, *with_document)
    other = reply(capsys, tiny_bundle, "-p", "there", "--system", "Be brief.", "--prefix", document)
    assert [each["text"] for each in (first, second)] == [expected["text"]] * 2
    assert [each["usage"]["reused_tokens"] for each in (first, second)] == [0, second["usage"]["reused_tokens"]]
    assert second["usage"]["reused_tokens"] > expected["usage"]["prompt_tokens"] - 8
    assert other["usage"]["reused_tokens"] == second["usage"]["reused_tokens"]
    found = json_of(capsys, "inspect", tiny_bundle, "--json")["prefixes_of_all_models"]
    sizes = [file.stat().st_size for file in prefix_folder().glob("*/*")]
    assert found == {"folder": str(prefix_folder()), "number": 1, "bytes": sizes[0]}


def test_a_raw_prompt_continues_the_document(tiny_bundle: Path, document: Path, capsys: Capture) -> None:
    expected = reply(capsys, tiny_bundle, "--raw", "-p", f"{DOCUMENT}in the")
    first, second = (
        reply(capsys, tiny_bundle, "--raw", "--prefix", document, "-p", question) for question in ("in the", "there")
    )
    assert first["text"] == expected["text"]
    assert second["usage"]["reused_tokens"] >= 64


def test_without_room_or_cache_nothing_is_kept(tiny_bundle: Path, document: Path, capsys: Capture) -> None:
    for option in (["--prefix-disk", "0"], ["--no-cache"]):
        assert reply(capsys, tiny_bundle, "-p", "in the", "--prefix", document, *option)["usage"]["reused_tokens"] == 0
        assert not prefix_folder().exists()
    assert main([str(tiny_bundle), "-p", "in", "--prefix", str(document), "--prefix-disk", "1KB", "-n", "2"]) == 0
    assert "a prefix is not kept on disk: it takes" in capsys.readouterr().err
    assert not list(prefix_folder().glob("*/*"))


def test_a_document_that_cannot_be_read_or_used(
    tiny_bundle: Path, document: Path, tmp_path: Path, capsys: Capture
) -> None:
    missing = fails(capsys, tiny_bundle, "-p", "in", "--prefix", tmp_path / "missing")
    assert "missing cannot be read: No such file" in missing
    error = fails(capsys, tiny_bundle, "-p", "in", "--prefix", document, "--resume", "saved")
    assert "a resumed conversation has its beginning already; leave out --prefix" in error


def test_an_answer_that_outgrows_the_context(tiny_bundle: Path, capsys: Capture) -> None:
    asked = [str(tiny_bundle), "-p", "in the", "--context", "64", "--ignore-eos", "-n", "150", "--json"]
    short, long = (json_of(capsys, *asked, "--overflow", overflow) for overflow in ("error", "window"))
    assert short["usage"]["completion_tokens"] < 64 < long["usage"]["completion_tokens"] == 150
    assert long["text"].startswith(short["text"].rstrip("\ufffd"))
    error = fails(capsys, tiny_bundle, "--raw", "-p", "in the " * 60, "--context", "64", "--overflow", "error")
    assert "tokens and the model's context is 64; shorten it" in error
    assert main([str(tiny_bundle), "--raw", "-p", "in the " * 60, "--context", "64", "--overflow", "window"]) == 0
