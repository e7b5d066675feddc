"""Searches and votes from outside: the command line, the server and rpc."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import edgerun
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
