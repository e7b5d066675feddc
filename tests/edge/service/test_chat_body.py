"""Bodies of chat completions: what is accepted, what is refused, and with which code and path."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.edge.service import body_decoder
from edgerun.edge.service.body_decoder import MAX_DEPTH, read_object
from edgerun.edge.service.generation_fields import GenerationRequest
from edgerun.edge.service.request_error import ErrorCode, RequestError
from edgerun.edge.service.text_bodies import ChatBody
from support.commands import Patch
from support.nightly import examples

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
ASSISTANT = {"role": "assistant", "content": "To be"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def parsed(**fields: Any) -> GenerationRequest:
    """The request of a body with these fields, and one message if they have none."""
    return ChatBody.parse(json.dumps({"messages": [USER], **fields}).encode())


SCHEMA = msgspec.json.schema(ChatBody)


def fits_schema(body: dict[str, Any]) -> bool:
    """Whether the published schema allows a body."""
    jsonschema = pytest.importorskip("jsonschema", reason="needs the dev extra")
    return bool(jsonschema.Draft202012Validator(SCHEMA).is_valid(body))


def error_of(body: Any) -> RequestError:
    """The error that a body is refused with."""
    with pytest.raises(RequestError) as caught:
        ChatBody.parse(body)
    return caught.value


def test_fields_besides_those_of_openai_reach_the_options() -> None:
    request = parsed(
        model="m",
        max_tokens=7,
        max_completion_tokens=7,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": True},
        tool_choice="auto",
        response_format={"type": "text"},
        top_k=4,
        min_p=0.1,
        repetition_penalty=1.5,
        ignore_eos=True,
        exact=True,
        chat_template_kwargs={"enable_thinking": False},
    )
    options = request.options
    assert (request.model, request.stream, request.include_usage) == ("m", True, True)
    assert (options.max_tokens, options.top_k, options.min_p, options.repeat_penalty) == (7, 4, 0.1, 1.5)
    assert options.ignore_eos
    assert options.exact
    assert options.template_variables == {"enable_thinking": False}


def test_a_body_with_one_message_takes_the_defaults() -> None:
    request = parsed()
    assert request.messages == [USER]
    assert (request.model, request.stream, request.include_usage) == (None, False, False)
    assert request.options == type(request.options)()


@pytest.mark.parametrize(
    ("fields", "option", "value"),
    [
        ({"tools": [TOOL], "tool_choice": "none"}, "tools", ()),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "required"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", NAMED),
        ({"seed": -1}, "seed", 2**64 - 1),
        ({"logprobs": True}, "logprobs", 0),
        ({"logprobs": False, "top_logprobs": 0}, "logprobs", None),
    ],
)
def test_an_option_of_fields(fields: dict[str, Any], option: str, value: object) -> None:
    assert getattr(parsed(**fields).options, option) == value


def test_messages_are_those_that_the_runtime_takes() -> None:
    request = parsed(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [CALL],
                "refusal": None,
                "annotations": [],
                "provider_specific_fields": {"refusal": None},
            },
            {"role": "tool", "content": "1", "tool_call_id": "1"},
            {"role": "user", "content": "c", "name": "someone"},
        ]
    )
    assert request.messages == [
        {"role": "developer", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "1"},
        {"role": "user", "content": "c", "name": "someone"},
    ]


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u", "safety_identifier": "s", "metadata": {"a": "b"}},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
        {"service_tier": "flex", "store": True, "parallel_tool_calls": True, "modalities": ["text"]},
        {"cache_prompt": True, "id_slot": -1, "slot_id": 0, "timings_per_token": True, "return_progress": True},
        {"keep_alive": "5m", "reasoning_format": "auto", "verbosity": "medium"},
        {"keep_alive": -1, "prediction": {"type": "content", "content": "x"}, "max_tokens": -1},
        {"messages": [{**USER, "content": [{"type": "text", "text": "hello", "prompt_cache_breakpoint": {}}]}]},
    ],
)
def test_fields_that_do_not_change_the_answer_are_accepted(field: dict[str, Any]) -> None:
    assert replace(parsed(**field), keep_s=None) == parsed()
    assert fits_schema({"messages": [USER], **field})
    for name in field.keys() - {"messages", "max_tokens"}:
        error = error_of({"messages": [USER], name: [{"a": 1}]})
        assert (error.code, str(error.param).partition("[")[0]) in {
            (ErrorCode.INVALID_TYPE, name),
            (ErrorCode.UNSUPPORTED_FIELD, name),
        }


def test_an_effort_of_reasoning_has_the_names_that_templates_have_for_it() -> None:
    def variables(**fields: Any) -> Any:
        return parsed(**fields).options.template_variables

    assert variables(reasoning_effort="low") == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    none = variables(reasoning_effort="none", chat_template_kwargs={"thinking": "a", "x": 1})
    assert none == {"reasoning_effort": "none", "enable_thinking": False, "thinking": "a", "x": 1}


def test_names_of_unknown_fields() -> None:
    assert "did you mean temperature?" in str(error_of({"messages": [USER], "temprature": 1}))
    error = error_of({"messages": [USER], "x" * 1_000_000: 1})
    assert error.code is ErrorCode.UNKNOWN_FIELD
    assert len(str(error)) < 300
    for place in ("9" * 5000, "0", "..."):  # a name that looks like a place
        name = f"a` - at `$.messages[{place}]"
        error = error_of({"messages": [USER], name: 1})
        assert error.code is ErrorCode.UNKNOWN_FIELD
        assert str(error.param).startswith(name[:90])


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"temperature": "hot"}, "temperature", "temperature is the string 'hot'; it must be a number or null"),
        ({"max_tokens": True}, "max_tokens", "max_tokens is the boolean true; it must be an integer or null"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens is the number 1.5; it must be an integer or null"),
        ({"messages": None}, "messages", "messages is null; it must be an array"),
        ({"messages": [3]}, "messages[0]", "messages[0] is the integer 3; it must be an object"),
        (
            {"messages": [{"role": "user", "content": None}]},
            "messages[0].content",
            "messages[0].content is null; it must be a string or an array",
        ),
        ({"stop": ["a", 1]}, "stop[1]", "stop[1] is the integer 1; it must be a string"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias has a key that is not an integer; keys are token ids"),
    ],
)
def test_wrong_types_name_the_field_and_both_types(fields: dict[str, Any], param: str, message: str) -> None:
    error = error_of({"messages": [USER], **fields})
    assert (error.code, error.param, str(error)) == (ErrorCode.INVALID_TYPE, param, message)


REFUSED: dict[ErrorCode, list[tuple[dict[str, Any], str]]] = {
    ErrorCode.UNSUPPORTED_FIELD: [
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": []}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"reasoning_format": "none"}, "reasoning_format"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {}}, "moderation"),
        ({"tools": [TOOL, {"type": "custom", "custom": {"name": "f"}}]}, "tools[1].custom"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].function.strict"),
        ({"messages": [USER, {"role": "function", "name": "f", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "assistant", "content": "x", "refusal": "no"}]}, "messages[0].refusal"),
        (
            {
                "messages": [
                    {**USER, "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]}
                ]
            },
            "messages[0].content[1].input_audio",
        ),
    ],
    ErrorCode.UNKNOWN_FIELD: [
        ({"temprature": 1}, "temprature"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
        ({"messages": [{**USER, "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{**USER, "tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [{**USER, "content": [{"type": "text", "text": "a", "b": 1}]}]}, "messages[0].content[0].b"),
        ({"tools": [{**TOOL, "x": 1}]}, "tools[0].x"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
    ],
    ErrorCode.INVALID_VALUE: [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant"}]}, "messages[0]"),
        ({"messages": [{"role": "someone", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].tool_calls"),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "messages[1].tool_calls[0]",
        ),
        ({"messages": [{**USER, "content": [{"type": "sound", "text": "a"}]}]}, "messages[0].content[0].type"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"seed": 1 << 64}, "seed"),
        ({"seed": -(1 << 63) - 1}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stop": ""}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"num_ctx": 0}, "num_ctx"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"repeat_penalty": 1, "repetition_penalty": 2}, "repetition_penalty"),
        ({"repetition_penalty": 200}, "repetition_penalty"),
        ({"top_k": -1}, "top_k"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": math.nan}, "temperature"),
        ({"chat_template_kwargs": {"a": [1, math.inf]}}, "chat_template_kwargs.a[1]"),
        ({"messages": [{**USER, "content": "\ud800"}]}, "messages[0].content"),
        ({"temperature": 10**400}, "temperature"),
        ({"seed": 10**5000}, "seed"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        ({"continue_final_message": True}, "messages[0]"),
        ({"continue_final_message": True, "messages": [ASSISTANT]}, "messages[0]"),
        *(
            ({"continue_final_message": True, "messages": [USER, {**ASSISTANT, **more}]}, "messages[1]")
            for more in ({"tool_calls": [CALL]}, {"reasoning_content": "hm"}, {"content": ""})
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
}


@pytest.mark.parametrize(
    ("code", "fields", "param"), [(code, *each) for code, listed in REFUSED.items() for each in listed]
)
def test_what_is_refused_is_named(code: ErrorCode, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [USER], **fields}
    error = error_of(body)
    assert (error.code, error.param) == (code, param)
    assert param in str(error)
    assert "\n" not in str(error)
    assert code is ErrorCode.INVALID_VALUE or not fits_schema(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [], "messages": []}',
        b'{"a": {"b": 1, "b": 2}}',
        b'{"a": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1),
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"a": 1}x',
    ],
    ids=range(10),
)
def test_what_is_not_valid_json_is_one_error(body: bytes) -> None:
    error = error_of(body)
    assert error.code is ErrorCode.INVALID_JSON
    assert "\n" not in str(error)


def test_a_body_that_is_not_an_object_or_has_no_messages() -> None:
    assert (error_of({}).code, error_of({}).param) == (ErrorCode.MISSING_FIELD, "messages")
    for body in (b"[]", b"3", b'"a"', b"null", b"true", b"1.5"):
        assert error_of(body).code is ErrorCode.INVALID_TYPE


def test_limits() -> None:
    for name, few, many in (("messages", [USER] * 10_000, [USER] * 10_001), ("tools", [TOOL] * 128, [TOOL] * 129)):
        assert parsed(**{name: few})
        error = error_of({"messages": [USER], name: many})
        assert (error.param, error.code) == (name, ErrorCode.TOO_LARGE)
    with pytest.raises(RequestError, match="at most 11 are read") as caught:
        read_object({"messages": "abcd"}, 11)
    assert caught.value.code is ErrorCode.TOO_LARGE
    assert read_object({"messages": "abcd"}, 12)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(body=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_request_or_one_error(body: bytes) -> None:
    assert error_of(body).code in ErrorCode  # none of them has messages


@given(value=st.dictionaries(st.text(), JSON, max_size=4))
@settings(max_examples=examples(50))
def test_strict_json_reads_what_json_writes(value: dict[str, Any]) -> None:
    body = json.dumps(value)
    if "NaN" in body or "Infinity" in body or "\\ud" in body:
        return
    assert read_object(body.encode()) == read_object(value) == json.loads(body)


def containers_in(value: Any) -> int:
    """Number of objects and lists in a value."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + sum(map(containers_in, value.values() if isinstance(value, dict) else value))


TRICKY = st.text(st.sampled_from('[]{},:"\\\n a\u00e9')) | st.integers() | st.booleans()


@given(
    value=st.recursive(TRICKY, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text('[{,"\\'), parts)),
    ascii_only=st.booleans(),
)
@settings(max_examples=examples(200))
def test_containers_are_counted_outside_of_strings(value: Any, ascii_only: bool) -> None:
    body = json.dumps({"value": value}, ensure_ascii=ascii_only).encode()
    containers = containers_in({"value": value})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_decoder, "_MAX_CONTAINERS", containers)
        assert read_object(body)
        patch.setattr(body_decoder, "_MAX_CONTAINERS", containers - 1)
        with pytest.raises(RequestError, match="objects and lists"):
            read_object(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": [' + b"[]," * 3_000 + b"1]}",
        b'{"a": [' + b"{}," * 3_000 + b"1]}",
        b'{"a": [' + b"1," * 20_001 + b"1]}",
        b'{"a": [' + b'"",' * 20_001 + b"1]}",
        b'{"a": ' + b"[" * 3_000,
    ],
)
def test_a_body_with_too_many_values_is_refused_before_it_is_parsed(body: bytes, monkeypatch: Patch) -> None:
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the body was parsed"))
    monkeypatch.setattr(body_decoder, "_MAX_CONTAINERS", 2_000)
    monkeypatch.setattr(body_decoder, "_MAX_VALUES", 20_000)
    with pytest.raises(RequestError, match="send several smaller requests") as caught:
        read_object(body)
    assert caught.value.code is ErrorCode.TOO_LARGE


@pytest.mark.parametrize("body", [b'{"a": ' + b"[" * 200_001, b'{"a": [' + b"1," * 2_000_000 + b"1]}"])
def test_the_largest_numbers_of_values(body: bytes) -> None:
    with pytest.raises(RequestError, match="has more than 200000 objects and lists, or 2000000 values"):
        read_object(body)


def test_large_bodies_of_texts_and_of_token_ids_are_read() -> None:
    text = '[{,\\"' * 300_000
    assert read_object(json.dumps({"text": text}).encode()) == {"text": text}
    ids = list(range(1_000_000))
    assert read_object(json.dumps({"ids": ids}).encode()) == {"ids": ids}


def test_an_answer_can_continue_the_last_message() -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "To be"}]}
    for last in (ASSISTANT, parts):
        for more in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
            request = parsed(messages=[USER, last], continue_final_message=True, **more)
            assert request.messages == [USER]
            assert request.options.answer_start == "To be"
    for more in ({}, {"add_generation_prompt": True}, {"continue_final_message": False}):
        request = parsed(messages=[USER, ASSISTANT], **more)
        assert request.messages == [USER, ASSISTANT]
        assert not request.options.answer_start
