"""Answer objects that few requests lead to, and tokens as they are kept with a message."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

import edgerun
from edgerun.edge.service.openai_objects import ChatCompletionObjects
from edgerun.edge.service.request_error import ErrorCode, RequestError
from edgerun.edge.service.response_objects import ResponseObjects
from edgerun.edge.service.responses_body import ResponsesBody
from edgerun.edge.service.text_bodies import ChatBody
from edgerun.edge.service.token_objects import token_object
from edgerun.runtime.decode import FinishReason
from edgerun.runtime.result import Chunk, Reply, Stats
from edgerun.runtime.text.token_logprobs import TokenLogprob
from support.openai_clients import unknown_fields

PROMPT = "list all files larger than 10 MB"
CANCELLED = Stats(prompt_tokens=3, completion_tokens=1)
MESSAGES: Any = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def engine() -> Iterator[edgerun.Engine]:
    with edgerun.load() as engine:
        yield engine


def checked(kind: type[BaseModel], value: dict[str, Any]) -> dict[str, Any]:
    """The object, which has every field that the client's type requires, and none that it does not know."""
    parsed = kind.model_validate(value)
    assert parsed.model_dump(exclude_unset=True, by_alias=True) == value
    assert list(unknown_fields(parsed)) == []
    return value


def whole_response(body: dict[str, Any]) -> dict[str, Any]:
    """The response with a cancelled answer of one token."""
    reply = Reply("a", FinishReason.CANCELLED, CANCELLED, logprobs=(TokenLogprob(1, "a", b"a", -0.5),))
    return checked(Response, ResponseObjects(ResponsesBody.parse(body), "m").whole(reply))


def test_a_response_repeats_the_request() -> None:
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
    objects = ResponseObjects(ResponsesBody.parse(json.dumps(body)), "m")
    (begun, _), failed = objects.started(), objects.failed(RequestError("it broke"))[0]
    for event in (begun, failed):
        repeated = checked(Response, event["response"])
        assert {name: repeated[name] for name in given} == given
    short = {"input": PROMPT, "text": {"format": {"type": "json_object"}}}
    assert whole_response(short)["text"]["format"] == {"type": "json_object"}
    found = whole_response({"input": PROMPT, "store": True})
    defaults = {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "tools": [], "tool_choice": "auto"}
    defaults |= {"metadata": {}, "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None}}
    assert {name: found[name] for name in defaults} == defaults
    assert {found[name] for name in given.keys() - defaults.keys()} == {None}


def test_a_response_that_fails() -> None:
    for code, theirs in (
        (ErrorCode.BUSY, "rate_limit_exceeded"),
        (ErrorCode.INTERNAL, "server_error"),
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "invalid_prompt"),
    ):
        objects = ResponseObjects(ResponsesBody.parse({"input": "a"}), "m")
        (event,) = [*objects.started(), *objects.failed(RequestError("it broke", code=code))][2:]
        assert (event["type"], event["sequence_number"]) == ("response.failed", 2)
        assert checked(Response, event["response"])["error"] == {"code": theirs, "message": "it broke"}


def test_a_cancelled_answer_reads_as_one_that_was_cut_off() -> None:
    reply = Reply("a", FinishReason.CANCELLED, CANCELLED)
    chat = ChatCompletionObjects(ChatBody.parse({"messages": MESSAGES}), "m").whole(reply)
    assert checked(ChatCompletion, chat)["choices"][0]["finish_reason"] == "length"
    response = whole_response({"input": "a"})
    assert response["status"] == "incomplete"
    assert response["output"][0]["content"][0]["logprobs"][0]["bytes"] == [97]


def test_a_chunk_without_text_sends_nothing_more_than_the_role() -> None:
    objects = ChatCompletionObjects(ChatBody.parse({"messages": MESSAGES, "stream": True}), "m")
    assert len(objects.chunk(Chunk(""))) == 1
    assert objects.chunk(Chunk("")) == []


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
