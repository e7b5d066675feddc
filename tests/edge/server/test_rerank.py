"""Reranking, scores and vectors over HTTP, of language models and encoders; loading and unloading models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette

import edgerun
import edgerun.server
from support.encoders import write_encoder
from support.rerankers import write_reranker
from support.serving import asked, chat_body, served
from support.waiting import wait_until

QUERY = "what is in the sea"
DOCUMENTS = ["the sand and the sea", "on the other thing " * 12, "that was the sea"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rankers")
    write_reranker(folder)
    write_encoder(folder / "vectors", pooling="pooling_mode_cls_token")
    write_encoder(folder / "pairs", "logits")
    return folder


@pytest.fixture(scope="module")
def app(folder: Path, tiny_bundle: Path) -> Starlette:
    """The four kinds of models: that answers yes or no, with vectors, with scores of pairs, and that does neither."""
    shutil.copytree(tiny_bundle, folder / "plain")
    names = [folder / name for name in ("bundle", "vectors", "pairs", "plain")]
    return edgerun.server.app(names, cache=False, threads=1)


def post(app: Starlette, path: str, **body: Any) -> Any:
    response = asked(app, "POST", path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_documents_come_in_order_and_the_query_is_read_once(app: Starlette, folder: Path) -> None:
    with edgerun.load(folder / "bundle", threads=1, cache=False) as engine:
        expected = engine.score(QUERY, DOCUMENTS)
        asked_for = engine.score(QUERY, DOCUMENTS, instruction="Find the sea").scores
    found = post(app, "/v1/rerank", query=QUERY, documents=[*DOCUMENTS[:2], {"text": DOCUMENTS[2]}])
    order = np.argsort(-expected.scores)
    assert [each["index"] for each in found["results"]] == order.tolist()
    np.testing.assert_allclose(
        [each["relevance_score"] for each in found["results"]], expected.scores[order], atol=1e-5
    )
    assert [each["document"]["text"] for each in found["results"]] == [DOCUMENTS[index] for index in order]
    assert found["model"] == "bundle"
    assert found["usage"]["prompt_tokens"] == expected.prompt_tokens
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > expected.prompt_tokens / 2
    first = post(app, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=False)
    assert [sorted(each) for each in first["results"]] == [["index", "relevance_score"]]
    other = post(app, "/v1/rerank", query=QUERY, documents=DOCUMENTS, instruction="Find the sea")
    np.testing.assert_allclose(other["results"][0]["relevance_score"], asked_for.max(), atol=1e-5)


@pytest.mark.parametrize("model", ["bundle", "pairs"])
def test_scores_of_one_query_and_of_pairs(app: Starlette, model: str) -> None:
    texts = ["a sea", "the sand", "sea"]
    of_one = post(app, "/v1/score", model=model, text_1="the sea", text_2=texts)
    assert [each["index"] for each in of_one["data"]] == [0, 1, 2]
    of_pairs = post(app, "/v1/score", model=model, text_1=["the sea", "the sea", "sand"], text_2=texts)
    scores, others = ([each["score"] for each in found["data"]] for found in (of_one, of_pairs))
    np.testing.assert_allclose(scores[:2], others[:2], atol=1e-5)
    assert abs(scores[2] - others[2]) > 1e-4
    ranked = post(app, "/v1/rerank", model=model, query="the sea", documents=texts)["results"]
    np.testing.assert_allclose([each["relevance_score"] for each in ranked], sorted(scores, reverse=True), atol=1e-5)
    alone = post(app, "/v1/score", model=model, text_1="the sea", text_2="a sea")["data"]
    assert alone[0]["score"] == pytest.approx(scores[0], abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
def test_vectors_of_an_encoder(app: Starlette, folder: Path, path: str) -> None:
    texts = ["query: a", "passage: b"]
    with edgerun.load_encoder(folder / "vectors", threads=1) as encoder:
        expected = encoder.embed(texts)
        ids = [encoder.tokenizer.encode(each, add_special_tokens=True) for each in texts]
    for given in (texts, ids):
        found = post(app, path, model="vectors", input=given)
        vectors = found.get("embeddings") or [each["embedding"] for each in found["data"]]
        np.testing.assert_allclose(vectors, expected, atol=1e-6)
    refused = asked(app, "POST", path, json={"model": "vectors", "input": [999]})
    assert refused.status_code == 400
    assert "input[0] is 999" in refused.text


REFUSED: dict[str, tuple[str, dict[str, Any], str, str | None, str]] = {
    "no documents": ("rerank", {"documents": []}, "documents is empty", "documents", "invalid_value"),
    "an empty document": ("rerank", {"documents": ["a", ""]}, "documents[1] is empty", "documents[1]", "invalid_value"),
    "an empty query": ("rerank", {"query": ""}, "query is empty", "query", "invalid_value"),
    "3,000 documents": ("rerank", {"documents": ["a"] * 3000}, "documents has 3000 items", "documents", ""),
    "a number": ("rerank", {"documents": [1]}, "documents[0]", "documents[0]", "invalid_type"),
    "a text for a list": ("rerank", {"documents": "a"}, "documents", "documents", "invalid_type"),
    "no query": ("rerank", {"query": None}, "query", "query", "invalid_type"),
    "none wanted": ("rerank", {"top_n": 0}, "top_n", "top_n", "invalid_value"),
    "a long document": (
        "rerank",
        {"documents": ["a", "!" * 2000]},
        "prompt of document 1 has",
        None,
        "context_length_",
    ),
    "a long pair": (
        "score",
        {"model": "pairs", "text_2": "b" * 99},
        "pair of document 0 has 10",
        None,
        "context_length",
    ),
    "no words": ("rerank", {"model": "plain"}, "plain is not a reranker", None, "invalid_request"),
    "vectors": ("rerank", {"model": "vectors"}, "vectors makes vectors of texts, not scores", None, "invalid_request"),
    "an instruction": (
        "rerank",
        {"model": "pairs", "instruction": "a"},
        "takes no instruction",
        None,
        "invalid_request",
    ),
    "other numbers": (
        "score",
        {"text_1": ["a", "b"], "text_2": "c"},
        "text_1 has 2 texts and",
        "text_1",
        "invalid_value",
    ),
    "no pairs": ("score", {"text_2": []}, "text_2 is empty", "text_2", "invalid_value"),
    "no vectors": ("embeddings", {"model": "pairs"}, "pairs makes scores of pairs of texts", None, "invalid_request"),
    "no text": ("chat/completions", {"model": "vectors"}, "vectors is an encoder", "model", "invalid_value"),
    "no tokens": ("completions", {"model": "pairs"}, "pairs is an encoder", "model", "invalid_value"),
    "another model": ("models/load", {"model": "x"}, "there is no model", "model", "model_not_found"),
    "unloading another": ("models/unload", {"model": "x"}, "there is no model", "model", "model_not_found"),
}
FIELDS: dict[str, dict[str, Any]] = {
    "rerank": {"query": "a", "documents": ["b"]},
    "score": {"text_1": "a", "text_2": "b"},
    "embeddings": {"input": "a"},
    "chat/completions": chat_body(),
    "completions": {"prompt": "a"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_answered_is_one_line(app: Starlette, name: str) -> None:
    path, fields, said, param, code = REFUSED[name]
    response = asked(app, "POST", f"/v1/{path}", json={**FIELDS.get(path, {}), **fields})
    assert response.status_code in {400, 404, 413}, response.text
    error = response.json()["error"]
    assert said in error["message"]
    assert "\n" not in error["message"]
    assert error["param"] == param
    assert error["code"].startswith(code)


def test_a_model_is_loaded_with_progress_and_unloaded(folder: Path) -> None:
    app = edgerun.server.app([folder / "bundle", folder / "vectors"], cache=False, threads=1)
    assert post(app, "/v1/models/unload", model="vectors") == {"model": "vectors", "unloaded": False}
    streamed = asked(app, "POST", "/v1/models/load", json={"model": "vectors", "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *events, end, _ = streamed.text.split("\n\n")
    assert end == "data: [DONE]"
    *progress, state = (json.loads(event.removeprefix("data: ")) for event in events)
    assert [(each["object"], each["fraction"]) for each in progress] == [
        ("model.load.progress", 0.0),
        ("model.load.progress", 1.0),
    ]
    assert (state["id"], state["loaded"]) == ("vectors", True)
    assert post(app, "/v1/models/load", model="bundle")["loaded"]
    assert "edgerun_models_loaded 2.0" in asked(app, "GET", "/metrics").text
    for name in ("vectors", "bundle"):
        assert post(app, "/v1/models/unload", model=name) == {"model": name, "unloaded": True}
    assert "edgerun_models_loaded 0.0" in asked(app, "GET", "/metrics").text


def test_lists_say_what_a_model_is_for(app: Starlette) -> None:
    writes = ["completion", "tools"]
    expected = {"bundle": writes, "vectors": ["embedding"], "pairs": ["rerank"], "plain": writes}
    listed = asked(app, "GET", "/v1/models").json()["data"]
    assert {each["id"]: each.get("capabilities", writes) for each in listed} == expected
    assert [len(each) for each in listed] == [4, 5, 5, 4]  # those of language models are OpenAI's
    assert asked(app, "GET", "/v1/models/pairs").json() == listed[2]
    tags = asked(app, "GET", "/api/tags").json()["models"]
    assert {each["name"]: each["capabilities"] for each in tags} == expected


def test_ollamas_clients_see_and_unload_an_encoder(folder: Path) -> None:
    app = edgerun.server.app(folder / "vectors", threads=1)
    unloading = {"model": "vectors", "keep_alive": 0}
    assert post(app, "/api/generate", **unloading)["done_reason"] == "unload"
    assert post(app, "/api/show", model="vectors")["capabilities"] == ["embedding"]
    post(app, "/v1/models/load", model="vectors")
    assert "edgerun_models_loaded 1.0" in asked(app, "GET", "/metrics").text  # what it was told before does not hold
    assert post(app, "/api/generate", **unloading)["done_reason"] == "unload"
    wait_until(lambda: asked(app, "GET", "/api/ps").json() == {"models": []})


def test_the_command_serves_an_encoder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prefix.txt").write_text("Be short.", encoding="utf-8")
    with served([folder / "pairs"], "--prefix", str(tmp_path / "prefix.txt")) as server:
        assert len(server.post("/v1/rerank", {"query": "a", "documents": ["b", "c"]})["results"]) == 2
