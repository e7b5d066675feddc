"""Standard output: whole lines of many requests, clients that do not read, closed pipes, what libraries print."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from edgerun.edge.rpc.connection import encode_line
from edgerun.edge.rpc.line_transport import MAX_UNREAD_BYTES, LineWriter
from edgerun.runtime.scheduling.request_run import Cancellation
from support.rpc_client import LIMIT_S, RpcClient, rpc, rpc_process

ENDLESS = {"messages": [{"role": "user", "content": "a"}], "stream": True, "ignore_eos": True, "temperature": 0}
PRINTING = f"""
import os, sys, subprocess
from edgerun.edge.service import text_bodies
find = text_bodies.conversation
def noisy(*arguments):
    print("a library prints", flush=True)
    os.write(1, b"a library writes\\n")
    subprocess.run([{sys.executable!r}, "-c", "print('a program prints')"], check=True)
    return find(*arguments)
text_bodies.conversation = noisy
from edgerun.edge.cli.main import main
sys.exit(main())
"""


def test_a_line_contains_no_character_that_readers_take_for_its_end(client: RpcClient) -> None:
    text = "a\u2028b\u2029c\x85d\r\n\x0b\x0ce"
    tokens = client.call("tokenize", {"content": text})["tokens"]
    assert client.call("detokenize", {"tokens": tokens}) == {"content": text}
    line = encode_line({"text": text})
    assert json.loads(line) == {"text": text}
    assert line.decode().splitlines() == [line.decode()]


def test_what_libraries_print_goes_to_standard_error_and_unused_models_go(tiny_bundle: Path) -> None:
    with rpc(str(tiny_bundle), "--idle-unload", "0.05", command=(sys.executable, "-c", PRINTING, "rpc")) as client:
        client.call("tokenize", {"messages": [{"role": "user", "content": "a"}]})
        while client.call("status")["models"]:
            threading.Event().wait(0.01)
        code, log = client.end()
    assert code == 0
    assert log.splitlines() == ["a library prints", "a library writes", "a program prints"]


@pytest.mark.nightly
def test_a_client_that_does_not_read_stops_answers_and_not_requests(long_bundle: Path) -> None:
    with rpc_process(str(long_bundle)) as client:
        client.send("initialize", {"protocol_version": 1})
        # More than the pipe and the output's buffer hold.
        answers = [client.send("generate", ENDLESS) for _ in range(4)]
        status = client.send("status")
        # Requests are still read; this one ends an answer that waits for the client.
        client.tell("$/cancelRequest", {"id": answers[0]})
        client.read()
        assert client.result(status)["memory"]["process"] < 1 << 30
        assert client.failed(answers[0]).code == "cancelled"
        for answer in answers[1:]:
            assert client.result(answer)["usage"]["completion_tokens"] > 3000
        assert client.end() == (0, "")


def test_notifications_wait_for_the_reader_and_leave_room_for_responses() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing, lambda: None)
    sent: list[int] = []
    token = Cancellation()

    def notify() -> None:
        for number in range(40):
            writer.notify(b"n" * 100_000, token)
            sent.append(number)

    thread = threading.Thread(target=notify)
    thread.start()
    while len(sent) < 10:
        threading.Event().wait(0.001)
    writer.respond(b"r")
    token.cancel()
    thread.join(LIMIT_S)
    # The rest of the notifications was dropped: the pipe and the buffer were full.
    writer.end()
    writer.respond(b"last")
    closing = threading.Thread(target=writer.close, args=(LIMIT_S,))
    closing.start()
    with os.fdopen(reading, "rb") as file:
        lines = file.read().split(b"\n")
    closing.join(LIMIT_S)
    assert len(lines[0]) == 100_000
    assert lines[-3:] == [b"r", b"last", b""]
    assert 10 <= len(lines) - 3 <= MAX_UNREAD_BYTES // 100_000 + 1


def test_a_response_waits_when_nothing_is_read_at_all() -> None:
    reading, writing = os.pipe()
    writer = LineWriter(writing, lambda: None)
    thread = threading.Thread(target=lambda: [writer.respond(b"r" * MAX_UNREAD_BYTES) for _ in range(4)])
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    os.close(reading)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    writer.close(LIMIT_S)


@pytest.mark.parametrize("input_is_open", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_client_that_goes_away_leaves_no_process(long_bundle: Path, input_is_open: bool) -> None:
    with rpc_process(str(long_bundle)) as client:
        client.send("initialize", {"protocol_version": 1})
        for _ in range(3):
            client.send("generate", ENDLESS)
        if input_is_open:
            assert json.loads(client.output.readline())["id"] == 1
        else:
            client.input.close()
        client.output.close()
        assert client.process.wait(LIMIT_S) == 0
        assert client.process.stderr.read() == b""


def test_the_end_of_the_input_cancels_what_runs(long_bundle: Path) -> None:
    with rpc(str(long_bundle)) as client:
        answer = client.send("generate", ENDLESS)
        client.until_update(answer)
        assert client.end() == (0, "")
        last = client.messages[-1]
        assert (last["id"], last["error"]["code"]) == (answer, -32000)
