"""MCP servers in the JSON of other programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from edgerun.edge.app.tools.tool_settings import read_configuration
from edgerun.errors import InputError

OVER_HTTP = "it is reached over HTTP; only servers that are programs can be added"
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
            "enabled": True,
            "ignored": [],
            "problem": None,
        }
    ]


def test_servers_may_have_the_names_of_lists() -> None:
    servers = read_configuration(json.dumps({"mcp": TIME, "command": TIME}))
    assert [(each["name"], each["problem"]) for each in servers] == [("mcp", None), ("command", None)]


def test_what_is_not_taken_over_is_named() -> None:
    fields = {**TIME, "disabled": True, "autoApprove": ["now"], "cwd": "/"}
    (server,) = read_configuration(json.dumps({"mcpServers": {"time": fields}}))
    assert (server["enabled"], server["ignored"], server["problem"]) == (False, ["autoApprove", "cwd"], None)


@pytest.mark.parametrize(
    ("name", "fields", "problem"),
    [
        (
            "far",
            {"url": "https://example.org/mcp"},
            OVER_HTTP,
        ),
        (
            "far",
            {"type": "sse", "command": "x"},
            OVER_HTTP,
        ),
        ("a b", TIME, "the name is 'a b'; use 1 to 40 letters, digits, - and _"),
        ("time", {"args": []}, "command is missing"),
        ("time", "uvx", "command is missing"),
        ("time", {"command": " "}, "the command is empty; name the program that is the server"),
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
    ],
)
def test_a_text_without_servers_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_configuration(text)
