"""Searches and votes from outside: the command line, the server and rpc."""

from __future__ import annotations

import sys
from ast import literal_eval
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.edge.server.server_settings import ServerSettings
from support.commands import Capture, fails, json_of, output_of
from support.serving import served_here

PROMPT = "the sea and the sand"


@pytest.fixture(scope="module")
def base(tiny_bundle: Path) -> Iterator[str]:
    with served_here(tiny_bundle, ServerSettings(), threads=1) as server:
        yield server.base


def completed(base: str, **fields: object) -> list[str]:
    """The texts of a completion."""
    answer = httpx.post(f"{base}/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def refused(base: str, **fields: object) -> str:
    """The message of a completion that the server refuses."""
    answer = httpx.post(f"{base}/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, **fields}, timeout=60)
    assert answer.status_code == 400
    return answer.json()["error"]["message"]


def test_beams(capsys: Capture, tiny_bundle: Path, base: str) -> None:
    with edgerun.load(tiny_bundle, threads=1) as engine:
        options = {"raw": True, "max_tokens": 8}
        plain = engine.generate(PROMPT, **options, num_beams=4, n=2)
        diverse = engine.generate(PROMPT, **options, num_beams=4, beam_groups=2, diversity_penalty=2.0, n=2)
    arguments = (tiny_bundle, "-p", PROMPT, "--raw", "-n", 8, "--beams", 4, "--n", 2)
    found = json_of(capsys, *arguments, "--json")
    assert [each["text"] for each in found["choices"]] == [each.text for each in plain.choices]
    found = json_of(capsys, *arguments, "--beam-groups", 2, "--diversity-penalty", 2, "--json")
    assert [each["text"] for each in found["choices"]] == [each.text for each in diverse.choices]
    assert completed(base, num_beams=4, n=2) == [each.text for each in plain.choices]
    fields = {"num_beams": 4, "beam_groups": 2, "diversity_penalty": 2, "n": 2}
    assert completed(base, **fields) == [each.text for each in diverse.choices]
    assert "num_beams is 2" in refused(base, num_beams=2, n=3)
    assert "num_beams is 2" in fails(capsys, tiny_bundle, "-p", PROMPT, "--beams", 2, "--n", 3)
    assert output_of(capsys, *arguments[:-2]).strip() == plain.text.strip()


def test_votes(capsys: Capture, tiny_bundle: Path, base: str) -> None:
    options = {"temperature": 1.5, "seed": 11, "best_of": 12}
    with edgerun.load(tiny_bundle, threads=1) as engine:
        elected = engine.generate(PROMPT, raw=True, max_tokens=8, vote=True, **options).text
        by_letter = engine.generate(PROMPT, raw=True, max_tokens=8, vote_by="^.", **options).text
    arguments = (tiny_bundle, "-p", PROMPT, "--raw", "-n", 8, "-t", 1.5, "--seed", 11, "--best-of", 12, "--json")
    found = json_of(capsys, *arguments, "--vote")
    assert found["text"] == elected
    weights = [each["vote_logprob"] for each in found["best_of"]["candidates"]]
    assert weights[[each["choice"] for each in found["best_of"]["candidates"]].index(0)] == max(weights)
    assert json_of(capsys, *arguments, "--vote-by", "^.")["text"] == by_letter
    assert completed(base, vote=True, **options) == [elected]
    # A regular expression can take any time, so only those who run the program may give one.
    assert "vote_by" in refused(base, vote_by="^.", **options)


def test_sampling_until_a_command_accepts(capsys: Capture, tiny_bundle: Path, tmp_path: Path, base: str) -> None:
    seen = tmp_path / "seen"
    script = tmp_path / "check.py"
    script.write_text(
        "import sys\n"
        f"seen = open({str(seen)!r}, 'a+', encoding='utf-8')\n"
        "seen.seek(0)\n"
        "count = len(seen.readlines())\n"
        "seen.write(repr(sys.stdin.buffer.read().decode()) + '\\n')\n"
        "sys.exit(count != 2)\n",
        encoding="utf-8",
    )
    command = f'"{sys.executable}" "{script}"'
    arguments = (tiny_bundle, "-p", PROMPT, "--raw", "-n", 8, "-t", 1.5, "--seed", 5, "--until", command)
    found = json_of(capsys, *arguments, "--json")
    with edgerun.load(tiny_bundle, threads=1) as engine:
        samples = [
            engine.generate(PROMPT, raw=True, max_tokens=8, temperature=1.5, seed=5 + number).text
            for number in range(3)
        ]
    assert [literal_eval(line) for line in seen.read_text(encoding="utf-8").splitlines()] == samples
    assert found["text"] == samples[2]
    assert main([str(each) for each in (*arguments, "--tries", 2)]) == 1
    out, err = capsys.readouterr()
    assert (out, "none of 2 answers passes" in err) == ("", True)
    assert "add -t" in fails(capsys, tiny_bundle, "-p", PROMPT, "-t", 0, "--until", command)
    assert "no --n" in fails(capsys, *arguments, "--n", 2)
    assert "until" in refused(base, until="true")


def test_sampling_until_a_command_accepts_goes_on_with_a_saved_conversation(
    capsys: Capture, tiny_bundle: Path, tmp_path: Path
) -> None:
    sampled = {"max_tokens": 8, "temperature": 1.5, "seed": 5}
    with edgerun.load(tiny_bundle, threads=1) as engine, engine.session(system="the sea") as saved:
        saved.send("on the other thing", max_tokens=4, temperature=0.0)
        saved.save(tmp_path / "chat.kv")
        expected = saved.send(PROMPT, **sampled).text
        assert engine.generate(PROMPT, **sampled).text != expected
    arguments = (tiny_bundle, "-p", PROMPT, "--resume", tmp_path / "chat.kv", "-n", 8, "-t", 1.5, "--seed", 5, "--json")
    accepts = f'"{sys.executable}" -c "pass"'
    assert json_of(capsys, *arguments)["text"] == expected
    assert json_of(capsys, *arguments, "--until", accepts)["text"] == expected
    assert len(json_of(capsys, *arguments, "--n", 2)["choices"]) == 2
    assert "raw" in fails(capsys, *arguments, "--raw")


def test_the_best_passages_of_a_document(capsys: Capture, tiny_bundle: Path, tmp_path: Path, base: str) -> None:
    document = "on the other thing, the sea and the sand. that was then"
    (tmp_path / "notes.txt").write_text(document, encoding="utf-8")
    with edgerun.load(tiny_bundle, threads=1) as engine:
        read = engine.generate(f"{document}\n\n{PROMPT}", raw=True, extract=document, n=2)
        plain = engine.generate(PROMPT, raw=True, max_tokens=8, extract=document, n=2)
    arguments = (tiny_bundle, "-p", PROMPT, "--raw", "--extract", tmp_path / "notes.txt")
    found = json_of(capsys, *arguments, "--n", 2, "--json")
    assert [each["text"] for each in found["choices"]] == [each.text for each in read.choices]
    assert read.text in document
    assert completed(base, extract=document, n=2) == [each.text for each in plain.choices]
    assert "extract and temperature" in refused(base, extract=document, temperature=1)
    assert "cannot be read" in fails(capsys, tiny_bundle, "-p", PROMPT, "--extract", tmp_path / "none.txt")


def test_the_best_of_a_list_of_choices(capsys: Capture, tiny_bundle: Path, base: str) -> None:
    choices = ["the sea", "then", "on that"]
    with edgerun.load(tiny_bundle, threads=1) as engine:
        listed = edgerun.ResponseFormat.choice(choices)
        expected = [
            each.text
            for each in engine.generate(PROMPT, raw=True, response_format=listed, best_first=True, n=3).choices
        ]
    assert sorted(expected) == sorted(choices)
    given = [part for choice in choices for part in ("--choice", choice)]
    found = json_of(capsys, tiny_bundle, "-p", PROMPT, "--raw", *given, "--best-first", "--n", 3, "--json")
    assert [each["text"] for each in found["choices"]] == expected
    assert completed(base, guided_choice=choices, best_first=True, n=3) == expected
    assert "searches a list of choices" in refused(base, best_first=True)


@pytest.mark.parametrize(
    "fields", [{"cntp": True, "temperature": 1.2, "seed": 3}, {"adadec": True, "temperature": 0.0}]
)
def test_trials(capsys: Capture, tiny_bundle: Path, base: str, fields: dict[str, object]) -> None:
    fields = fields | {"trials": 3, "entropy": 0.5}
    with edgerun.load(tiny_bundle, threads=1) as engine:
        expected = engine.generate(PROMPT, raw=True, max_tokens=8, **fields).text
    flags = [
        each for name, value in fields.items() for each in ([f"--{name}"] if value is True else [f"--{name}", value])
    ]
    assert json_of(capsys, tiny_bundle, "-p", PROMPT, "--raw", "-n", 8, *flags, "--json")["text"] == expected
    assert completed(base, **fields) == [expected]
    assert "trials" in refused(base, **fields | {"trials": 1})
