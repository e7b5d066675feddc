"""Clients that go away, read slowly or not at all: their answers end, and nobody else is disturbed."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import pytest

import edgerun
from edgerun.edge.server.server_settings import ServerSettings
from support.serving import CHAT, PATIENCE_S, Served, chat_body, raw_request, read_all, served_here
from support.waiting import wait_until

ENDLESS = chat_body("go on", max_tokens=29_000)
LONG_PROMPT = chat_body("word " * 9_000, max_tokens=4)


@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_ends_when_its_client_goes_away(endless_server: Served, streams: bool) -> None:
    with endless_server.connected() as connection:
        connection.sendall(raw_request(CHAT, {**ENDLESS, "stream": streams}))
        if streams:
            received = b""
            while b'"content"' not in received:  # the head, and each event, may come alone
                piece = connection.recv(65536)
                assert piece
                received += piece
        wait_until(lambda: endless_server.load() == (1, 0), "the answer is generated")
    wait_until(lambda: endless_server.load() == (0, 0), "the answer has ended")


@pytest.mark.parametrize("streams", [True, False])
def test_a_prefill_ends_when_its_client_goes_away(endless_server: Served, streams: bool) -> None:
    before = endless_server.metric("completion_tokens_total")
    with endless_server.connected() as connection:
        connection.sendall(raw_request(CHAT, {**LONG_PROMPT, "stream": streams}))
        wait_until(lambda: endless_server.load() == (1, 0), "the prompt is read")
    wait_until(lambda: endless_server.load() == (0, 0), "the answer has ended")
    assert endless_server.metric("completion_tokens_total") == before


def test_a_request_that_waits_ends_when_its_client_goes_away(endless_server: Served) -> None:
    before = endless_server.metric("waiting_seconds_sum")
    with endless_server.connected() as one, endless_server.connected() as two:
        for connection in (one, two):
            connection.sendall(raw_request(CHAT, ENDLESS))
        wait_until(lambda: endless_server.load() == (2, 0), "two answers are generated")
        with endless_server.connected() as waiting:
            waiting.sendall(raw_request(CHAT, ENDLESS))
            wait_until(lambda: endless_server.load() == (2, 1), "a request waits")
            waits = time.perf_counter()
            # The queue is full: the next one is told so before a response begins, also where it asked for a stream.
            for streams in (True, False):
                with endless_server.connected() as refused:
                    body = {**ENDLESS, "stream": streams}
                    refused.sendall(raw_request(CHAT, body, {"Connection": "close"}))
                    head, _, error = read_all(refused).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 429 ")
                assert b"retry-after: 1" in head
                assert json.loads(error)["error"]["code"] == "busy"
            waited = time.perf_counter() - waits
        wait_until(lambda: endless_server.load() == (2, 0), "the request no longer waits")
        wait_until(lambda: endless_server.metric("waiting_seconds_sum") >= before + waited, "its time is counted")
    wait_until(lambda: endless_server.load() == (0, 0), "all answers have ended")


def streamed(connection: socket.socket) -> str:
    """The body of a response that comes in chunks, read to its end."""
    with HTTPResponse(connection) as response:
        response.begin()
        return response.read().decode()


def test_a_slow_reader_delays_nobody_and_gets_the_whole_text(endless_server: Served, endless_bundle: Path) -> None:
    body = chat_body("tell me more", max_tokens=1000, temperature=0)
    with edgerun.load(endless_bundle, draft=None, cache=False) as engine:
        expected = engine.generate(body["messages"], max_tokens=1000, temperature=0).text
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(PATIENCE_S)
    with slow:
        slow.connect(("127.0.0.1", endless_server.port))
        answered = endless_server.metric("answers_total")
        slow.sendall(raw_request(CHAT, {**body, "stream": True}, {"Connection": "close"}))
        # The answer is finished although its client has read nothing of it.
        wait_until(lambda: endless_server.metric("answers_total") == answered + 1, "the answer is finished")
        assert endless_server.load() == (0, 0)
        text = streamed(slow)
    assert text.endswith("data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(each["delta"].get("content") or "" for event in events for each in event["choices"]) == expected


def test_a_client_that_never_reads_is_disconnected(tiny_bundle: Path) -> None:
    settings = ServerSettings(write_timeout_s=0.2)
    with served_here(tiny_bundle, settings, draft=None, cache=False) as server, server.connected() as deaf:
        # The answers to these requests are more than the buffers of the systems on both sides hold.
        request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"

        def is_closed() -> bool:
            try:
                deaf.sendall(request * 100)
            except TimeoutError:
                return False  # all buffers are full
            except OSError:
                return True
            return False

        deaf.settimeout(0.05)
        wait_until(is_closed, "the connection is closed")


def test_connections_that_send_nothing_or_too_slowly_are_closed(tiny_bundle: Path) -> None:
    # Longer than a busy machine lets this thread wait before it sends.
    settings = ServerSettings(header_timeout_s=3, body_timeout_s=3, keep_alive_s=3)
    requests = (
        b"",
        b"GET /health HTTP/1.1\r\nHost: local",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET",
        raw_request(CHAT, chat_body())[:-5],
    )
    with served_here(tiny_bundle, settings, draft=None, cache=False) as server, ExitStack() as stack:
        connections = []
        for sent in requests:
            connections.append(stack.enter_context(server.connected()))
            connections[-1].sendall(sent)
        responses = [read_all(connection) for connection in connections]
    for sent, response in zip(requests[:3], responses, strict=False):
        assert response.count(b"HTTP/1.1 200") == sent.count(b"localhost\r\n\r\n")
    assert responses[3].startswith(b"HTTP/1.1 408 ")
    assert b'"code":"timeout"' in responses[3]


def test_an_answer_that_takes_too_long_ends(endless_bundle: Path) -> None:
    settings = ServerSettings(request_timeout_s=1.5)
    with served_here(endless_bundle, settings, draft=None, cache=False) as server:
        # The time begins before the model is loaded, and a stream after that.
        wait_until(lambda: server.request("POST", CHAT, chat_body(max_tokens=1)).status == 200, "the model is loaded")
        with server.connected() as connection:
            connection.sendall(raw_request(CHAT, {**ENDLESS, "stream": True}, {"Connection": "close"}))
            response = streamed(connection)
        # An error in the middle of a stream is an event, and nothing claims that the answer is whole.
        last = response.rstrip().rpartition("\n\n")[2]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert "[DONE]" not in response
        with server.connected() as connection:
            connection.sendall(raw_request(CHAT, ENDLESS, {"Connection": "close"}))
            assert read_all(connection).startswith(b"HTTP/1.1 504 ")
        wait_until(lambda: server.load() == (0, 0), "the answers have ended")


def test_more_connections_than_allowed_are_refused(tiny_bundle: Path) -> None:
    with served_here(tiny_bundle, ServerSettings(max_requests=2), draft=None, cache=False) as server:
        with server.connected() as one, server.connected() as two:
            for connection in (one, two):
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 200 " in connection.recv(1000)
            with server.connected() as three:
                response = read_all(three)
            assert response.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in response
        wait_until(lambda: "ok" in server.get("/health"), "there is room again")
