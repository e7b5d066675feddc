"""The command `edge-run serve`: its options, its address, its end, and prefixes that it keeps."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import edgerun
from support.commands import Capture, fails
from support.processes import EDGE_RUN, started
from support.serving import CHAT, PATIENCE_S, Served, chat_body, raw_request, read_all, served
from support.waiting import wait_until

ENDLESS = chat_body("go on", max_tokens=29_000)
needs_signals = pytest.mark.skipif(os.name == "nt", reason="sends signals of POSIX systems")


@pytest.mark.skipif(os.name == "nt", reason="runs a line of a POSIX shell")
def test_the_printed_curl_line_works(tmp_path: Path) -> None:
    key = tmp_path / "the key"
    key.write_text("secret\n", encoding="utf-8")
    with served([], "--api-key-file", str(key)) as server:
        assert re.fullmatch(
            r"edge-run: serving shell-helper\b.* at http://127\.0\.0\.1:\d+/v1 \(Ctrl-C ends it\)", server.lines[0]
        )
        command = server.lines[1].removeprefix("edge-run: try: ")
        done = subprocess.run(["sh", "-c", command], capture_output=True, check=True)
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
        assert server.request("POST", CHAT, chat_body()).status == 401
        assert "secret" not in "".join(server.lines)


def test_the_key_comes_from_the_environment(tiny_bundle: Path) -> None:
    with served([tiny_bundle], "--draft", "none", EDGERUN_API_KEY="secret") as server:
        assert server.request("GET", "/v1/models").status == 401
        assert "$EDGERUN_API_KEY" in server.lines[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached from other machines; set an API key"),  # noqa: S104
        (["--api-key", "a", "--api-key-file", "b"], "--api-key and --api-key-file are both given"),
        (["--api-key-file", "missing"], "missing cannot be read"),
        (["--max-body", "32"], "--max-body is '32'; write a number and a unit"),
        (["--host", "no.such.host.invalid", "--api-key", "k"], "there is no address no.such.host.invalid"),
        (["no-such-model"], "no-such-model"),
        (["--device", "toaster"], "toaster"),
    ],
)
def test_bad_options_are_one_line(options: list[str], message: str, capsys: Capture) -> None:
    assert message in fails(capsys, "serve", "--offline", *options)


def test_a_port_in_use_is_an_error(tiny_bundle: Path, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        error = fails(capsys, "serve", tiny_bundle, "--port", port)
    assert f"port {port} of 127.0.0.1 is in use; end what uses it, or give another --port" in error


@needs_signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_answers_end(endless_bundle: Path, number: signal.Signals) -> None:
    with served([endless_bundle], "--draft", "none", "--drain", "100") as server:
        with server.connected() as running:
            # The answer takes longer than what is asked of the server meanwhile.
            body = chat_body("go on", max_tokens=1500, stream=True)
            running.sendall(raw_request(CHAT, body, {"Connection": "close"}))
            wait_until(lambda: server.load() == (1, 0), "the answer is generated")
            server.process.send_signal(number)
            wait_until(lambda: refuses(server), "further requests are refused")
            assert read_all(running).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.process.wait(PATIENCE_S) == 0
        assert len(server.lines) == 2, server.lines


def refuses(server: Served) -> bool:
    response = server.request("POST", CHAT, chat_body(max_tokens=1))
    if response.status == 200:
        return False
    assert response.status == 503
    assert response.headers["Retry-After"]
    assert response.json()["error"]["code"] == "shutting_down"
    return True


@needs_signals
def test_answers_that_take_too_long_are_cut_off_at_the_end(endless_bundle: Path) -> None:
    with served([endless_bundle], "--draft", "none", "--drain", "0.2") as server:
        with server.connected() as running:
            running.sendall(raw_request(CHAT, {**ENDLESS, "stream": True}, {"Connection": "close"}))
            wait_until(lambda: server.load() == (1, 0), "the answer is generated")
            server.process.send_signal(signal.SIGTERM)
            response = read_all(running)
        assert b'"code":"shutting_down"' in response
        assert b"[DONE]" not in response
        assert server.process.wait(PATIENCE_S) == 0


@needs_signals
def test_a_second_signal_ends_the_server_at_once(endless_bundle: Path) -> None:
    with served([endless_bundle], "--draft", "none", "--drain", "1000") as server:
        with server.connected() as running:
            running.sendall(raw_request(CHAT, ENDLESS))
            wait_until(lambda: server.load() == (1, 0), "the answer is generated")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: refuses(server), "the server drains")

            def ended() -> bool:
                server.process.send_signal(signal.SIGTERM)
                return server.process.poll() is not None

            wait_until(ended, "the server has ended")
        assert server.process.returncode == 128 + signal.SIGTERM


@needs_signals
def test_a_signal_while_the_model_loads_ends_the_command(endless_bundle: Path) -> None:
    with started([*EDGE_RUN, "serve", str(endless_bundle), "--port", "0"], stderr=subprocess.PIPE) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in {-signal.SIGTERM, 0}


SYSTEM = "the other and the one who is at the end of it, and on to " * 4
EXAMPLES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "and one of the others is on to it " * 4},
    {"role": "assistant", "content": "there"},
]


def asked(server: Served, text: str, **fields: Any) -> tuple[str, int]:
    """The text of an answer to a request that begins with the system message, and its cached tokens."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    reply = server.post(CHAT, chat_body(max_tokens=8, temperature=0) | {"messages": messages} | fields)
    return reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_requests_continue_from_a_prefix_after_a_restart_too(tiny_bundle: Path, tmp_path: Path) -> None:
    document, body, long = (tmp_path / name for name in ("instructions.txt", "request.json", "long.txt"))
    document.write_text(SYSTEM, encoding="utf-8")
    body.write_text(json.dumps({"messages": EXAMPLES, "temperature": 0.5}), encoding="utf-8")
    long.write_text(SYSTEM * 20, encoding="utf-8")
    with edgerun.load(tiny_bundle, threads=1, draft=None, cache=False, prefix_cache=0) as engine:
        questions = ("in the", "there")
        expected = [engine.generate(each, system=SYSTEM, max_tokens=8, temperature=0).text for each in questions]

    def kept() -> list[Path]:
        return sorted((tmp_path / "cache" / "prefixes").glob("*/*.kv"))

    options = ["--draft", "none", "--threads", "1", "--prefix", str(document), "--prefix", str(body)]
    environment = {"EDGERUN_CACHE": str(tmp_path / "cache")}
    with served([tiny_bundle], *options, **environment) as server:
        assert server.lines[0].startswith("edge-run: serving"), "nothing was wrong with the files"
        assert len(kept()) == 2, "they are read before the first request"
        text, cached = asked(server, "in the")
        assert text == expected[0]
        assert cached >= 64
        assert asked(server, "", messages=[*EXAMPLES, {"role": "user", "content": "in the"}])[1] >= 64
    written = [file.stat().st_ino for file in kept()]
    with served([tiny_bundle], *options, "--prefix", str(long), **environment) as server:
        assert "long.txt is not read in advance by bundle: " in server.lines[0], "it costs a line, and no request"
        text, cached = asked(server, "there")
        assert text == expected[1]
        assert cached >= 64
    assert [file.stat().st_ino for file in kept()] == written, "they are not written again"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "  ", "a.txt is empty; give a text file with a system message, or a .json file with the body"),
        ("a.json", "[]", "a.json is not the body of a chat completion: "),
        ("a.json", '{"message": []}', "a.json is not the body of a chat completion: unknown field message"),
        ("a.json", '{"messages": []}', "a.json is not the body of a chat completion: there are no messages"),
        ("missing", None, "missing cannot be read"),
    ],
)
def test_a_file_without_a_prefix_is_refused(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert message in fails(capsys, "serve", tiny_bundle, "--port", "0", "--prefix", tmp_path / name)
