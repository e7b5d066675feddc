"""The ASGI application in a program of one's own: its endpoints, models and end."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount, Route

import edgerun
import edgerun.server
from edgerun.runtime.text import tokenizer, tokenizer_library
from support.commands import Patch
from support.processes import started
from support.serving import CHAT, PATIENCE_S, asked, chat_body

JSON = {"content-type": "application/json"}


def test_all_paths_are_listed(tiny_app: Starlette) -> None:
    listed = asked(tiny_app, "GET", "/").json()
    assert (listed["name"], listed["version"]) == ("edge-run", edgerun.__version__)
    page = (Path(__file__).resolve().parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    for route, entry in zip(tiny_app.routes, listed["paths"], strict=True):
        assert isinstance(route, Route)
        assert entry["description"].endswith(".")
        for method in entry["methods"]:
            assert f"`{method} {entry['path']}`" in page
            assert asked(tiny_app, method, entry["path"], headers=JSON, content=b"{").status_code != 405
    inside = Starlette(routes=[Mount("/models", tiny_app)])
    assert asked(inside, "GET", "/models/").json() == listed


def test_an_answer_comes_whole_or_as_events(tiny_app: Starlette) -> None:
    whole = asked(tiny_app, "POST", CHAT, json=chat_body(max_tokens=9, temperature=0))
    streamed = asked(tiny_app, "POST", CHAT, json=chat_body(max_tokens=9, temperature=0, stream=True))
    assert whole.headers["content-type"] == "application/json"
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["cache-control"] == "no-cache"
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert whole.json()["usage"]["completion_tokens"] == 9


def test_strategies_choose_tokens_and_name_what_is_wrong(tiny_app: Starlette, tiny_bundle: Path) -> None:
    body = chat_body(max_tokens=9, temperature=0.9, seed=1)
    given = [{"name": "xtc", "probability": 1}, {"name": "dry", "base": 2}]
    (choice,) = asked(tiny_app, "POST", CHAT, json={**body, "strategies": given}).json()["choices"]
    strategies = [edgerun.strategy("xtc", probability=1.0), edgerun.strategy("dry", base=2.0)]
    with edgerun.load(tiny_bundle, draft=None, cache=False) as engine:
        expected = engine.generate(body["messages"], max_tokens=9, temperature=0.9, seed=1, strategies=strategies)
    assert choice["message"]["content"] == expected.text
    samplers = {"xtc_probability": 1, "xtc_threshold": 0.1, "dry_multiplier": 0.8, "dry_base": 2, "mirostat": 0}
    (same,) = asked(tiny_app, "POST", CHAT, json={**body, **samplers, "typical_p": 1, "top_n_sigma": -1}).json()[
        "choices"
    ]
    assert same["message"] == choice["message"]
    for field, value in {"mirostat": 1, "xtc_probability": 2, "dry_base": 0, "dry_sequence_breakers": ["ab"]}.items():
        refused = asked(tiny_app, "POST", CHAT, json={**body, "dry_multiplier": 1, field: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    refused = asked(tiny_app, "POST", CHAT, json={**body, "top_n_sigma": 1000})
    assert refused.json()["error"]["message"].startswith("top_n_sigma is 1000")
    for wrong in ({}, {"name": 1}, {"name": "none"}, {"name": "dry", "base": "x"}, {"name": "dry", "colour": 1}):
        refused = asked(tiny_app, "POST", CHAT, json={**body, "strategies": [wrong]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "strategies[0]")


def test_an_answer_continues_the_last_message(tiny_app: Starlette, tiny_bundle: Path) -> None:
    def answer(body: dict[str, object]) -> str:
        return str(asked(tiny_app, "POST", CHAT, json=body).json()["choices"][0]["message"]["content"])

    question = chat_body(max_tokens=9, temperature=0)
    begun = {"role": "assistant", "content": "in the other"}
    body = {**question, "messages": [*question["messages"], begun]}
    continued = answer({**body, "continue_final_message": True, "add_generation_prompt": False})
    with edgerun.load(tiny_bundle, draft=None, cache=False) as engine:
        expected = engine.generate(question["messages"], answer_start="in the other", max_tokens=9, temperature=0.0)
    assert continued == expected.text
    assert continued not in (answer(body), answer(question))
    refused = asked(tiny_app, "POST", CHAT, json={**question, "continue_final_message": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0]")


def test_the_best_answers_come_first_and_the_others_are_counted(tiny_app: Starlette, tiny_bundle: Path) -> None:
    body = {"prompt": "the ", "n": 2, "best_of": 5, "seed": 5, "temperature": 2, "max_tokens": 5, "exact": True}
    options: dict[str, Any] = {"raw": True, "temperature": 2.0, "max_tokens": 5, "exact": True, "logprobs": 0}
    with edgerun.load(tiny_bundle, draft=None, cache=False) as engine:
        replies = [engine.generate("the ", seed=seed, **options) for seed in range(5, 10)]
    best = sorted(replies, key=lambda reply: -(reply.stats.mean_logprob or 0))[:2]
    found = asked(tiny_app, "POST", "/v1/completions", json=body).json()
    assert [choice["text"] for choice in found["choices"]] == [reply.text for reply in best]
    returned, generated = (sum(reply.stats.completion_tokens for reply in each) for each in (best, replies))
    assert returned < found["usage"]["completion_tokens"] <= generated
    assert found["usage"]["prompt_tokens"] == best[0].stats.prompt_tokens
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    lines = asked(tiny_app, "POST", "/v1/completions", json=streamed).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == [reply.text for reply in best]
    usages = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert usages == [found["usage"]["completion_tokens"]]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses"])
def test_a_context_beyond_the_models_is_refused(tiny_app: Starlette, path: str) -> None:
    body = {CHAT: chat_body(), "/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}[path]
    assert asked(tiny_app, "POST", path, json={**body, "num_ctx": 256}).status_code == 200
    for streams in (False, True):
        refused = asked(tiny_app, "POST", path, json={**body, "num_ctx": 257, "stream": streams})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "num_ctx")
        assert "the context of this model is 256 tokens" in error["message"]


def test_texts_are_tokenized_and_back(tiny_app: Starlette, tiny_bundle: Path) -> None:
    with edgerun.load(tiny_bundle, draft=None, cache=False) as engine:
        ids = engine.tokenizer.encode("the other", add_special_tokens=False)
        chat = engine.encode_chat([{"role": "user", "content": "the other"}])
    tokens = asked(tiny_app, "POST", "/tokenize", json={"content": "the other"}).json()
    assert (tokens["tokens"], tokens["count"], tokens["max_model_len"]) == (ids, len(ids), 256)
    pieces = asked(tiny_app, "POST", "/tokenize", json={"content": "the other", "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert "".join(piece["piece"] for piece in pieces) == "the other"
    messages = asked(tiny_app, "POST", "/tokenize", json=chat_body("the other")).json()
    assert messages["tokens"] == chat
    assert asked(tiny_app, "POST", "/detokenize", json={"tokens": ids}).json()["content"] == "the other"
    for path, field in (("/detokenize", "tokens"), ("/v1/completions", "prompt")):
        refused = asked(tiny_app, "POST", path, json={field: [1, 300]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"{field}[1]")


def test_embeddings_of_token_ids(tmp_path: Path) -> None:
    from edgerun.export import ExportRecipe, export_checkpoint
    from support.tiny_models import write_checkpoint

    recipe = ExportRecipe(hidden_states=True)
    bundle = export_checkpoint(write_checkpoint(tmp_path / "c"), tmp_path / "b", recipe).bundle
    app = edgerun.server.app(bundle, cache=False)
    texts = ["one text", "another"]
    with edgerun.load(bundle, cache=False) as engine:
        ids = [engine.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    of_texts, of_ids = (asked(app, "POST", "/v1/embeddings", json={"input": given}).json() for given in (texts, ids))
    assert of_ids == of_texts
    assert of_ids["usage"]["prompt_tokens"] == sum(map(len, ids))
    refused = asked(app, "POST", "/v1/embeddings", json={"input": [5, 999]})
    assert refused.json()["error"]["param"] == "input[1]"


def test_metrics_count_what_happened(tiny_bundle: Path) -> None:
    app = edgerun.server.app(tiny_bundle, cache=False)
    conversation = chat_body("a long question of " * 5, max_tokens=9, temperature=0)
    answer = asked(app, "POST", CHAT, json=conversation).json()["choices"][0]["message"]["content"]
    further = [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    asked(app, "POST", CHAT, json={**conversation, "messages": conversation["messages"] + further})
    asked(app, "POST", CHAT, json=chat_body(colour="red"))
    asked(app, "GET", "/some/path")
    for name in ("some/model", "another"):
        asked(app, "GET", f"/v1/models/{name}")
    asked(app, "POST", "/v1/models", headers=JSON)
    response = asked(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = set(response.text.splitlines())
    model = f'model="{tiny_bundle.name}"'
    (passes,) = (line.split()[-1] for line in lines if line.startswith(f"edgerun_passes_total{{{model}}}"))
    assert float(passes) > 0
    assert {
        'edgerun_requests_total{endpoint="/v1/chat/completions",status="200"} 2.0',
        'edgerun_requests_total{endpoint="/v1/chat/completions",status="400"} 1.0',
        'edgerun_requests_total{endpoint="other",status="404"} 1.0',
        'edgerun_requests_total{endpoint="/v1/models/{id}",status="404"} 2.0',
        'edgerun_requests_total{endpoint="/v1/models",status="405"} 1.0',
        f"edgerun_completion_tokens_total{{{model}}} 18.0",
        f"edgerun_prefix_cache_hits_total{{{model}}} 1.0",
        f"edgerun_time_to_first_token_seconds_count{{{model}}} 2.0",
        f"edgerun_waiting_seconds_count{{{model}}} 2.0",
        f"edgerun_requests_running{{{model}}} 0.0",
        f"edgerun_requests_waiting{{{model}}} 0.0",
        f"edgerun_pass_texts_total{{{model}}} {passes}",
        "edgerun_models_loaded 1.0",
    } <= lines
    for name in ("process_resident_memory_bytes", "kv_cache_bytes", "draft_tokens_total", "tokens_per_second"):
        assert f"# HELP edgerun_{name.removesuffix('_total')}" in response.text
    # Paths come from clients: any number of them is one line.
    assert "some" not in response.text


def test_the_end_of_the_lifespan_unloads_the_models(tiny_bundle: Path) -> None:
    app = edgerun.server.app(tiny_bundle, cache=False)

    async def live() -> tuple[int, httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            async with app.router.lifespan_context(app):
                before = (await client.post(CHAT, json=chat_body(max_tokens=2))).status_code
            return before, await client.post(CHAT, json=chat_body())

    before, after = asyncio.run(live())
    assert before == 200
    assert after.status_code == 503
    assert after.json()["error"]["code"] == "shutting_down"


def test_a_server_of_ones_own_runs_the_application(tiny_bundle: Path) -> None:
    program = f"""
import socket, uvicorn, edgerun.server
app = edgerun.server.app({str(tiny_bundle)!r}, api_key="secret", cache=False)
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])
"""
    with started([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        base = f"http://127.0.0.1:{int(process.stdout.readline())}"
        headers = {"authorization": "Bearer secret"}
        done = httpx.post(base + CHAT, json=chat_body(max_tokens=3), headers=headers, timeout=PATIENCE_S)
        assert done.json()["usage"]["completion_tokens"] == 3
        assert httpx.post(base + CHAT, json=chat_body(), timeout=PATIENCE_S).status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body("list " * 40, max_tokens=1)),
        ("/v1/completions", {"prompt": "list " * 40, "max_tokens": 1}),
        ("/v1/responses", {"input": "list " * 40, "max_output_tokens": 1}),
        ("/tokenize", {"content": "list " * 10_000}),
        ("/detokenize", {"tokens": [5] * 20_000}),
    ],
)
def test_texts_are_encoded_and_decoded_outside_of_the_event_loop(
    tiny_app: Starlette, path: str, body: dict[str, Any], monkeypatch: Patch
) -> None:
    called = []
    for name in ("encode_text", "decode_ids"):
        function = getattr(tokenizer_library, name)

        def watched(*arguments: Any, function: Callable[..., Any] = function, **options: Any) -> Any:
            with pytest.raises(RuntimeError, match="no running event loop"):
                asyncio.get_running_loop()
            called.append(function)
            return function(*arguments, **options)

        monkeypatch.setattr(tokenizer, name, watched)
    assert asked(tiny_app, "POST", path, json=body).status_code == 200
    assert called
