"""Anthropic's client for Python against a server, and requests that its API refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

import edgerun
from edgerun.edge.server.protocols.anthropic import MessagesBody
from edgerun.edge.service.generation_fields import GenerationRequest
from support.scripted_model import WEATHER, write_calling_bundle
from support.serving import Served, asked, served

QUESTION: Any = {"role": "user", "content": "Weather in Paris and Rome?"}
FUNCTION = WEATHER["function"]
TOOL: Any = {
    "name": FUNCTION["name"],
    "description": FUNCTION.get("description", ""),
    "input_schema": FUNCTION["parameters"],
}
KEY = "secret"
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_bundle(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with served([model], "--threads", "1", EDGERUN_API_KEY=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    import anthropic  # most processes of a run do not use it, and its import takes a second

    with anthropic.Anthropic(base_url=server.base, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[edgerun.Engine]:
    with edgerun.load(model) as engine:
        yield engine


def content(reply: edgerun.Reply) -> list[dict[str, Any]]:
    """The blocks of an answer, with the names of its calls."""
    calls = [{"type": "tool_use", "name": call.name, "input": call.values} for call in reply.tool_calls]
    return [{"type": "thinking", "thinking": reply.reasoning}, {"type": "text", "text": reply.text}, *calls]


def shown(message: Any) -> list[dict[str, Any]]:
    """The blocks that the client read."""
    names = ("type", "thinking", "text", "name", "input")
    return [{name: getattr(each, name) for name in names if hasattr(each, name)} for each in message.content]


def test_a_message_whole_and_as_a_stream(client: Any, engine: edgerun.Engine) -> None:
    reply = engine.generate([QUESTION], tools=[WEATHER], temperature=0.0)
    asking: dict[str, Any] = {"model": "bundle", "max_tokens": 100, "messages": [QUESTION], "tools": [TOOL]}
    whole = client.messages.create(**asking, extra_body=GREEDY)
    with client.messages.stream(**asking, extra_body=GREEDY) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert shown(whole) == shown(streamed) == content(reply)
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    for message in (whole, streamed):
        assert (message.role, message.model, message.stop_reason) == ("assistant", "bundle", "tool_use")
        used = message.usage
        assert used.input_tokens + (used.cache_read_input_tokens or 0) == reply.stats.prompt_tokens
        assert used.output_tokens == reply.stats.completion_tokens


def test_results_of_tools_and_earlier_thoughts_go_back(client: Any, engine: edgerun.Engine) -> None:
    said = client.messages.create(model="bundle", max_tokens=100, messages=[QUESTION], tools=[TOOL], extra_body=GREEDY)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
        for block in said.content
        if block.type == "tool_use"
    ]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    conversation: Any = [QUESTION, {"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
    answered = client.messages.create(
        model="bundle", max_tokens=100, system=system, messages=conversation, tools=[TOOL], extra_body=GREEDY
    )
    reply = engine.generate([QUESTION], tools=[WEATHER], temperature=0.0)
    tools = [{"role": "tool", "content": "sunny", "tool_call_id": call["tool_use_id"]} for call in results]
    messages = [{"role": "system", "content": "Be brief."}, QUESTION, reply.message, *tools]
    expected = engine.generate(messages, tools=[WEATHER], temperature=0.0)
    (text,) = answered.content
    assert (text.type, answered.stop_reason) == ("text", "end_turn")
    assert text.text == expected.text == "It is sunny in both."
    counted = client.messages.count_tokens(model="bundle", system=system, messages=conversation, tools=[TOOL])
    assert counted.input_tokens == expected.stats.prompt_tokens


def test_why_an_answer_ends(client: Any) -> None:
    asking: dict[str, Any] = {"model": "bundle", "messages": [QUESTION], "extra_body": GREEDY}
    assert client.messages.create(**asking, max_tokens=2).stop_reason == "max_tokens"
    ended = client.messages.create(**asking, max_tokens=100)
    assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)
    text = "".join(block.text for block in ended.content if block.type == "text")
    stops = ["not in it", text[-3:]]
    stopped = client.messages.create(**asking, max_tokens=100, stop_sequences=stops)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[-3:])
    with client.messages.stream(**asking, max_tokens=100, stop_sequences=stops) as stream:
        assert stream.get_final_message().stop_sequence == text[-3:]
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    output: Any = {"format": {"type": "json_schema", "schema": schema}}
    (block,) = client.messages.create(**asking, max_tokens=100, output_config=output).content
    assert block.type == "text"
    assert json.loads(block.text) == {"a": 1}


def test_a_message_of_the_assistant_at_the_end_is_continued(client: Any, engine: edgerun.Engine) -> None:
    conversation: Any = [QUESTION, {"role": "assistant", "content": "hel"}]
    continued = client.messages.create(
        model="bundle", max_tokens=3, messages=conversation, metadata={"user_id": None}, extra_body=GREEDY
    )
    expected = engine.generate([QUESTION], answer_start="hel", max_tokens=3, temperature=0.0)
    assert "".join(block.text for block in continued.content if block.type == "text") == expected.text
    assert continued.usage.output_tokens == expected.stats.completion_tokens


def test_tools_that_must_or_must_not_be_called(client: Any) -> None:
    asking: dict[str, Any] = {"model": "bundle", "messages": [QUESTION], "max_tokens": 100, "tools": [TOOL]}
    forced = client.messages.create(**asking, tool_choice={"type": "tool", "name": TOOL["name"]}, extra_body=GREEDY)
    assert forced.stop_reason == "tool_use"
    one = client.messages.create(**asking, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in one.content].count("tool_use") == 1
    none = client.messages.create(**asking, tool_choice={"type": "none"}, extra_body=GREEDY)
    without = client.messages.create(model="bundle", messages=[QUESTION], max_tokens=100, extra_body=GREEDY)
    assert shown(none) == shown(without)


def test_null_is_the_same_as_leaving_a_field_out_in_blocks_too() -> None:
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "a", "signature": None, "cache_control": None},
        {"type": "tool_use", "id": "1", "name": "b", "input": {}, "caller": None},
        {"type": "tool_result", "tool_use_id": "1", "content": None, "is_error": None},
    ]
    choice = {"type": "auto", "disable_parallel_tool_use": None}

    def parsed(blocks: list[dict[str, Any]], choice: dict[str, Any]) -> GenerationRequest:
        said = [QUESTION, {"role": "assistant", "content": blocks[:2]}, {"role": "user", "content": blocks[2:]}]
        return MessagesBody.parse(json.dumps({"messages": said, "tool_choice": choice}).encode())

    without = [{name: value for name, value in each.items() if value is not None} for each in blocks]
    assert parsed(blocks, choice) == parsed(without, {"type": "auto"})


def test_errors_have_anthropics_form(client: Any, server: Served) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude'"):
        client.messages.create(model="claude", max_tokens=1, messages=[QUESTION])
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    with pytest.raises(anthropic.BadRequestError, match="reads text alone"):
        client.messages.create(model="bundle", max_tokens=1, messages=[{"role": "user", "content": [image]}])
    with (
        anthropic.Anthropic(base_url=server.base, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError, match="the API key is missing or wrong"),
    ):
        stranger.messages.create(model="bundle", max_tokens=1, messages=[QUESTION])


PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "there are no messages"),
    "a role": ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    "a block": (
        {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
        "messages[0].content[0].type is the string",
    ),
    "a server's tool": (
        {"messages": [QUESTION], "tools": [{"name": "a", "input_schema": {}, "type": "web_search_20250305"}]},
        "tools[0].type is the string 'web_search_20250305'",
    ),
    "a field": ({"messages": [QUESTION], "topk": 1}, "unknown field topk; did you mean top_k?"),
    "a format": ({"messages": [QUESTION], "output_config": {"format": "json"}}, "output_config.format is the string"),
    "a schema": (
        {"messages": [QUESTION], "output_config": {"format": {"type": "json_schema", "schema": 5}}},
        "output_config.format.schema is the integer 5",
    ),
    "a stop": ({"messages": [QUESTION], "stop_sequences": [""]}, "stop_sequences[0] has 0 characters"),
    "an effort": ({"messages": [QUESTION], "output_config": {"effort": 3}}, "output_config.effort is the integer 3"),
    "a temperature": ({"messages": [QUESTION], "temperature": -1}, "temperature"),
    "an answer that begins with an image": (
        {"messages": [{"role": "system", "content": "a"}, QUESTION, {"role": "assistant", "content": [IMAGE]}]},
        "messages[2] is an answer with an image",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_bad_requests_get_one_line(tiny_app: Starlette, path: str, name: str) -> None:
    body, message = REFUSED[name]
    response = asked(tiny_app, "POST", path, json=body)
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]
    assert "\n" not in error["message"]
