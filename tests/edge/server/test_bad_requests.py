"""Requests that cannot be answered: one clear error each, in OpenAI's form."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Route

from edgerun.edge.server.http_protocol import ProtocolRoute
from edgerun.edge.server.protocols import anthropic, llamacpp, ollama, openai, rerank
from edgerun.edge.service.body_decoder import decode_body
from edgerun.edge.service.responses_body import ResponsesBody
from edgerun.edge.service.text_bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from support.nightly import examples
from support.random_bodies import NAMES, TEXTS, bodies
from support.serving import CHAT, Served, asked, chat_body, raw_request, read_all

JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "invalid_json", None),
        (b"{", 400, "invalid_json", None),
        (b"{}", 400, "missing_required_parameter", "messages"),
        (chat_body(temperature="hot"), 400, "invalid_type", "temperature"),
        (chat_body(model="gpt-4"), 404, "model_not_found", "model"),
        (chat_body("word " * 300), 400, "context_length_exceeded", None),
    ],
)
def test_each_error_says_what_is_wrong(
    tiny_app: Starlette, body: bytes | dict[str, Any], status: int, code: str, param: str | None
) -> None:
    bodies = [body] if isinstance(body, bytes) else [json.dumps({**body, "stream": each}) for each in (False, True)]
    for content in bodies:
        response = asked(tiny_app, "POST", CHAT, content=content, headers=JSON)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert (error["code"], error["param"]) == (code, param), error
        assert error["message"]
        assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize("path", ["/v1", "/v1/chat", CHAT + "/", "/v2/models", "/%00", "/v1/audio/speech"])
def test_unknown_paths(tiny_app: Starlette, path: str) -> None:
    for method in ("GET", "POST"):
        response = asked(tiny_app, method, path, headers=JSON)
        assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_path")


@pytest.mark.parametrize(
    ("method", "path", "allowed"), [("GET", CHAT, "POST"), ("POST", "/v1/models", "GET"), ("POST", "/", "GET")]
)
def test_wrong_methods(tiny_app: Starlette, method: str, path: str, allowed: str) -> None:
    response = asked(tiny_app, method, path, headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert allowed in response.headers["allow"]


def test_a_body_above_the_limit_is_refused(tiny_app: Starlette) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    for content in (b" " * 100_001, pieces()):
        response = asked(tiny_app, "POST", CHAT, content=content, headers=JSON)
        assert response.status_code == 413
        error = response.json()["error"]
        assert error["code"] == "request_too_large"
        assert "100000 bytes" in error["message"]


def test_a_gigabyte_is_refused_before_it_is_sent(endless_server: Served) -> None:
    # By its declared length: nothing of it has been sent.
    with endless_server.connected() as connection:
        connection.sendall(raw_request(CHAT, {}, {"Content-Length": str(1 << 30)}).partition(b"{")[0])
        response = read_all(connection)
    assert response.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in response
    # Where the client only says how long the next piece is, a little after the limit, however fast it sends.
    sent = 0
    with endless_server.connected() as connection:
        head = raw_request(CHAT, {}).partition(b"Content-Length")[0]
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        try:
            while sent < 1 << 28:
                connection.sendall(piece)
                sent += 1 << 20
        except OSError:
            pass  # the server closed the connection
        response = read_all(connection)
    assert sent < 1 << 28
    assert not response or response.startswith(b"HTTP/1.1 413 ")
    assert json.loads(endless_server.get("/health")) == {"status": "ok"}


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n\x00",
        b"NOT HTTP\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\nConnection: close\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        random.Random(0).randbytes(200) + b"\r\n\r\n",
    ],
    ids=["null byte", "other text", "long header", "negative length", "no host", "random bytes"],
)
def test_what_is_not_http_is_refused_and_nothing_else_is_disturbed(
    endless_server: Served, request_bytes: bytes
) -> None:
    with endless_server.connected() as connection:
        connection.sendall(request_bytes)
        response = read_all(connection)
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert json.loads(body)["error"]["code"] in {"invalid_http", "headers_too_large"}
    assert json.loads(endless_server.get("/health")) == {"status": "ok"}


def test_the_server_says_nothing_of_the_contents_of_requests(endless_server: Served) -> None:
    with endless_server.connected() as connection:
        connection.sendall(raw_request(CHAT, chat_body("a secret", colour="red"), {"Connection": "close"}))
        assert b"unknown_parameter" in read_all(connection)
    assert not [line for line in endless_server.lines if "secret" in line or "colour" in line]


ShowBody = msgspec.defstruct("ShowBody", [("model", str), ("verbose", bool | None, None)])
UnloadBody = msgspec.defstruct("UnloadBody", [("model", str)])
ODD = st.sampled_from((math.nan, -math.inf, 10**4000, functools.reduce(lambda inner, _: [inner], range(500), [])))
"""What no field takes: numbers that JSON lacks or floats cannot hold, and what is nested too deeply."""
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    CHAT: (ChatBody, chat_body(max_tokens=2)),
    "/v1/completions": (CompletionBody, {"prompt": "a", "max_tokens": 2}),
    "/v1/responses": (ResponsesBody, {"input": "a", "max_output_tokens": 2}),
    "/v1/embeddings": (EmbeddingBody, {"input": "a"}),
    "/tokenize": (TokenizeBody, {"content": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/v1/models/load": (openai.LoadBody, {"model": "bundle"}),
    "/v1/models/unload": (UnloadBody, {"model": "bundle"}),
    "/v1/rerank": (rerank.RerankBody, {"query": "a", "documents": ["b"]}),
    "/v1/score": (rerank.ScoreBody, {"text_1": "a", "text_2": "b"}),
    "/v1/messages": (anthropic.MessagesBody, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    "/v1/messages/count_tokens": (anthropic.MessagesBody, {"messages": [{"role": "user", "content": "a"}]}),
    "/api/show": (ShowBody, {"model": "bundle"}),
    "/api/delete": (UnloadBody, {"model": "bundle"}),
    "/api/pull": (ollama.OllamaPullBody, {"model": "no hub id"}),
    "/api/embed": (ollama.OllamaEmbedBody, {"model": "bundle", "input": "a"}),
    "/api/chat": (ollama.OllamaChatBody, {"model": "bundle", "messages": [], "options": {"num_predict": 2}}),
    "/api/generate": (ollama.OllamaTextBody, {"model": "bundle", "prompt": "a", "options": {"num_predict": 2}}),
    "/infill": (llamacpp.InfillBody, {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}),
}
"""Bodies by their path, each with its required fields."""


def test_every_path_with_a_body_is_tried(tiny_app: Starlette) -> None:
    routes = [route for route in tiny_app.routes if isinstance(route, Route)]
    assert [route.path for route in routes if {"POST", "DELETE"} & (route.methods or set())] == list(BODIES)


@pytest.mark.parametrize("path", BODIES)
def test_null_is_the_same_as_leaving_a_field_out(path: str) -> None:
    kind, required = BODIES[path]
    nulls = {field.name: None for field in msgspec.structs.fields(kind) if not field.required}
    assert decode_body({**nulls, **required}, kind) == decode_body(required, kind)


@pytest.mark.parametrize("path", BODIES)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_a_body_is_answered_or_refused(tiny_app: Starlette, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(*BODIES[path]))
    odd = data.draw(st.none() | ODD)
    if odd is not None:
        body[data.draw(st.sampled_from(sorted(field.name for field in msgspec.structs.fields(BODIES[path][0]))))] = odd
    query = data.draw(st.dictionaries(NAMES, TEXTS, max_size=1))
    response = asked(tiny_app, method_of(path), path, content=json.dumps(body), headers=JSON, params=query)
    if response.status_code == HTTPStatus.OK and odd is None:
        return
    assert response.status_code in {HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND}, response.text
    assert_is_refusal(path, response)


def method_of(path: str) -> str:
    return "DELETE" if path == "/api/delete" else "POST"


def assert_is_refusal(path: str, response: httpx.Response) -> None:
    """Check that a response is one error, of one line, in the form of the API that the path belongs to."""
    said = response.json()
    if path.startswith("/v1/messages"):
        assert (said.pop("type"), set(said["error"])) == ("error", {"type", "message"})
    elif path == "/infill":
        assert set(said["error"]) == {"code", "message", "type"}
    elif not path.startswith("/api/"):
        assert set(said["error"]) == {"message", "type", "param", "code"}
    message = said["error"] if path.startswith("/api/") else said["error"]["message"]
    assert (set(said), type(message), "\n" in message) == ({"error"}, str, False)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b"NaN", b'{"a": 1, "a": 2}', b'{"a":' * 15_000, b"[" * 90_000],
)
@pytest.mark.parametrize("path", BODIES)
def test_what_is_not_an_object_is_refused(tiny_app: Starlette, path: str, content: bytes) -> None:
    response = asked(tiny_app, method_of(path), path, content=content, headers=JSON)
    assert response.status_code == HTTPStatus.BAD_REQUEST
    assert_is_refusal(path, response)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
    ],
    ids=["a name that points here", "a page of another site", "a page without a site", "no JSON"],
)
def test_other_sites_are_refused_on_every_route(tiny_app: Starlette, headers: dict[str, str], status: int) -> None:
    routes = [route for route in tiny_app.routes if isinstance(route, ProtocolRoute)]
    tried = [(method, route.path) for route in routes for method in route.methods or () if method != "HEAD"]
    assert len(tried) > len(BODIES)
    for method, path in tried:
        if method == "POST" or status != HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
            response = asked(tiny_app, method, path, content=b"{}", headers={**JSON, **headers})
            assert response.status_code == status, path
            assert_is_refusal(path, response)
