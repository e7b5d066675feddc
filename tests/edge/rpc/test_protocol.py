"""Messages that fit the protocol and those that do not: one clear error each, and nothing else disturbed."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun.edge.cli.main import main
from edgerun.edge.rpc.protocol import NOTIFICATIONS, NUMBERS, ProtocolCode
from edgerun.edge.rpc.stdio_service import CLIENT_NOTIFICATIONS, METHODS
from edgerun.edge.service.request_error import ErrorCode
from support.nightly import some_nightly
from support.rpc_client import LIMIT_S, SCHEMA, RpcClient, rpc, rpc_process, validator

ROOT = Path(__file__).resolve().parents[3]
USER = [{"role": "user", "content": "ab"}]
BAD_LINES = {
    "invalid_json": {
        b'{"jsonrpc": "2.0", "id": 1, "method"': "the line is not valid JSON",
        b"hello": "the line is not valid JSON",
        b'{"jsonrpc": "2.0", "id": NaN, "method": "status"}': "the line is not valid JSON",
        b'{"jsonrpc": "2.0", "id": "\xff", "method": "status"}': "the line is not UTF-8",
        b'{"jsonrpc": "2.0", "id": 1, "method": "tokenize", "params": {"content": "\xe9"}}': "the line is not UTF-8",
        b'{"jsonrpc": "2.0", "id": 1, "method": "status", "i\\u0064" : "{"}': "a member of the message occurs twice",
        b"[" * 100_000: "nested",
        b"[" * 100_000 + b"]" * 100_000: "nested",
        b'{"jsonrpc": "2.0", "id": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested",
    },
    "invalid_message": {
        b"17": "the line is the integer 17",
        b"null": "the line is null",
        b'"status"': "the line is the string 'status'",
        b'[{"jsonrpc": "2.0", "id": 1, "method": "status"}]': "the line is a batch",
        b"[]": "the line is a batch",
        b"1e400": "the line is the number inf",
        b'{"method": "x"}': "jsonrpc is missing",
        **{
            b'{"jsonrpc": "2.0", "id": ' + id_ + b', "method": "status"}': f"id {message}"
            for id_, message in {
                b"null": "is null",
                b"true": "is the boolean true",
                b"1.5": "is the number 1.5",
                b"12345678901234567890": "is 12345678901234567890",
                b'"' + b"x" * 201 + b'"': "has 201 characters",
                b"1e400": "is the number inf",
                b"9" * 5000: "is the number inf",
            }.items()
        },
    },
}
"""Lines whose id cannot be read, by the code of the error, with its message."""

VALID = [
    b'{"jsonrpc": "2.0", "id": "ID", "method": "tokenize", "params": {"content": "a b"}}',
    b'{"jsonrpc": "2.0", "id": "ID", "method": "detokenize", "params": {"tokens": [5, 6, 7]}}',
    b'{"jsonrpc": "2.0", "id": "ID", "method": "session/close", "params": {"session_id": "x"}}',
    b'{"jsonrpc": "2.0", "method": "$/cancelRequest", "params": {"id": "none"}}',
]
PIECES = [b"", b'"', *(b"{ } [1] , : null 1e999 - \\u \0".split(b" ")), b" ", b"\xff", b"\xed\xa0\x80"]
"""Texts that damage a line."""


@pytest.mark.parametrize("code", BAD_LINES)
def test_a_line_that_cannot_be_a_request_gets_one_error(client: RpcClient, code: str) -> None:
    for line, message in BAD_LINES[code].items():
        client.write(line)
        error = client.error()
        assert error.code == code, line[:200]
        assert message in str(error)
        assert error.hint
        assert client.call("models/list")["models"][0]["loaded"]


FORMS: list[tuple[dict[str, Any], str, str | None, str]] = [
    ({"jsonrpc": "1.0", "method": "status"}, "invalid_message", "jsonrpc", "jsonrpc is the string '1.0'"),
    ({"jsonrpc": "2.0"}, "invalid_message", "method", "method is missing"),
    ({"jsonrpc": math.inf, "method": "status"}, "invalid_message", "jsonrpc", "jsonrpc is the number inf"),
    ({"jsonrpc": "2.0", "method": math.inf}, "invalid_message", "method", "method is the number inf"),
    ({"jsonrpc": "2.0", "method": "status", "params": math.inf}, "invalid_type", "params", "params is the number inf"),
    ({"jsonrpc": "2.0", "method": 5}, "invalid_message", "method", "method is the integer 5"),
    ({"jsonrpc": "2.0", "result": {}}, "invalid_message", "result", "unknown member 'result'"),
    ({"jsonrpc": "2.0", "method": "status", "x": 1}, "invalid_message", "x", "unknown member 'x'"),
    ({"jsonrpc": "2.0", "method": "chat"}, "method_not_found", "method", "there is no method 'chat'"),
    ({"jsonrpc": "2.0", "method": "status", "params": []}, "invalid_type", "params", "params is the array"),
    ({"jsonrpc": "2.0", "method": "status", "params": None}, "invalid_type", "params", "params is null"),
    ({"jsonrpc": "2.0", "method": "initialize"}, "invalid_message", None, "initialize was sent before"),
]
"""Messages of another form than a request, with the code, the parameter and the message of the error."""
PARAMETERS: list[tuple[str, dict[str, Any], str, str | None, str]] = [
    ("status", {"x": 1}, "unknown_parameter", "x", "unknown field x"),
    ("models/load", {"model": 5}, "invalid_type", "model", "model is the integer 5"),
    ("models/load", {"model": "x"}, "model_not_found", "model", "there is no model 'x'"),
    ("models/pull", {"id": "x"}, "invalid_request", None, "'x' is not an id of a model"),
    ("models/pull", {}, "missing_required_parameter", "id", "id is missing"),
    ("generate", {"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content", "content"),
    ("generate", {"messages": USER, "num_ctx": 4097}, "unsupported_parameter", "num_ctx", "num_ctx is 4097"),
    ("generate", {"messages": USER, "model": "gpt"}, "model_not_found", "model", "there is no model 'gpt'"),
    ("generate", {"messages": [{"role": "user", "content": "a, " * 3000}]}, "context_length_exceeded", None, "4096"),
    ("detokenize", {"tokens": [1, 300]}, "invalid_value", "tokens[1]", "tokens[1] is 300"),
    ("session/prompt", {"session_id": "x"}, "missing_required_parameter", "prompt", "prompt is missing"),
    ("session/close", {"session_id": "x"}, "session_not_found", "session_id", "there is no session 'x'"),
    ("session/restore", {"path": "/none/x.session"}, "invalid_request", None, "cannot be read"),
]
"""Wrong parameters of methods, and the same of the error."""


@pytest.mark.parametrize(
    ("message", "code", "param", "text"),
    [*FORMS, *(({"jsonrpc": "2.0", "method": name, "params": given}, *error) for name, given, *error in PARAMETERS)],
)
def test_a_wrong_request_gets_its_id_back_and_what_is_wrong_is_named(
    client: RpcClient, message: dict[str, Any], code: str, param: str | None, text: str
) -> None:
    client.write(json.dumps({"id": "bad", **message}).replace("Infinity", "1e400").encode())
    error = client.failed("bad")
    assert (error.code, error.param) == (code, param)
    assert text in str(error)


@pytest.mark.parametrize("seed", some_nightly(range(20), 20))
def test_damaged_lines_get_one_answer_at_most_and_disturb_nothing(client: RpcClient, seed: int) -> None:
    choice = random.Random(seed)
    before, lines = len(client.messages), 150
    for number in range(lines):
        line = bytearray(choice.choice(VALID).replace(b"ID", b"%08x" % choice.getrandbits(32)))
        for _ in range(choice.randint(1, 4)):
            place = choice.randrange(len(line))
            line[place : place + choice.randint(0, 3)] = choice.choice(PIECES)
        client.write(bytes(line))
        client.call("models/list")
        client.forget_responses()
        answers = len([each for each in client.messages[before:] if "method" not in each]) - number - 1
        assert answers <= number + 1, bytes(line)
    assert answers > lines // 3
    assert client.text(max_tokens=1)


def test_a_key_that_occurs_twice_is_refused(client: RpcClient) -> None:
    client.write(b'{"jsonrpc": "2.0", "id": "bad", "method": "tokenize", "params": {"content": "a", "content": "b"}}')
    assert "the key 'content' occurs twice" in str(client.failed("bad"))
    # Names inside of a member may be the names of the message's own members.
    parameters = rb'{"content": "\"id\": {[", "id": {"id": 1, "method": "id"}}'
    client.write(b'{"jsonrpc": "2.0", "params": ' + parameters + b', "id": "own", "method": "tokenize"}')
    assert "unknown field id" in str(client.failed("own"))


def test_the_id_of_a_running_request_is_refused_and_the_request_goes_on(client: RpcClient) -> None:
    id_ = client.send("generate", {"messages": USER, "stream": True, "ignore_eos": True, "temperature": 0})
    client.until_update(id_)
    client.send("status", id_=id_)
    error = client.error()
    assert (error.number, error.code, error.param) == (-32003, "duplicate_id", "id")
    client.tell("$/cancelRequest", {"id": id_})
    assert client.failed(id_).code == "cancelled"
    client.send("models/list", id_=id_)
    assert client.result(id_)


def test_ten_megabytes_on_a_line_are_read_and_more_than_the_limit_is_skipped(tiny_bundle: Path) -> None:
    def request(id_: str, size: int) -> bytes:
        start = json.dumps({"jsonrpc": "2.0", "id": id_, "method": "models/load", "params": {"model": "?"}}).encode()
        return start.replace(b"?", b"x" * size)

    with rpc(str(tiny_bundle)) as client:
        client.write(request("large", 10_000_000))
        error = client.failed("large")
        assert "there is no model 'xxx" in str(error)
        assert len(str(error)) < 1000
        client.write(request("too large", 16 << 20))
        assert (error := client.error()).code == "line_too_long"
        assert error.number == -32002
        # Also where the line does not end, and where what follows it comes in the same piece.
        client.write(b"x" * (20 << 20) + b"\n" + request("after", 3))
        assert client.error().code == "line_too_long"
        assert "there is no model 'xxx'" in str(client.failed("after"))
        memory = client.call("status")["memory"]["process"]
        client.write(b"y" * (40 << 20))
        assert client.error().code == "line_too_long"
        assert client.call("status")["memory"]["process"] - memory < 30 << 20
        assert client.end() == (0, "")


def test_requests_come_after_initialize(tiny_bundle: Path) -> None:
    with rpc_process(str(tiny_bundle)) as client:
        client.read()
        error = client.refused("status")
        assert (error.number, error.code) == (-32001, "not_initialized")
        assert "status comes before initialize" in str(error)
        client.write(b'{"jsonrpc": "2.0", "id": "x", "method": "initialize", "params": {"protocol_version": 0}}')
        assert "protocol_version is the integer 0" in str(client.failed("x"))
        begun = client.initialize()
        assert begun["protocol_version"] == 1
        assert begun["server_info"] == {"name": "edge-run", "version": edgerun.__version__}
        assert begun["capabilities"]["methods"] == list(METHODS)
        assert begun["limits"]["max_line_bytes"] == 16 << 20
        # The last line may lack its end.
        client.input.write(b'{"jsonrpc": "2.0", "id": "last", "method": "shutdown"}')
        assert client.end() == (0, "")
        assert client.messages[-1]["id"] == "last"


def test_notifications_are_not_answered_and_shutdown_is(tiny_bundle: Path) -> None:
    with rpc(str(tiny_bundle)) as client:
        for line in (
            {"method": "generate", "params": {"messages": USER}},
            {"method": "$/cancelRequest", "params": {"id": "none"}},
            {"method": "session/cancel", "params": {"session_id": "none"}},
            {"method": "$/cancelRequest", "params": {}},
        ):
            client.write(json.dumps({"jsonrpc": "2.0", **line}).encode())
        client.write(b"\n  \r")
        assert client.call("shutdown") == {}
        assert client.process.wait(LIMIT_S) == 0
        code, log = client.end()
        assert [message["id"] for message in client.messages] == [1, 2]
        assert code == 0
        assert log.splitlines() == [
            "edge-run: warning: the notification 'generate' was ignored; notifications are $/cancelRequest, "
            "session/cancel; a request has an id",
            "edge-run: warning: the notification session/cancel was ignored: there is no session 'none'; open one with "
            "session/new or session/restore",
            "edge-run: warning: the notification $/cancelRequest was ignored: id is missing; the field is required",
        ]


def test_answers_and_tokens_of_one_process_equal_those_of_the_library(client: RpcClient, long_bundle: Path) -> None:
    with edgerun.load(long_bundle) as engine:
        expected = engine.generate(USER, max_tokens=24, temperature=0)
        tokens = engine.tokenizer.encode("the and of", add_special_tokens=False)
        chat = engine.encode_chat(USER)
    id_ = client.send("generate", {"messages": USER, "max_tokens": 24, "temperature": 0, "stream": True})
    result = client.result(id_)
    assert result["choices"][0]["message"]["content"] == expected.text
    assert result["usage"]["completion_tokens"] == 24
    pieces = [
        choice["delta"].get("content", "")
        for message in client.messages
        if message.get("method") == "generate/update" and message["params"]["request_id"] == id_
        for choice in message["params"]["chunk"]["choices"]
    ]
    assert "".join(pieces) == expected.text
    assert len(pieces) > 4
    found = client.call("tokenize", {"content": "the and of"})
    assert found == {"tokens": tokens, "count": len(tokens), "context": 4096}
    assert client.call("detokenize", {"tokens": tokens}) == {"content": "the and of"}
    assert client.call("tokenize", {"messages": USER})["tokens"] == chat
    assert "".join(client.call("tokenize", {"prompt": "the and", "with_pieces": True})["pieces"]) == "the and"


def test_status_tells_memory_devices_and_power(client: RpcClient) -> None:
    status = client.call("status")
    assert status["models"][0]["loaded"]
    assert (status["models"][0]["active"], status["models"][0]["waiting"]) == (0, 0)
    assert status["requests"] == {"running": 1, "sessions": 0}
    assert 0 < status["memory"]["process"] < status["memory"]["total"]
    assert status["devices"][0]["kind"] == "cpu"
    assert status["power"]["mode"] == ("saver" if status["power"]["on_battery"] else "performance")


def test_the_published_schema_is_that_of_the_types(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rpc", "--schema"]) == 0
    assert SCHEMA.read_text(encoding="utf-8") == capsys.readouterr().out
    for name in ("ClientMessage", "ServerMessage"):
        validator(name).check_schema(json.loads(SCHEMA.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "id": 1, "method": "status", "params": {"x": 1}},
        {"jsonrpc": "2.0", "id": 1.5, "method": "status"},
        {"jsonrpc": "2.0", "id": 1, "method": "stat"},
        {"jsonrpc": "2.0", "id": 1, "method": "session/close"},
        {"jsonrpc": "2.0", "method": "status"},
        {"jsonrpc": "2.0", "id": 1, "method": "generate", "params": {"messages": USER, "x": 1}},
    ],
)
def test_the_schema_refuses_what_the_process_refuses(message: dict[str, Any]) -> None:
    assert not validator("ClientMessage").is_valid(message)


def test_the_guide_names_every_method_and_error() -> None:
    guide = (ROOT / "docs" / "rpc.md").read_text(encoding="utf-8")
    for name in (*METHODS, *CLIENT_NOTIFICATIONS, *NOTIFICATIONS):
        assert f"`{name}`" in guide, name
    rows = dict(re.findall(r"^\| (-\d+) \| (.*?) \|", guide, re.MULTILINE))
    listed = {code: int(number) for number, codes in rows.items() for code in re.findall(r"`(\w+)`", codes)}
    assert listed == {code.value: number for code, number in NUMBERS.items()}
    assert set(NUMBERS) == {*ErrorCode, *ProtocolCode}
