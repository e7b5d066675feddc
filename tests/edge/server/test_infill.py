"""Gaps that are filled over HTTP: `suffix` of completions, `/infill` as llama.cpp's editors ask, Ollama's `suffix`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

import edgerun
import edgerun.server
from support.infill_models import SUGGESTION, write_infill_bundle, write_suggesting_bundle
from support.serving import PATIENCE_S, Served, asked, served

BEFORE, AFTER = "the sea is in the ", " and the sand"
EDITOR: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "the sea\n",
    "input_suffix": AFTER,
    "input_extra": [
        {
            "filename": "a.py",
            "text": "then\n",
        }
    ],
    "prompt": "is in ",
    "n_predict": 8,
    "top_k": 40,
    "top_p": 0.99,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
    "n_indent": 4,
    "stream": False,
}
"""What extensions of editors send."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_infill_bundle(tmp_path_factory.mktemp("infill"))


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[edgerun.Engine]:
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def app(bundle: Path) -> Starlette:
    return edgerun.server.app(bundle, cache=False)


@pytest.fixture(scope="module")
def suggesting_app(tmp_path_factory: pytest.TempPathFactory) -> Starlette:
    return edgerun.server.app(write_suggesting_bundle(tmp_path_factory.mktemp("suggesting")), cache=False)


def post(app: Starlette, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = asked(app, "POST", path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def events(response: httpx.Response) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]


def test_suffix_of_a_completion(app: Starlette, engine: edgerun.Engine) -> None:
    body = {"prompt": BEFORE, "suffix": AFTER, "n": 3, "max_tokens": 10, "temperature": 0}
    found = post(app, "/v1/completions", {**body, "extra": [{"filename": "a.py", "text": "then"}], "document": "b.py"})
    extra = [{"filename": "a.py", "text": "then"}]
    reply = engine.complete(BEFORE, AFTER, 3, max_tokens=10, extra=extra, document="b.py")
    assert [choice["text"] for choice in found["choices"]] == [choice.text for choice in reply.choices]
    assert found["usage"]["prompt_tokens"] == reply.stats.prompt_tokens
    empty = post(app, "/v1/completions", {"prompt": "", "suffix": AFTER, "max_tokens": 4})
    assert empty["usage"]["prompt_tokens"] > 4
    refused = post(app, "/v1/completions", {"prompt": [1, 2], "suffix": AFTER}, 400)["error"]
    assert (refused["param"], refused["message"].partition(";")[0]) == ("suffix", "suffix is given with token ids")
    missing = post(app, "/v1/completions", {"prompt": BEFORE, "suffix": AFTER, "extra": [{"filename": "a"}]}, 400)
    assert missing["error"]["param"] == "extra[0].text"


def test_models_without_tokens_are_refused(tiny_app: Starlette) -> None:
    completion = post(tiny_app, "/v1/completions", {"prompt": BEFORE, "suffix": AFTER}, 400)["error"]
    infill = post(tiny_app, "/infill", {"input_prefix": BEFORE, "input_suffix": AFTER}, 400)["error"]
    assert completion["message"] == infill["message"]
    assert "no tokens for filling in the middle" in infill["message"]
    assert infill == {"code": 400, "type": "invalid_request_error", "message": infill["message"]}
    assert post(tiny_app, "/infill", {"input_prefix": BEFORE}, 400)["error"]["message"].startswith("input_suffix is")


def test_infill_answers_editors(app: Starlette, engine: edgerun.Engine) -> None:
    reply = engine.complete(
        EDITOR["input_prefix"], AFTER, max_tokens=8, answer_start=EDITOR["prompt"], extra=EDITOR["input_extra"]
    )
    found = post(app, "/infill", EDITOR)
    assert (found["content"], found["stop"]) == (reply.text, True)
    assert found["tokens_predicted"] == found["timings"]["predicted_n"] == reply.stats.completion_tokens
    assert found["tokens_evaluated"] == reply.stats.prompt_tokens
    assert found["timings"]["cache_n"] + found["timings"]["prompt_n"] == reply.stats.prompt_tokens
    assert found["timings"]["prompt_ms"] > 0
    assert found["stop_type"] == ("limit" if reply.finish_reason == "length" else "eos")
    stopped = post(app, "/infill", {**EDITOR, "stop": [reply.text[3:5]]})
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", reply.text[3:5])
    fields = ["content", "timings/predicted_n", "truncated", "other"]
    some = post(app, "/infill", {**EDITOR, "response_fields": fields})
    assert some == {"content": reply.text, "timings/predicted_n": 8, "truncated": False}
    sampled = {post(app, "/infill", {**EDITOR, "temperature": 2.0, "seed": seed})["content"] for seed in range(5)}
    assert len(sampled) > 1


def test_infill_as_a_stream(app: Starlette) -> None:
    whole = post(app, "/infill", EDITOR)
    response = asked(app, "POST", "/infill", json={**EDITOR, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events(response)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert {piece["stop"] for piece in pieces} == {False}
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", whole["tokens_predicted"])


def test_texts_are_read_for_later_requests(app: Starlette) -> None:
    extra = [{"filename": "far.py", "text": "the other thing is on the sand " * 3}]
    ahead = {"input_prefix": "", "input_suffix": "", "input_extra": extra, "prompt": "", "n_predict": 0, "samplers": []}
    found = post(app, "/infill", {**ahead, "t_max_predict_ms": 1})
    assert (found["content"], found["tokens_predicted"]) == ("", 0)
    later = post(app, "/infill", {**EDITOR, "input_extra": extra})
    assert later["timings"]["cache_n"] >= found["tokens_evaluated"] - 10


def test_the_example_of_the_guide_and_ollamas_suffix(suggesting_app: Starlette) -> None:
    guide = (Path(__file__).resolve().parents[3] / "docs" / "guide" / "editors.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"/infill .* -d '(.*?)'", guide, re.DOTALL)
    found = post(suggesting_app, "/infill", json.loads(body))
    assert found["stop"]
    asking = {"model": "bundle", "prompt": "def add(a, b):\n    ", "suffix": "\n", "stream": False}
    assert post(suggesting_app, "/api/generate", asking)["response"] == "".join(SUGGESTION)


@pytest.mark.parametrize(
    ("path", "fields", "limit", "document", "code"),
    [
        (
            "/v1/completions",
            {"prompt": BEFORE, "suffix": AFTER, "document": "a.py"},
            "max_tokens",
            "a.py",
            "superseded",
        ),
        ("/infill", {"input_prefix": BEFORE, "input_suffix": AFTER, "id_slot": 0}, "n_predict", "id_slot 0", 409),
    ],
    ids=["document", "id_slot"],
)
def test_a_newer_request_of_a_document_ends_the_older(
    endless_infill: Served, path: str, fields: dict[str, Any], limit: str, document: str, code: str | int
) -> None:
    body = {**fields, "ignore_eos": True, limit: -1}
    with (
        httpx.Client(base_url=endless_infill.base, timeout=PATIENCE_S, trust_env=False) as client,
        client.stream("POST", path, json={**body, "stream": True}) as older,
    ):
        lines = older.iter_lines()
        next(lines)
        newer = client.post(path, json={**body, limit: 2}).json()
        assert newer.get("tokens_predicted", newer.get("usage", {}).get("completion_tokens")) == 2
        last = [line for line in lines if line][-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error.get("param", "document")) == (code, "document")
    assert f"a newer request for the document '{document}' has come" in error["message"]


@pytest.fixture(scope="module")
def endless_infill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    bundle = write_infill_bundle(tmp_path_factory.mktemp("long"), max_position_embeddings=30_000)
    with served([bundle], "--parallel", "2", "--draft", "none") as server:
        yield server
