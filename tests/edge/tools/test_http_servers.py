"""MCP servers at an address: sessions over Streamable HTTP, lost sessions, and servers that answer badly."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the mcp extra")

import uvicorn

from edgerun.edge.server.uvicorn_server import bound_socket
from edgerun.edge.tools.http_client import MAX_BYTES
from edgerun.edge.tools.tool_servers import ToolServers
from edgerun.edge.tools.tool_settings import ServerFields
from edgerun.runtime.scheduling.request_run import Cancellation
from support import weather_server
from support.mcp_http_server import McpHttpServer, mcp_http_server
from support.waiting import wait_until

TOOL = "far/get_weather"
NOT_ONE = "the response is not a JSON-RPC message, or too long"

LOGGED = (
    b"data: "
    + json.dumps(
        {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * (1 << 17)}}
    ).encode()
    + b"\n\n"
)


@pytest.fixture
def server() -> Iterator[McpHttpServer]:
    with mcp_http_server() as server:
        yield server


@pytest.fixture
def servers() -> Iterator[ToolServers]:
    opened = ToolServers(start_s=30.0)
    yield opened
    opened.close()


def state_of(servers: ToolServers) -> dict[str, Any]:
    (described,) = servers.list()["servers"]
    return described


@pytest.mark.parametrize("as_events", [False, True], ids=["json", "events"])
def test_a_session_from_the_first_request_to_the_last(
    server: McpHttpServer, servers: ToolServers, as_events: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not asked for what is on this machine
    server.as_events = as_events
    servers.save("far", ServerFields(url=server.url, headers={"Authorization": "Bearer key"}))
    (tool,) = servers.offered([TOOL], Cancellation()).values()
    assert tool.definition("x")["function"]["description"] == "The weather in a city."
    assert tool.problem({}) == "the arguments: city is missing"
    assert servers.call(tool, {"city": "Oslo"}, Cancellation()) == ("Oslo: sunny", False)
    servers.remove("far")
    wait_until(lambda: not server.sessions)
    assert "DELETE" in [method for method, _, _ in server.requests]
    first, *others = server.requests
    assert "mcp-session-id" not in first[2]
    for method, _, headers in server.requests:
        assert headers["authorization"] == "Bearer key"
        assert headers["accept-encoding"] == "identity"
        if method == "POST":
            assert headers["accept"] == "application/json, text/event-stream"
    assert {headers["mcp-session-id"] for _, _, headers in others} == {"session 1"}
    assert {headers["mcp-protocol-version"] for _, _, headers in others} == {first[1]["params"]["protocolVersion"]}


def test_a_server_of_the_official_package(servers: ToolServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["weather_server.py"])
    listening = bound_socket("127.0.0.1", 0)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/mcp"
    running = uvicorn.Server(uvicorn.Config(weather_server.server.streamable_http_app(), log_level="critical"))
    thread = threading.Thread(target=running.run, args=([listening],))
    thread.start()
    servers.save("far", ServerFields(url=address))
    offered = servers.offered(["far/get_weather", "far/storm"], Cancellation())
    assert servers.call(offered["get_weather"], {"city": "Oslo"}, Cancellation()) == ("Oslo: sunny", False)
    text, failed = servers.call(offered["storm"], {}, Cancellation())
    assert (text.startswith("error: "), failed) == (True, True)
    servers.remove("far")
    running.should_exit = True
    thread.join()


@pytest.mark.parametrize("status", [404, 400])
@pytest.mark.parametrize("id_", [{}, {"id": None}, {"id": 2}], ids=["no id", "null", "an id"])
def test_a_call_is_made_in_a_new_session_where_the_server_has_forgotten_the_old_one(
    server: McpHttpServer, servers: ToolServers, status: int, id_: dict[str, object]
) -> None:
    error = {"jsonrpc": "2.0", **id_, "error": {"code": -32000, "message": "Bad Request: No valid session ID provided"}}
    server.refusal = (status, json.dumps(error).encode())
    servers.save("far", ServerFields(url=server.url))
    (tool,) = servers.offered([TOOL], Cancellation()).values()
    server.sessions.clear()
    assert servers.call(tool, {"city": "Oslo"}, Cancellation()) == ("Oslo: sunny", False)
    assert len(server.sessions) == 1
    server.faults["tools/call"] = lambda handler: handler.reply(404, b"")
    assert servers.call(tool, {"city": "Rome"}, Cancellation()) == ("error: the server has ended", True)
    assert server.calls() == ["Oslo", "Oslo", "Rome", "Rome"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda handler: handler.reply(200, b"no", content_type="application/json"), NOT_ONE),
        (lambda handler: handler.reply(200, b"<p>", content_type="text/html"), "Unexpected content type: text/html"),
        (lambda handler: handler.reply(401, b""), "Server returned an error response; it said: 401 Unauthorized"),
        (lambda handler: handler.reply(404, b""), "Not Found; it said: 404 Not Found"),
        (lambda handler: handler.reply(202, b""), "server answered a request with 202 Accepted"),
        (
            lambda handler: handler.reply(307, b"", location="http://127.0.0.2:9/mcp"),
            "Redirect to http://127.0.0.2:9/mcp not followed; use that URL as the endpoint",
        ),
        (lambda handler: handler.stream("application/json", b" " * (1 << 16)), NOT_ONE),
        (lambda handler: handler.stream("text/event-stream", LOGGED), "SSE stream ended without a response"),
        (lambda handler: handler.stream("text/event-stream", b"data: {}\n\n"), NOT_ONE),
        (lambda handler: handler.stream("text/event-stream", b"x" * (1 << 16)), "SSE stream"),
        (
            lambda handler: handler.reply(
                200, gzip.compress(b" " * (1 << 20)), content_type="application/json", content_encoding="gzip"
            ),
            NOT_ONE,
        ),
        (lambda handler: handler.connection.shutdown(socket.SHUT_RDWR), "Server disconnected"),
    ],
    ids=[
        *("text", "page", "key", "path", "accepted", "redirect", "endless", "events", "other events", "event"),
        *("compressed", "disconnected"),
    ],
)
def test_a_server_that_answers_badly_is_told_of_on_one_line(
    server: McpHttpServer, servers: ToolServers, fault: Callable[[Any], None], said: str
) -> None:
    server.faults["initialize"] = fault
    servers.save("far", ServerFields(url=server.url))
    assert servers.offered([TOOL], Cancellation()) == {}
    described = state_of(servers)
    assert described["state"] == "failed"
    assert described["error"].startswith(f"{server.url} cannot be used: {said}"), described["error"]
    assert "\n" not in described["error"]


def test_a_call_that_is_answered_badly_fails_alone(server: McpHttpServer, servers: ToolServers) -> None:
    servers.save("far", ServerFields(url=server.url))
    (tool,) = servers.offered([TOOL], Cancellation()).values()
    server.faults["tools/call"] = lambda handler: handler.stream("application/json", b"x" * (1 << 16))
    assert servers.call(tool, {"city": "Oslo"}, Cancellation()) == (f"error: {NOT_ONE}", True)
    server.faults["tools/call"] = lambda handler: handler.reply(500, b"")
    assert servers.call(tool, {}, Cancellation()) == ("error: Server returned an error response", True)
    server.faults.clear()
    assert servers.call(tool, {"city": "Rome"}, Cancellation()) == ("Rome: sunny", False)
    assert MAX_BYTES == 16 << 20


def test_nothing_at_the_address_and_a_server_that_is_silent() -> None:
    with mcp_http_server() as server:
        url = server.url
    servers = ToolServers(start_s=0.5)
    servers.save("far", ServerFields(url=url))
    assert servers.offered([TOOL], Cancellation()) == {}
    assert state_of(servers)["error"].startswith(f"{url} cannot be used: ")
    with mcp_http_server() as silent:
        silent.faults["initialize"] = lambda handler: handler.server.ending.wait() and None
        servers.save("far", ServerFields(url=silent.url))
        assert servers.offered([TOOL], Cancellation()) == {}
        assert state_of(servers)["error"] == (
            f"{silent.url} has not answered within 0.5 seconds; is it an MCP server that speaks Streamable HTTP?"
        )
    servers.close()


def test_the_end_does_not_wait_for_a_server_that_is_silent(server: McpHttpServer) -> None:
    servers = ToolServers()
    servers.save("far", ServerFields(url=server.url))
    (tool,) = servers.offered([TOOL], Cancellation()).values()
    server.faults["tools/call"] = lambda handler: handler.server.ending.wait() and None
    cancellation = Cancellation()
    threading.Thread(target=lambda: (wait_until(server.calls), cancellation.cancel())).start()
    with pytest.raises(Exception, match="cancelled"):
        servers.call(tool, {"city": "Oslo"}, cancellation)
    servers.close()
    methods = [method for method, _, _ in server.requests]
    assert "DELETE" in methods  # the notice that the call is cancelled may come after it
