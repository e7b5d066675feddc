"""OpenAI's client calls functions and reads reasoning from a server, in whole answers and in streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import edgerun
from support.scripted_model import CALLS, WEATHER, write_calling_bundle
from support.serving import served

QUESTION: Any = {"role": "user", "content": "Weather in Paris and Rome?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calling_bundle(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[openai.OpenAI]:
    with (
        served([model], "--threads", "1") as server,
        openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[edgerun.Engine]:
    with edgerun.load(model) as engine:
        yield engine


def test_an_answer_that_is_left_as_written_or_cut_off_is_text(engine: edgerun.Engine) -> None:
    reply = engine.generate([QUESTION], tools=[WEATHER], parse_answer=False)
    assert reply.tool_calls == ()
    assert reply.text.startswith('Paris and RomeI look.\n{"name": "get_weather", ')
    reply = engine.generate([QUESTION], tools=[WEATHER], max_tokens=7)
    assert (reply.tool_calls, reply.unparsed) == ((), True)
    assert reply.text == 'I look.\n<tool_call>{"name": "get_weather", "arguments": {"city": '


def test_an_answer_with_one_call_ends_with_it(engine: edgerun.Engine) -> None:
    reply = engine.generate([QUESTION], tools=[WEATHER], parallel_tool_calls=False, speculation=edgerun.Speculation.OFF)
    assert [call.values for call in reply.tool_calls] == [{"city": "Paris"}]
    assert (reply.reasoning, reply.unparsed) == ("Paris and Rome", False)
    (call,) = reply.message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert reply.finish_reason is edgerun.FinishReason.STOP
    assert reply.stats.completion_tokens == len(CALLS) - 2


def test_the_start_of_an_answer_has_parts(engine: edgerun.Engine) -> None:
    ids = [engine.tokenizer.special_id("<think>"), *engine.tokenizer.encode("Paris and Rome", add_special_tokens=False)]
    stream = engine.stream([QUESTION], tools=[WEATHER], answer_start=ids)
    reply = edgerun.Reply.of(stream)
    assert (stream.start_parts.reasoning, stream.start_parts.text) == ("Paris and Rome", "")
    assert (reply.reasoning, reply.text, len(reply.tool_calls)) == ("", "I look.", 2)
    session = engine.session()
    session.send(QUESTION["content"], tools=[WEATHER], answer_start=ids)
    said = session.messages[-1]
    assert (said["reasoning_content"], said["content"]) == ("Paris and Rome", "I look.")


def test_a_format_can_be_chosen_when_a_model_is_loaded(model: Path) -> None:
    with edgerun.load(model, tool_format="none") as engine:
        reply = engine.generate([QUESTION], tools=[WEATHER])
        assert (reply.reasoning, reply.tool_calls) == ("Paris and Rome", ())
        with pytest.raises(edgerun.InputError, match="is 'required', but the model has no format for calls"):
            engine.generate([QUESTION], tools=[WEATHER], tool_choice="required")
    with pytest.raises(edgerun.InputError, match="tool_format is 'xml'; it must be one of auto, none, harmony"):
        edgerun.load(model, tool_format="xml")


def test_a_conversation_keeps_calls_and_reasoning(engine: edgerun.Engine) -> None:
    with engine.session() as session:
        session.send("Weather?", tools=[WEATHER])
        assert session.messages[-1]["reasoning_content"] == "Paris and Rome"
        assert session.messages[-1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
        assert session.send("And now?").text == 'No functions: <tool_call>{"name": "get_weather"}'


def completed(client: openai.OpenAI, messages: Any, tools: Any, *, streamed: bool = False, **options: Any) -> Any:
    """The first choice of a chat completion."""
    body: Any = {"model": "bundle", "messages": messages, "tools": tools, **options}
    if not streamed:
        return client.chat.completions.create(**body).choices[0]
    with client.chat.completions.stream(**body) as stream:
        return stream.get_final_completion().choices[0]


@pytest.mark.parametrize("streamed", [False, True])
def test_the_loop_of_the_client(client: openai.OpenAI, *, streamed: bool) -> None:
    messages: list[Any] = [QUESTION]
    rounds = 0
    while True:
        choice = completed(client, messages, [WEATHER], streamed=streamed)
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed": True}))
        if choice.finish_reason != "tool_calls":
            break
        rounds += 1
        assert choice.message.reasoning_content == "Paris and Rome"
        assert choice.message.content == "I look."
        for call in choice.message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny"})
    assert rounds == 1
    assert choice.finish_reason == "stop"
    assert choice.message.content == "It is sunny in both."
    results = [message.get("content") for message in messages if message["role"] == "tool"]
    assert results == ["Paris: sunny", "Rome: sunny"]


def test_the_deltas_of_a_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="bundle", messages=[QUESTION], tools=[WEATHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert [(call.index, call.id is not None, call.function.name, call.function.arguments) for call in calls] == [  # type: ignore[union-attr]
        (0, True, "get_weather", ""),
        (0, False, None, '{"city": "Paris"}'),
        (1, True, "get_weather", ""),
        (1, False, None, '{"city": "Rome"}'),
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_text_that_began_like_a_call_has_a_flag(client: openai.OpenAI) -> None:
    other: Any = {"type": "function", "function": {"name": "other"}}
    whole = completed(client, [QUESTION], [other])
    assert (whole.finish_reason, whole.message.tool_calls, whole.unparsed_tool_calls) == ("stop", None, True)
    assert whole.message.content.count('"get_weather"') == 2
    *_, last = client.chat.completions.create(model="bundle", messages=[QUESTION], tools=[other], stream=True)
    streamed: Any = last.choices[0]
    assert streamed.unparsed_tool_calls


@pytest.mark.parametrize("streamed", [False, True])
def test_the_responses_api(client: openai.OpenAI, *, streamed: bool) -> None:
    function = {"type": "function", **WEATHER["function"], "strict": False}
    items: list[Any] = [QUESTION]

    def respond() -> Any:
        if streamed:
            with client.responses.stream(model="bundle", input=items, tools=[function]) as stream:
                return stream.get_final_response()
        return client.responses.create(model="bundle", input=items, tools=[function])

    first = respond()
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    assert first.output[0].content[0].text == "Paris and Rome"
    assert first.output_text == "I look."
    assert [json.loads(item.arguments)["city"] for item in first.output[2:]] == ["Paris", "Rome"]
    items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in first.output]
    items += [{"type": "function_call_output", "call_id": item.call_id, "output": "ok"} for item in first.output[2:]]
    assert respond().output_text == "It is sunny in both."


def function(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


OSLO: Any = function("get_weather", city={"enum": ["Oslo"]})


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_can_be_required(client: openai.OpenAI, *, streamed: bool) -> None:
    """The script of the model goes another way: the grammar leads it. Then it answers what the function returned."""
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    choice = completed(client, [QUESTION], [OSLO], streamed=streamed, **options)
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    said = choice.message.model_dump(exclude_none=True, exclude={"parsed": True})
    messages = [QUESTION, said, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    last = completed(client, messages, [OSLO], tool_choice="none")
    assert (last.message.content, last.message.tool_calls) == ("It is sunny in both.", None)


def test_a_function_can_be_named(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    options = {"tool_choice": named, "parallel_tool_calls": False}
    choice = completed(client, [QUESTION], [OSLO, function("now")], **options)
    assert [call.function.name for call in choice.message.tool_calls] == ["now"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": []}, "tool_choice is 'required' without tools"),
        (
            {"tool_choice": {"type": "function", "name": "other"}},
            "tool_choice names 'other'; the tools are get_weather",
        ),
        ({"response_format": edgerun.ResponseFormat.json_object()}, "response_format and tool_choice are both given"),
    ],
)
def test_choices_that_cannot_be_enforced(engine: edgerun.Engine, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(edgerun.InputError, match=message):
        engine.generate([QUESTION], **{"tools": [WEATHER], "tool_choice": "required", **changes})
