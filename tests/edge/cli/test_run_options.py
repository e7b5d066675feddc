"""`--prefix FILE`, `--overflow`, `--n` and `--best-of`: documents, what is too long, and several answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.runtime.kv.prefix_files import prefix_folder
from support.commands import Capture, fails, json_of

DOCUMENT = "the other and the one who is at the end of it, and on to " * 4


pytestmark = pytest.mark.usefixtures("cache")


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
    found = json_of(capsys, "doctor", "--json")["kept"]["prefixes"]
    sizes = [file.stat().st_size for file in prefix_folder().glob("*/*")]
    assert found == {"folder": str(prefix_folder()), "number": 1, "bytes": sizes[0]}


def test_a_raw_prompt_continues_the_document(tiny_bundle: Path, document: Path, capsys: Capture) -> None:
    expected = reply(capsys, tiny_bundle, "--raw", "-p", f"{DOCUMENT}in the")
    first, second = (
        reply(capsys, tiny_bundle, "--raw", "--prefix", document, "-p", question) for question in ("in the", "there")
    )
    assert first["text"] == expected["text"]
    assert second["usage"]["reused_tokens"] >= 64


def test_parked_prefixes_are_reused(tiny_bundle: Path, document: Path, capsys: Capture) -> None:
    asked = [tiny_bundle, "-p", "in the", "--prefix", document, "--lossy-parking"]
    assert [reply(capsys, *asked)["usage"]["reused_tokens"] >= 64 for _ in range(2)] == [False, True]
    assert main([*map(str, asked), "--kv", "int4"]) == 2
    assert "lossy_parking and kv int4 are both given; a quantized cache is kept as it is" in capsys.readouterr().err


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


PROMPT = "the other thing"
SAMPLING = ("-n", "8", "-t", "1", "--seed", "7")


@pytest.fixture(scope="module")
def alone(tiny_bundle: Path) -> Iterator[list[edgerun.Reply]]:
    """The answers of single requests with the seeds 7 to 12."""
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "logprobs": 0}
    with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
        yield [engine.generate(PROMPT, seed=7 + index, **options) for index in range(6)]


def printed(capsys: Capture, *arguments: object) -> tuple[str, str]:
    assert main([*map(str, arguments), "-p", PROMPT, *SAMPLING]) == 0
    out, err = capsys.readouterr()
    return out, err


def test_several_answers_have_headings(tiny_bundle: Path, alone: list[edgerun.Reply], capsys: Capture) -> None:
    out, err = printed(capsys, tiny_bundle, "--n", 3, "--stats")
    texts = [reply.text if reply.text.endswith("\n") else f"{reply.text}\n" for reply in alone[:3]]
    assert out == "\n".join(f"Answer {number} of 3:\n{text}" for number, text in enumerate(texts, 1))
    assert [line.split(":")[0] for line in err.splitlines()] == ["answer 1", "answer 2", "answer 3"]


def test_the_best_answers_are_printed_first(tiny_bundle: Path, alone: list[edgerun.Reply], capsys: Capture) -> None:
    best = max(alone, key=lambda reply: reply.stats.mean_logprob or -99)
    out, err = printed(capsys, tiny_bundle, "--best-of", 6, "--early-stop", 1, "--stats")
    assert out.removesuffix("\n") == best.text.removesuffix("\n")
    assert f"mean log-probability {best.stats.mean_logprob:.3f}" in err
    assert re.search(r"^best of 6 answers, \d stopped early.*, \d+ tokens of answers that are not shown$", err, re.M)


def test_several_answers_as_json(tiny_bundle: Path, alone: list[edgerun.Reply], capsys: Capture) -> None:
    out, _ = printed(capsys, tiny_bundle, "--answers", 2, "--best-of", 6, "--json-stream", "--logprobs", 0)
    *pieces, found = map(json.loads, out.splitlines())
    best = sorted(alone, key=lambda reply: -(reply.stats.mean_logprob or 0))[:2]
    assert [choice["text"] for choice in found["choices"]] == [reply.text for reply in best]
    for index, choice in enumerate(found["choices"]):
        assert "".join(piece["delta"] for piece in pieces if piece["index"] == index) == choice["text"]
        found_bytes = bytes(byte for token in choice["logprobs"] for byte in token["bytes"])
        assert found_bytes.decode("utf-8", "replace") == choice["text"]
    first = found["choices"][0]
    assert {name: found[name] for name in first} == first
    candidates = found["best_of"]["candidates"]
    assert [each["seed"] for each in candidates] == list(range(7, 13))
    assert [each["mean_logprob"] for each in candidates if each["choice"] == 0] == [first["mean_logprob"]]
    assert found["best_of"]["stopped"] == sum(each["finish_reason"] is None for each in candidates)
