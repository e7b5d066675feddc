"""MCP servers of the app: their tools, their ends, the list of them, and lists of other programs."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("mcp", reason="needs the mcp extra")

from edgerun.edge.tools.tool_servers import ToolServers
from edgerun.edge.tools.tool_settings import FILE_NAME, ServerFields, read_configuration
from edgerun.errors import CancelledError, InputError, UnknownIdError
from edgerun.runtime.scheduling.request_run import Cancellation
from support.waiting import wait_until

WEATHER_SERVER = str(Path(__file__).resolve().parents[2] / "support" / "weather_server.py")
SLOW_SERVER = """
import time, sys
from mcp.server.mcpserver import MCPServer
server = MCPServer("slow")
@server.tool()
def get_weather(seconds: int) -> str:
    open(sys.argv[1], "w").close()
    time.sleep(seconds)
    return "late"
server.run("stdio")
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[ToolServers]:
    opened = ToolServers(tmp_path, start_s=30.0)
    yield opened
    opened.close()
    assert processes(tmp_path) == []


def processes(folder: Path) -> list[psutil.Process]:
    """The processes of servers in `folder`; one that ends at this moment has no command line any more."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # also that of a zombie
            if str(folder) in " ".join(each.cmdline()):
                found.append(each)
    return found


def weather(folder: Path, **fields: Any) -> tuple[str, ServerFields]:
    arguments = [WEATHER_SERVER, str(folder / "calls.txt")]
    return "weather", ServerFields(command=sys.executable, arguments=arguments, **fields)


def described(servers: ToolServers, name: str) -> dict[str, Any]:
    return next(each for each in servers.list()["servers"] if each["name"] == name)


def test_names_that_differ_in_a_replaced_character_are_told_apart(servers: ToolServers, tmp_path: Path) -> None:
    for name, tools in {"a": ("b.c", "b_c", "b c", "d"), "x": ("a_b_c", "a_b_c_", "d")}.items():
        made = [f'@server.tool(name="{tool}")\ndef get() -> str: return "{name}/{tool}"' for tool in tools]
        code = "\n".join([*SLOW_SERVER.partition("@")[0].splitlines(), *made, 'server.run("stdio")', "# at {}"])
        servers.save(name, ServerFields(command=sys.executable, arguments=["-c", code, str(tmp_path)]))
    ids = ["a/b.c", "a/b_c", "a/b c", "a/d", "x/a_b_c", "x/a_b_c_", "x/d"]
    offered = servers.offered(ids, Cancellation())
    assert [tool.id for tool in offered.values()] == ids
    assert all(re.fullmatch(r"[\w-]+", name) for name in offered)
    assert [servers.call(tool, {}, Cancellation())[0] for tool in offered.values()] == ids


def test_tools_of_two_servers_with_one_name_are_told_apart(servers: ToolServers, tmp_path: Path) -> None:
    servers.save(*weather(tmp_path))
    marker = tmp_path / "called"
    servers.save("slow", ServerFields(command=sys.executable, arguments=["-c", SLOW_SERVER, str(marker)]))
    offered = servers.offered(["weather/get_weather", "slow/get_weather", "weather/storm", "x/y"], Cancellation())
    assert [*offered] == ["weather_get_weather", "slow_get_weather", "storm"]
    tool = offered["weather_get_weather"]
    assert tool.definition("x")["function"]["description"] == "The weather in a city."
    assert tool.problem({}) == "the arguments: city is missing"
    assert servers.call(tool, {"city": "Oslo"}, Cancellation()) == ("Oslo: sunny", False)
    text, failed = servers.call(offered["storm"], {}, Cancellation())
    assert (failed, text.startswith("error: ")) == (True, True)

    cancellation = Cancellation()

    def cancel() -> None:
        wait_until(marker.exists)
        cancellation.cancel()

    threading.Thread(target=cancel).start()
    with pytest.raises(CancelledError):
        servers.call(offered["slow_get_weather"], {"seconds": 600}, cancellation)


def test_a_server_that_dies_is_noticed_and_can_be_started_again(servers: ToolServers, tmp_path: Path) -> None:
    servers.save(*weather(tmp_path))
    (tool,) = servers.offered(["weather/get_weather"], Cancellation()).values()
    for process in processes(tmp_path):
        process.kill()
    assert servers.call(tool, {"city": "Oslo"}, Cancellation()) == ("error: the server has ended", True)
    wait_until(lambda: described(servers, "weather")["state"] == "failed")
    assert described(servers, "weather")["error"] == "the server has ended; start it again"
    assert servers.call(tool, {}, Cancellation()) == ("error: the server weather does not run", True)
    assert servers.offered(["weather/get_weather"], Cancellation()) == {}
    servers.save(*weather(tmp_path))
    assert len(servers.offered(["weather/get_weather"], Cancellation())) == 1


def test_a_server_that_is_turned_off_ends(servers: ToolServers, tmp_path: Path) -> None:
    servers.save(*weather(tmp_path))
    assert servers.offered(["weather/storm"], Cancellation())
    assert processes(tmp_path)
    servers.save(*weather(tmp_path, enabled=False))
    wait_until(lambda: not processes(tmp_path))
    assert servers.offered(["weather/storm"], Cancellation()) == {}
    assert described(servers, "weather")["state"] == "off"
    assert servers.remove("weather")["servers"] == []
    with pytest.raises(UnknownIdError, match="there is no server 'weather'"):
        servers.remove("weather")


def test_waiting_for_a_server_has_an_end() -> None:
    servers = ToolServers(start_s=0.2)
    silent = ServerFields(command=sys.executable, arguments=["-c", "import sys; sys.stdin.read()"])
    servers.save("silent", silent)
    assert servers.offered(["silent/x"], Cancellation()) == {}
    assert described(servers, "silent")["error"] == (
        f"{sys.executable} has not answered within 0.2 seconds; is it an MCP server that speaks over stdio?"
    )
    servers.close()
    patient = ToolServers(start_s=600.0)
    patient.save("silent", silent)
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(CancelledError):
        patient.offered(["silent/x"], cancellation)
    patient.close()


def test_a_list_that_cannot_be_read_is_kept_and_the_number_of_servers_is_limited(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{", encoding="utf-8")
    servers = ToolServers(tmp_path)
    listed = servers.list()
    assert listed["servers"] == []
    assert "tools.json cannot be read: " in listed["problem"]
    assert servers.save("off", ServerFields(command="x", enabled=False))["problem"] is None
    assert (tmp_path / f"{FILE_NAME}.unreadable").read_text(encoding="utf-8") == "{"
    assert [each["name"] for each in ToolServers(tmp_path).list()["servers"]] == ["off"]
    for number in range(31):
        servers.save(f"s{number}", ServerFields(command="x", enabled=False))
    with pytest.raises(InputError, match="there are 32 servers already; remove one first"):
        servers.save("more", ServerFields(command="x"))


NOT_STREAMABLE = "its type is the string 'sse'; servers are programs (stdio), or"
EMPTY = "the command is empty; name the program that is the server, or give a URL"
TIME: dict[str, Any] = {"command": "uvx", "args": ["mcp-server-time", "--zone=Europe/Berlin"], "env": {"KEY": "a=b"}}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"mcpServers": {"time": TIME}}),
        json.dumps({"servers": {"time": {"type": "stdio", **TIME}}, "inputs": []}),
        json.dumps({"mcp": {"servers": {"time": TIME}}}),
        json.dumps({"time": TIME}, indent=2),
        f'  "time": {json.dumps(TIME)},\n',
        f'"mcpServers": {{"time": {json.dumps(TIME)}}}',
    ],
)
def test_every_form_gives_the_same_server(text: str) -> None:
    assert read_configuration(text) == [
        {
            "name": "time",
            "command": "uvx",
            "arguments": ["mcp-server-time", "--zone=Europe/Berlin"],
            "environment": {"KEY": "a=b"},
            "url": "",
            "headers": {},
            "enabled": True,
            "ignored": [],
            "problem": None,
        }
    ]


@pytest.mark.parametrize("name", ["url", "serverUrl", "httpUrl"])
def test_a_server_may_have_an_address(name: str) -> None:
    fields = {"type": "http", name: "https://example.org/mcp", "headers": {"Authorization": "Bearer key"}}
    (server,) = read_configuration(json.dumps({"mcpServers": {"far": fields}}))
    assert (server["url"], server["headers"]) == ("https://example.org/mcp", {"Authorization": "Bearer key"})
    assert (server["command"], server["ignored"], server["problem"]) == ("", [], None)
    (server,) = read_configuration(json.dumps({"mcpServers": {name: fields}}))
    assert (server["name"], server["problem"]) == (name, None)


def test_servers_may_have_the_names_of_lists_and_what_is_not_taken_over_is_named() -> None:
    servers = read_configuration(json.dumps({"mcp": TIME, "command": TIME}))
    assert [(each["name"], each["problem"]) for each in servers] == [("mcp", None), ("command", None)]
    fields = {**TIME, "disabled": True, "autoApprove": ["now"], "cwd": "/"}
    (server,) = read_configuration(json.dumps({"mcpServers": {"time": fields}}))
    assert (server["enabled"], server["ignored"], server["problem"]) == (False, ["autoApprove", "cwd"], None)


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        ("far", {"type": "sse", "url": "https://example.org/sse"}, NOT_STREAMABLE),
        (
            "far",
            {"url": "example.org/mcp"},
            "the URL is 'example.org/mcp'; write one such as http://127.0.0.1:8000/mcp",
        ),
        ("far", {"url": "file:///etc/passwd"}, "the URL is 'file:///etc/passwd'"),
        ("far", {"url": "http://[::1/mcp"}, "the URL is 'http://[::1/mcp'"),
        ("far", {"url": "http://x:port/"}, "the URL is 'http://x:port/'"),
        ("far", {"url": "http://x", "command": "y"}, "there are a command and a URL; name"),
        ("far", {"url": "http://x", "headers": {"A": "${KEY}"}}, "it has the placeholder ${KEY}; write"),
        ("far", {"url": "http://x", "headers": {"A": 1}}, "headers.A is the integer 1; it must be a string"),
        ("a b", TIME, "the name is 'a b'; use 1 to 40 letters, digits, - and _"),
        ("time", {"args": []}, EMPTY),
        ("time", "uvx", EMPTY),
        ("time", {"command": " "}, EMPTY),
        ("time", {**TIME, "args": "one two"}, "args is the string 'one two'; it must be an array"),
        ("time", {**TIME, "env": {"PORT": 80}}, "env.PORT is the integer 80; it must be a string"),
        ("time", {**TIME, "env": {"A=B": ""}}, "'A=B' cannot be the name of a variable; write NAME=value"),
        ("time", {**TIME, "args": ["${input:key}"]}, "it has the placeholder ${input:key}; write the value itself"),
    ],
)
def test_a_server_that_cannot_be_added_says_why(name: str, fields: object, problem: str) -> None:
    (server,) = read_configuration(json.dumps({"mcpServers": {name: fields}}))
    assert server["name"] == name
    assert str(server["problem"]).startswith(problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is not JSON"),
        ('{"mcpServers": {"time": {"command": "uvx",}}}', r"this is not JSON: .* line 1 column \d+"),
        ("[" * 100_000, "this is not JSON"),
        ("[]", "there are no servers in it"),
        ('{"mcpServers": {}}', "there are no servers in it"),
        (json.dumps(TIME), "the server has no name"),
        ('{"url": "https://example.org/mcp"}', "the server has no name"),
    ],
)
def test_a_text_without_servers_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_configuration(text)
