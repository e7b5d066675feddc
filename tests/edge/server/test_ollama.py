"""Ollama's client for Python against a server, and requests that its API refuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from starlette.applications import Starlette

import edgerun
import edgerun.server
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.edge.service.generation_fields import keep_seconds
from edgerun.models.hub.local_store import Store
from support.hub_server import HubServer, files_of, own_hub
from support.processes import EDGE_RUN, started
from support.scripted_model import WEATHER, write_calling_bundle
from support.serving import PATIENCE_S, Served, asked, served, served_here

QUESTION = {"role": "user", "content": "Weather in Paris and Rome?"}
NAME = "bundle"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_bundle(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served([model], "--threads", "1") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(server.base) as client:
        yield client


@pytest.fixture(scope="module")
def reply(model: Path) -> edgerun.Reply:
    with edgerun.load(model) as engine:
        return engine.generate([QUESTION], tools=[WEATHER], temperature=0.0)


def test_a_chat_whole_and_as_a_stream(client: ollama.Client, reply: edgerun.Reply) -> None:
    asking: dict[str, Any] = {"model": f"{NAME}:latest", "messages": [QUESTION], "tools": [WEATHER]}
    whole = client.chat(**asking, options={"temperature": 0})
    pieces = list(client.chat(**asking, options={"temperature": 0}, stream=True))
    calls = [{"name": call.name, "arguments": call.values} for call in reply.tool_calls]
    assert len(calls) == 2
    assert (whole.message.content, whole.message.thinking) == (reply.text, reply.reasoning)
    assert [call.function.model_dump() for call in whole.message.tool_calls or ()] == calls
    assert "".join(piece.message.content or "" for piece in pieces) == reply.text
    assert "".join(piece.message.thinking or "" for piece in pieces) == reply.reasoning
    streamed = [call.function.model_dump() for piece in pieces for call in piece.message.tool_calls or ()]
    assert streamed == calls
    assert [piece.done for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    for last in (whole, pieces[-1]):
        assert (last.done_reason, last.eval_count) == ("stop", reply.stats.completion_tokens)
        assert last.prompt_eval_count == reply.stats.prompt_tokens
        assert last.total_duration >= last.prompt_eval_duration > 0


def test_the_results_of_calls_go_back(client: ollama.Client, server: Served, reply: edgerun.Reply) -> None:
    said = client.chat(NAME, [QUESTION], tools=[WEATHER], options={"temperature": 0}).message
    results = [{"role": "tool", "tool_name": "get_weather", "content": "rain"}] * 2
    asking = {"tools": [WEATHER], "options": {"temperature": 0, "num_predict": 2}}
    further = client.chat(NAME, [QUESTION, said, *results], **asking)
    result = {"role": "tool", "name": "get_weather", "content": "rain"}
    same = server.post(
        "/v1/chat/completions",
        {"messages": [QUESTION, reply.message, result, result], "tools": [WEATHER], "temperature": 0, "max_tokens": 2},
    )
    assert further.prompt_eval_count == same["usage"]["prompt_tokens"]
    assert further.eval_count == same["usage"]["completion_tokens"] == 2
    assert further.done_reason == "length"


def test_a_prompt_and_a_schema(client: ollama.Client, model: Path) -> None:
    with edgerun.load(model) as engine:
        plain = engine.generate("list", raw=True, temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)
    options = {"temperature": 1, "seed": 3, "num_predict": 5, "ignore_eos": True}
    answered = client.generate(NAME, "list", raw=True, options=options)
    assert (answered.response, answered.done_reason) == (plain.text, "length")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(client.generate(NAME, "list", format=schema).response) == {"a": 1}


def test_models_are_listed_shown_loaded_and_unloaded(client: ollama.Client, server: Served) -> None:
    (listed,) = client.list().models
    assert (listed.model, listed.details and listed.details.format) == (NAME, "onnx")
    assert listed.size
    assert listed.size > 1000
    shown = client.show(NAME)
    assert shown.capabilities == ["completion", "tools"]
    assert f"{shown.modelinfo['general.architecture']}.context_length" in shown.modelinfo
    assert client.generate(NAME, keep_alive="1h30m").done_reason == "load"
    (loaded,) = client.ps().models
    assert loaded.model == NAME
    assert loaded.expires_at is not None
    assert loaded.expires_at.year < 2300
    assert client.generate(NAME, keep_alive=-1).done_reason == "load"
    (kept,) = client.ps().models
    assert kept.expires_at is not None
    assert kept.expires_at.year == 2318
    assert client.generate(NAME, keep_alive=0).done_reason == "unload"
    while client.ps().models:  # a thread of its own unloads it
        pass
    assert server.post("/api/show", {"model": NAME})["capabilities"] == ["completion", "tools"]


@pytest.mark.parametrize("seconds", [1e300, float("inf")])
def test_a_model_may_stay_longer_than_there_are_dates(model: Path, seconds: float) -> None:
    app = edgerun.server.app(model, cache=False, idle_unload=seconds)
    assert asked(app, "POST", "/api/generate", json={"model": NAME}).status_code == 200
    (loaded,) = asked(app, "GET", "/api/ps").json()["models"]
    assert loaded["expires_at"].startswith("2318")


def test_errors_have_ollamas_form(client: ollama.Client) -> None:
    for ask in (lambda: client.chat("other", [QUESTION]), lambda: client.show("other"), lambda: client.delete("other")):
        with pytest.raises(ollama.ResponseError, match="there is no model 'other'") as refused:
            ask()
        assert refused.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="is not a model that edge-run downloaded"):
        client.delete(NAME)
    with pytest.raises(ollama.ResponseError, match="--hidden-states"):
        client.embed(NAME, "a")


def test_null_is_the_default_and_num_predict_0_no_limit(server: Served) -> None:
    asking = {"model": NAME, "messages": [QUESTION], "options": {"temperature": 0}, "stream": False}
    text = server.post("/api/chat", asking)["message"]["content"]
    asking["options"] = {"temperature": 0, "num_predict": 0, "stop": None}
    nulls = dict.fromkeys(("tools", "format", "think", "keep_alive", "images"))
    assert server.post("/api/chat", {**asking, **nulls})["message"]["content"] == text
    assert server.post("/api/chat", {"model": NAME, "messages": None, "options": None})["done_reason"] == "load"
    nulls = dict.fromkeys(("system", "raw", "stream", "suffix", "options"))
    response = server.request("POST", "/api/generate", {"model": NAME, "prompt": "list", **nulls})
    assert len(response.body.splitlines()) > 1
    assert server.post("/api/generate", {"model": NAME, "prompt": "a", "suffix": "", "stream": False})["response"]


@pytest.mark.parametrize("think", [True, False, "high", "medium", "low"])
def test_what_ollama_takes_as_thinking_is_taken(server: Served, think: bool | str) -> None:
    asking = {"model": NAME, "messages": [QUESTION], "think": think, "options": {"num_predict": 1}, "stream": False}
    assert server.post("/api/chat", asking)["eval_count"] == 1


@pytest.fixture
def hub(tmp_path: Path, model: Path) -> Iterator[HubServer]:
    with own_hub(tmp_path) as hub:
        hub.repo("acme/tiny", files_of(model, "onnx/"))
        yield hub


def test_a_model_is_downloaded_listed_and_removed(hub: HubServer) -> None:
    app = edgerun.server.app(cache=False)

    def ask(path: str, method: str = "POST", **body: Any) -> httpx.Response:
        return asked(app, method, path, json=body)

    lines = [json.loads(line) for line in ask("/api/pull", model="acme/tiny:latest").text.splitlines()]
    assert lines.pop() == {"status": "success"}
    assert lines[-1]["completed"] == lines[-1]["total"] > 1000
    assert ask("/api/pull", model="acme/tiny", stream=False).json() == {"status": "success"}
    (listed,) = [each for each in ask("/api/tags", "GET").json()["models"] if each["name"] == "acme/tiny"]
    assert listed["modified_at"] > "2020"
    assert ask("/api/generate", model="acme/tiny").json()["done_reason"] == "load"
    Store("acme/tiny").remove(None)  # as another process does
    assert [each["name"] for each in ask("/api/ps", "GET").json()["models"]] == ["acme/tiny"]
    assert ask("/v1/models/unload", model="acme/tiny").json()["unloaded"]
    assert ask("/api/generate", model="acme/tiny").status_code == 404
    ask("/api/pull", model="acme/tiny", stream=False)
    assert ask("/api/delete", "DELETE", model="acme/tiny").status_code == 200
    assert "acme/tiny" not in ask("/api/tags", "GET").text


def test_a_second_download_of_a_model_joins_the_first(hub: HubServer, model: Path) -> None:
    # A name of a graph in `genai_config.json` is a file to download before the variant is known.
    named = b'{"model": {"decoder": {"filename": "model.onnx"}}}'
    files = files_of(model, "onnx/")
    hub.repo("acme/tiny", {**files, "onnx/genai_config.json": named, "onnx/other.onnx": files["onnx/model.onnx"]})
    hub.faults.stall["model.onnx.data"] = 1 << 20
    pulling = {"model": "acme/tiny"}
    with (
        served_here(model, ServerSettings()) as server,
        httpx.Client(base_url=server.base, timeout=PATIENCE_S) as http,
        http.stream("POST", "/api/pull", json=pulling) as first,
    ):
        lines = map(json.loads, first.iter_lines())
        assert any(line.get("completed", 0) > 1 << 19 for line in lines)
        with http.stream("POST", "/api/pull", json=pulling) as second:
            waiting = map(json.loads, second.iter_lines())
            said = next(waiting)
            assert (said["status"], 1 << 19 < said["completed"] < said["total"]) == ("pulling acme/tiny", True)
            with started([*EDGE_RUN, "pull", "acme/tiny", "--json"], stdout=subprocess.PIPE) as command:
                hub.faults.stall.clear()
                hub.faults.go_on.set()
                assert json.loads(command.communicate(PATIENCE_S)[0] or b"")["id"] == "acme/tiny"
            for answered in (lines, waiting):
                *_, complete, last = answered
                assert last == {"status": "success"}
                assert complete["completed"] == complete["total"] > 1 << 20
    assert hub.bodies().count("onnx/model.onnx") == 1


def test_downloads_that_fail_say_whose_fault_it_is(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    app = edgerun.server.app(cache=False)

    def refused(name: str) -> tuple[int, str]:
        response = asked(app, "POST", "/api/pull", json={"model": name})
        return response.status_code, response.json()["error"]

    assert refused("acme/none")[0] == 400
    assert refused("acme/tiny:q9") == (404, "acme/tiny has no variant q9; name one of fp32")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert refused("acme/other")[0] == 502
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused("acme/other")[0] == 503


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no object": ("/api/chat", [], "the body is the array []; it must be a JSON object"),
    "no model": ("/api/chat", {"messages": []}, "model is missing"),
    "images": (
        "/api/chat",
        {"model": "", "messages": [{"role": "user", "content": "", "images": ["aGk=", 3]}]},
        "messages[0].images is",
    ),
    "a role": ("/api/chat", {"model": "", "messages": [{"role": "x", "content": ""}]}, "role is 'x'"),
    "a message": ("/api/chat", {"model": "", "messages": [3]}, "messages[0] is the integer 3; it must be an object"),
    "a format": ("/api/generate", {"model": "", "prompt": "a", "format": "xml"}, "format is 'xml'"),
    "a thought": (
        "/api/chat",
        {"model": "", "think": "banana"},
        "think is the string 'banana'; edge-run supports true",
    ),
    "much thought": ("/api/generate", {"model": "", "think": 1}, "think is the integer 1; it must be true or false"),
    "a suffix": (
        "/api/generate",
        {"model": "bundle", "prompt": "a", "suffix": "b"},
        "no tokens for filling in the middle",
    ),
    "an option": ("/api/generate", {"model": "", "prompt": "a", "options": {"vocab_only": True}}, "options.vocab_only"),
    "a temperature": ("/api/generate", {"model": "", "prompt": "a", "options": {"temperature": -1}}, "temperature"),
    "a context": ("/api/generate", {"model": "bundle", "prompt": "a", "options": {"num_ctx": 10**6}}, "num_ctx is"),
    "a duration": ("/api/generate", {"model": "", "prompt": "a", "keep_alive": "soon"}, "keep_alive is 'soon'"),
    "no duration": ("/api/generate", {"model": "", "keep_alive": ""}, "keep_alive is ''"),
    "messages": ("/api/chat", {"model": "", "messages": [{}] * 10_001}, "10001 items"),
    "no texts": ("/api/embed", {"model": "bundle", "input": []}, "input is empty"),
    "a hub's name": ("/api/pull", {"model": "nonsense"}, "nonsense"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_requests_get_one_line(tiny_app: Starlette, name: str) -> None:
    path, body, message = REFUSED[name]
    response = asked(tiny_app, "POST", path, json=body)
    assert 400 <= response.status_code < 500
    (key, said), *others = response.json().items()
    assert (key, others) == ("error", [])
    assert message in said
    assert "\n" not in said


def test_pages_of_other_sites_are_refused_in_ollamas_form(tiny_app: Starlette) -> None:
    for headers in ({"origin": "https://example.com"}, {"host": "example.com"}):
        response = asked(tiny_app, "GET", "/api/tags", headers=headers)
        assert response.status_code in (403, 421)
        assert set(response.json()) == {"error"}
        assert "example.com" in response.json()["error"]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        (90, 90),
        (-1, float("inf")),
        ("-1", float("inf")),
        ("5m", 300),
        ("1h30m", 5400),
        ("300", 300),
    ],
)
def test_how_long_models_stay(given: str | float | None, seconds: float | None) -> None:
    assert keep_seconds(given) == seconds
