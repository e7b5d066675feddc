"""Answer objects, as the types and the stream parsers of the openai client read them.

Requests go through the real client, the bodies, a real engine and the answer objects; only HTTP is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types import CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from openai.types.responses import Response
from pydantic import BaseModel

import edgerun
from edgerun.edge.service.chat_body import parse_chat
from edgerun.edge.service.openai_objects import (
    ChatCompletionObjects,
    CompletionObjects,
    embedding_list,
    model_object,
    new_id,
    object_list,
)
from edgerun.edge.service.request_error import ErrorCode, RequestError
from edgerun.edge.service.response_objects import ResponseObjects
from edgerun.edge.service.responses_body import parse_response
from edgerun.edge.service.text_bodies import parse_completion
from edgerun.edge.service.token_objects import token_object
from edgerun.runtime.decode import FinishReason
from edgerun.runtime.options import GenerateOptions
from edgerun.runtime.result import Chunk, Reply, Stats
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.text.token_logprobs import TokenLogprob

PROMPT = "list all files larger than 10 MB"
VECTORS = np.array([[0.5, -1.25], [3.0, 0.1]], np.float32)
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def engine() -> Iterator[edgerun.Engine]:
    with edgerun.load() as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: edgerun.Engine) -> openai.OpenAI:
    """The client, over a transport that answers with what the engine generates."""
    endpoints = {"/v1/chat/completions": chat, "/v1/completions": completion, "/v1/responses": response}

    def answer(request: httpx.Request) -> httpx.Response:
        found = endpoints[request.url.path](engine, request.content)
        if isinstance(found, dict):
            return httpx.Response(200, json=found)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text="".join(map(event, found)))

    http = httpx.Client(transport=httpx.MockTransport(answer))
    return openai.OpenAI(api_key="none", base_url="http://model.invalid/v1", http_client=http)


def event(value: dict[str, Any]) -> str:
    """An event of a stream; those of responses are named by their type."""
    name = f"event: {value['type']}\n" if "type" in value else ""
    return f"{name}data: {json.dumps(value)}\n\n"


Answer = dict[str, Any] | list[dict[str, Any]]


def chat(engine: edgerun.Engine, body: bytes) -> Answer:
    request = parse_chat(body)
    objects = ChatCompletionObjects(request, "m", 5, new_id("chatcmpl-"))
    if not request.stream:
        return checked(ChatCompletion, objects.whole(engine.generate(request.messages, plain(request.options))))
    chunks = engine.stream(request.messages, plain(request.options))
    return [checked(ChatCompletionChunk, each) for chunk in chunks for each in objects.chunk(chunk)]


def completion(engine: edgerun.Engine, body: bytes) -> Answer:
    request = parse_completion(body)
    objects = CompletionObjects(request, "m", 5, new_id("cmpl-"))
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    if not request.stream:
        return checked(Completion, objects.whole(*[engine.generate(text, plain(request.options)) for text in texts]))
    return [
        each
        for index, text in enumerate(texts)
        for chunk in engine.stream(text, plain(request.options))
        for each in objects.chunk(chunk, index)
    ]


def response(engine: edgerun.Engine, body: bytes) -> Answer:
    request = parse_response(body)
    objects = ResponseObjects(request, "m", 5, new_id("resp_"))
    if not request.stream:
        return checked(Response, objects.whole(engine.generate(request.messages, plain(request.options))))
    chunks = engine.stream(request.messages, plain(request.options))
    return [*objects.started(), *(each for chunk in chunks for each in objects.chunk(chunk))]


def plain(options: GenerateOptions) -> GenerateOptions:
    """The options without speculation: nothing is measured, and no pass of another width changes sampled text."""
    return replace(options, speculation=Speculation.OFF)


def lone(engine: edgerun.Engine, prompt: str, **options: Any) -> Reply:
    """The answer that the objects should have."""
    return engine.generate(prompt, plain(GenerateOptions(**options)))


def checked(kind: type[BaseModel], value: dict[str, Any]) -> dict[str, Any]:
    """The object, which has every field that the client's type requires, and none that it does not know."""
    parsed = kind.model_validate(value)
    assert parsed.model_dump(exclude_unset=True, by_alias=True) == value
    assert list(extras(parsed)) == []
    return value


def extras(value: Any) -> Iterator[str]:
    """Names of the fields, at any depth, that the client's types do not have."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for each in value.__dict__.values():
            yield from extras(each)
    elif isinstance(value, list):
        for each in value:
            yield from extras(each)


def test_an_answer_can_be_sent_back_as_it_was_received(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=10).choices[0].message
    for answer in (first, first.model_dump()):
        again = client.chat.completions.create(model="m", messages=[*MESSAGES, answer, *MESSAGES], max_tokens=2)
        assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_of_several_prompts(client: openai.OpenAI, engine: edgerun.Engine, stream: bool) -> None:
    prompts = ["find ", "ls -"]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    options["extra_body"] = {"exact": True}
    found = client.completions.create(
        model="m", prompt=prompts, n=2, best_of=2, seed=5, temperature=2, max_tokens=5, **options
    )
    answers: list[Completion] = list(found) if stream else [found]  # type: ignore[call-overload]
    texts = ["", "", "", ""]
    for choice in (choice for answer in answers for choice in answer.choices):
        texts[choice.index] += choice.text
    alone = {"raw": True, "max_tokens": 5, "exact": True, "temperature": 2.0}
    assert texts == [lone(engine, prompt, seed=seed, **alone).text for prompt in prompts for seed in (5, 6)]
    (used,) = [answer.usage for answer in answers if answer.usage is not None]
    assert used.prompt_tokens == sum(
        lone(engine, prompt, raw=True, max_tokens=1).stats.prompt_tokens for prompt in prompts
    )


def test_the_best_choices(client: openai.OpenAI, engine: edgerun.Engine) -> None:
    options: Any = {"model": "m", "prompt": "find ", "n": 2, "best_of": 5, "seed": 5, "temperature": 2, "max_tokens": 5}
    replies = [
        lone(engine, "find ", raw=True, seed=5 + index, temperature=2.0, max_tokens=5, logprobs=0) for index in range(5)
    ]
    best = sorted(replies, key=lambda reply: -(reply.stats.mean_logprob or 0))[:2]
    found = client.completions.create(**options)
    assert [choice.text for choice in found.choices] == [reply.text for reply in best]
    assert found.usage is not None
    assert found.usage.prompt_tokens == best[0].stats.prompt_tokens
    # Those count too that are not returned, as far as they were generated.
    generated = sum(reply.stats.completion_tokens for reply in replies)
    returned = sum(reply.stats.completion_tokens for reply in best)
    assert returned < found.usage.completion_tokens <= generated
    chunks: Any = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    texts, usage = ["", ""], []
    for chunk in chunks:
        usage += [chunk.usage] if chunk.usage is not None else []
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [reply.text for reply in best]
    assert [each.completion_tokens for each in usage] == [found.usage.completion_tokens]
    chat = client.chat.completions.create(
        model="m", messages=MESSAGES, n=1, seed=5, temperature=2, max_tokens=5, extra_body={"best_of": 3}
    )
    alone = [lone(engine, PROMPT, seed=5 + index, temperature=2.0, max_tokens=5, logprobs=0) for index in range(3)]
    assert chat.choices[0].message.content == max(alone, key=lambda reply: reply.stats.mean_logprob or -99).text


def test_a_response_repeats_the_request(engine: edgerun.Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
    given: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 3,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "reasoning": {"effort": "low", "summary": "auto"},
        "safety_identifier": "s",
        "temperature": 0.5,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [tool],
        "top_logprobs": 2,
        "top_p": 0.9,
        "user": "u",
    }
    body = {"input": PROMPT, "include": ["message.output_text.logprobs"], **given}
    objects = ResponseObjects(parse_response(json.dumps(body)), "m", 5, "1")
    (begun, _), failed = objects.started(), objects.failed(RequestError("it broke"))[0]
    for event in (begun, failed):
        repeated = checked(Response, event["response"])
        assert {name: repeated[name] for name in given} == given
    short = {"input": PROMPT, "max_output_tokens": 2}
    found = response(engine, json.dumps({**short, "text": {"format": {"type": "json_object"}}}).encode())
    assert isinstance(found, dict)
    assert found["text"]["format"] == {"type": "json_object"}
    found = response(engine, json.dumps({**short, "store": True}).encode())
    assert isinstance(found, dict)
    defaults = {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "tools": [], "tool_choice": "auto"}
    defaults |= {"metadata": {}, "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None}}
    assert {name: found[name] for name in defaults} == defaults
    assert {found[name] for name in given.keys() - defaults.keys() - {"max_output_tokens"}} == {None}


def test_the_output_of_a_response_is_input_of_the_next(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": PROMPT}]
    include: Any = ["message.output_text.logprobs"]
    first = client.responses.create(model="m", input=items, max_output_tokens=10, include=include)
    (part,) = first.output[0].content  # type: ignore[union-attr]
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode() == first.output_text  # type: ignore[union-attr]
    items += first.output
    items += [{"role": "user", "content": [{"type": "input_text", "text": "shorter"}]}]
    assert client.responses.create(model="m", input=items, max_output_tokens=2).status == "incomplete"


def test_a_response_that_fails() -> None:
    for code, theirs in (
        (ErrorCode.BUSY, "rate_limit_exceeded"),
        (ErrorCode.INTERNAL, "server_error"),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "invalid_prompt"),
    ):
        objects = ResponseObjects(parse_response({"input": "a"}), "m", 5, "resp_1")
        (event,) = [*objects.started(), *objects.failed(RequestError("it broke", code=code))][2:]
        assert (event["type"], event["sequence_number"]) == ("response.failed", 2)
        assert checked(Response, event["response"])["error"] == {"code": theirs, "message": "it broke"}


CANCELLED = Stats(prompt_tokens=3, completion_tokens=1)


def test_a_cancelled_answer_reads_as_one_that_was_cut_off() -> None:
    reply = Reply("a", FinishReason.CANCELLED, CANCELLED)
    chat = ChatCompletionObjects(parse_chat({"messages": MESSAGES}), "m", 5, "1").whole(reply)
    assert checked(ChatCompletion, chat)["choices"][0]["finish_reason"] == "length"
    response = ResponseObjects(parse_response({"input": "a"}), "m", 5, "1").whole(reply)
    assert checked(Response, response)["status"] == "incomplete"


def test_a_chunk_without_text_sends_nothing_more_than_the_role() -> None:
    objects = ChatCompletionObjects(parse_chat({"messages": MESSAGES, "stream": True}), "m", 5, "1")
    assert len(objects.chunk(Chunk(""))) == 1
    assert objects.chunk(Chunk("")) == []


def test_embeddings_and_models_have_the_fields_of_the_client() -> None:
    checked(CreateEmbeddingResponse, embedding_list(VECTORS, "m", as_base64=False, prompt_tokens=2))
    assert object_list([checked(Model, model_object("m", 5))])["object"] == "list"


def test_tokens_of_an_answer_as_they_are_kept_with_a_message(engine: edgerun.Engine) -> None:
    reply = engine.generate(MESSAGES, logprobs=20, max_tokens=20, ignore_eos=True)
    objects = json.loads(json.dumps([token_object(token) for token in reply.logprobs]))
    assert [each["id"] for each in objects] == [token.token_id for token in reply.logprobs]
    for each, token in zip(objects, reply.logprobs, strict=True):
        assert set(each) - {"special"} == {"id", "text", "logprob", "top", "kind", "drafter", "rejected"}
        assert token.origin is not None
        assert (each["text"], each["kind"], each["drafter"], each["rejected"]) == (
            token.text,
            str(token.origin.kind),
            token.origin.drafter,
            token.origin.rejected,
        )
        assert each["logprob"] == token.logprob <= 0
        for other, listed in zip(token.top, each["top"], strict=True):
            special = {"special": True} if other.token_id in engine.tokenizer.special_ids else {}
            assert listed == {"id": other.token_id, "text": other.text, "logprob": other.logprob, **special}
    assert any(each.get("special") for listed in objects for each in listed["top"])
    impossible = TokenLogprob(1, "a", b"a", -math.inf)
    assert token_object(impossible) == {
        "id": 1, "text": "a", "logprob": -9999.0, "top": [], "kind": "decoded", "drafter": None, "rejected": None
    }  # fmt: skip
