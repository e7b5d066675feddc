"""Bodies of text completions, responses, embeddings and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params, embedding_create_params
from openai.types.responses import response_create_params

from edgerun.edge.service.body_decoder import decode_body
from edgerun.edge.service.chat_body import ChatRequest
from edgerun.edge.service.request_error import ErrorCode, RequestError
from edgerun.edge.service.responses_body import ResponsesBody, ResponsesRequest
from edgerun.edge.service.text_bodies import (
    CompletionBody,
    CompletionRequest,
    DetokenizeBody,
    EmbeddingBody,
    EmbeddingRequest,
    TokenizeBody,
    TokenizeRequest,
)

USER = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
CHAT_CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": 1}}}

Parse = Callable[[Any], Any]


def error_of(parse: Parse, body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(body)
    return caught.value


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_prompts_are_texts_or_token_ids(prompt: Any, prompts: Any) -> None:
    request = CompletionRequest.parse({"prompt": prompt})
    assert request.prompts == prompts
    assert request.options.raw
    assert request.options.max_tokens == 16
    assert EmbeddingRequest.parse({"input": prompt}).inputs == prompts


@pytest.mark.parametrize(
    ("prompt", "code", "place"),
    [
        ([], ErrorCode.INVALID_VALUE, ""),
        ("", ErrorCode.INVALID_VALUE, ""),
        ([""], ErrorCode.INVALID_VALUE, "[0]"),
        ([[1], []], ErrorCode.INVALID_VALUE, "[1]"),
        ([1, "a"], ErrorCode.INVALID_VALUE, ""),
        ([[1], "a"], ErrorCode.INVALID_VALUE, ""),
        ([1, -1], ErrorCode.INVALID_VALUE, ""),
        ([True], ErrorCode.INVALID_TYPE, "[0]"),
        ([[1, "a"]], ErrorCode.INVALID_TYPE, "[0][1]"),
        (None, ErrorCode.INVALID_TYPE, ""),
        (["a"] * 2049, ErrorCode.TOO_LARGE, ""),
    ],
)
def test_other_prompts_are_refused(prompt: Any, code: ErrorCode, place: str) -> None:
    for field, parse in (("prompt", CompletionRequest.parse), ("input", EmbeddingRequest.parse)):
        error = error_of(parse, {field: prompt})
        assert (error.code, error.param) == (code, f"{field}{place}")


def test_options_of_a_text_completion() -> None:
    fields = {"max_tokens": 3, "n": 2, "best_of": 2, "echo": False, "logprobs": 2, "stop": "x", "temperature": 0.5}
    options = CompletionRequest.parse({"prompt": "a", **fields}).options
    assert CompletionRequest.parse({"prompt": "a"}).options.max_tokens == 16
    assert CompletionRequest.parse({"prompt": "a", "max_tokens": -1}).options.max_tokens is None
    assert (options.max_tokens, options.n, options.logprobs) == (3, 2, 2)
    assert (options.stops, options.temperature) == (("x",), 0.5)


@pytest.mark.parametrize("parse", [CompletionRequest.parse, ChatRequest.parse])
def test_the_best_of_several_answers(parse: Callable[..., CompletionRequest | ChatRequest]) -> None:
    prompt = {"prompt": "a"} if parse == CompletionRequest.parse else {"messages": [USER]}
    options = parse({**prompt, "n": 2, "best_of": 5, "early_stop": 0.9}).options
    assert (options.n, options.best_of, options.early_stop) == (2, 5, 0.9)
    for fields, param in (
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": 21}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 17}, "n"),
        ({"early_stop": 0.2}, "early_stop"),
        ({"early_stop": 2}, "early_stop"),
    ):
        error = error_of(parse, {**prompt, **fields})
        assert error.param == param
        assert param in error.what


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "x"}])
def test_what_text_completions_do_not_do(fields: dict[str, Any]) -> None:
    error = error_of(CompletionRequest.parse, {"prompt": "a", **fields})
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_FIELD, *fields)


def test_a_response_of_a_text() -> None:
    request = ResponsesRequest.parse({"input": "hello", "instructions": "Be brief.", "max_output_tokens": 5})
    assert request.messages == [{"role": "system", "content": "Be brief."}, USER]
    assert request.options.max_tokens == 5
    assert request.repeated["instructions"] == "Be brief."


def test_reasoning_of_several_items_belongs_to_the_next_message() -> None:
    items = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": each}]} for each in ("a", "b")]
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]}
    request = ResponsesRequest.parse({"input": [USER, *items, {**said, "type": "message"}, USER]})
    assert request.messages[1] == {"role": "assistant", "content": "c", "reasoning_content": "ab"}


def test_items_of_a_response_become_messages() -> None:
    request = ResponsesRequest.parse(
        {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
                {**USER, "type": "message"},
                CALL,
                {**CALL, "call_id": "2"},
                {"type": "function_call_output", "call_id": "1", "output": "3", "id": None, "status": None},
                {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
                },
            ]
        }
    )
    assert request.messages == [
        {"role": "developer", "content": "a"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "2"}]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "tool", "content": "4", "tool_call_id": "2"},
        {"role": "assistant", "content": "b"},
    ]


def test_an_effort_of_reasoning_of_a_response() -> None:
    request = ResponsesRequest.parse({"input": "a", "reasoning": {"effort": "none", "summary": "auto"}})
    assert request.options.template_variables == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
    }
    assert ResponsesRequest.parse({"input": "a", "reasoning": {}}).options.template_variables is None


def test_tools_of_a_response_have_the_form_of_the_chat_api() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
    request = ResponsesRequest.parse({"input": "a", "tools": [tool]})
    assert request.options.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
    )
    assert request.repeated["tools"] == [tool]
    hidden = ResponsesRequest.parse({"input": "a", "tools": [tool], "tool_choice": "none"})
    assert hidden.options.tools == ()
    assert hidden.repeated["tool_choice"] == "none"


def test_log_probabilities_of_a_response() -> None:
    included = {"input": "a", "include": ["message.output_text.logprobs"]}
    assert ResponsesRequest.parse({"input": "a"}).options.logprobs is None
    assert ResponsesRequest.parse(included).options.logprobs == 0
    assert ResponsesRequest.parse({**included, "top_logprobs": 3}).options.logprobs == 3
    assert error_of(ResponsesRequest.parse, {"input": "a", "top_logprobs": 3}).param == "top_logprobs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f", "strict": True}]}, "tools[0].strict"),
        ({"input": [USER, {"type": "item_reference", "id": "1"}]}, "input[1].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ],
)
def test_what_responses_do_not_do(fields: dict[str, Any], param: str) -> None:
    error = error_of(ResponsesRequest.parse, {"input": "a", **fields})
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_FIELD, param)
    if param == "previous_response_id":
        assert error.hint == "responses are not stored, send the whole conversation as input"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, ErrorCode.MISSING_FIELD, "input"),
        ({"input": []}, ErrorCode.INVALID_VALUE, "input"),
        ({"input": [3]}, ErrorCode.INVALID_TYPE, "input[0]"),
        ({"input": [{"content": "a"}]}, ErrorCode.MISSING_FIELD, "input[0].role"),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, ErrorCode.UNKNOWN_FIELD, "input[0].x"),
        ({"input": [{"role": "tool", "content": "a"}]}, ErrorCode.INVALID_VALUE, "input[0].role"),
        ({"input": [{"type": "thing"}]}, ErrorCode.INVALID_VALUE, "input[0].type"),
        (
            {"instructions": "i", "input": [USER, {**CALL, "arguments": "{"}]},
            ErrorCode.INVALID_VALUE,
            "input[1].tool_calls[0]",
        ),
        ({"input": "a", "include": ["file_search_call.results"]}, ErrorCode.INVALID_VALUE, "include[0]"),
        ({"input": "a", "max_output_tokens": 0}, ErrorCode.INVALID_VALUE, "max_output_tokens"),
    ],
)
def test_bad_bodies_of_responses(fields: dict[str, Any], code: ErrorCode, param: str) -> None:
    error = error_of(ResponsesRequest.parse, fields)
    assert (error.code, error.param) == (code, param)
    assert param in str(error)


def test_embeddings() -> None:
    request = EmbeddingRequest.parse({"input": ["a"], "encoding_format": "base64", "dimensions": 4, "user": "u"})
    assert request == EmbeddingRequest(None, ("a",), as_base64=True, dimensions=4)
    request.check_dimensions(4)
    assert error_of(request.check_dimensions, 8).code is ErrorCode.UNSUPPORTED_FIELD
    assert error_of(EmbeddingRequest.parse, {"input": "a", "encoding_format": "int8"}).param == "encoding_format"


def test_tokens_of_a_text() -> None:
    assert TokenizeRequest.parse({"content": "a", "add_special": True, "with_pieces": True}) == (
        TokenizeRequest.parse({"prompt": "a", "add_special_tokens": True, "return_token_strs": True})
    )
    request = TokenizeRequest.parse({"content": "a"})
    assert (request.text, request.messages, request.add_special, request.with_pieces) == ("a", None, False, False)
    assert TokenizeRequest.parse({"content": ""}).text == ""


def test_tokens_of_a_conversation() -> None:
    request = TokenizeRequest.parse({"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}})
    assert (request.text, request.messages) == (None, [USER])
    assert request.options.template_variables == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, ErrorCode.MISSING_FIELD, "content"),
        ({"content": "a", "messages": [USER]}, ErrorCode.INVALID_VALUE, "content"),
        ({"content": "a", "prompt": "b"}, ErrorCode.INVALID_VALUE, "prompt"),
        ({"messages": []}, ErrorCode.INVALID_VALUE, "messages"),
        ({"content": "a", "chat_template_kwargs": {"tools": []}}, ErrorCode.INVALID_VALUE, "chat_template_kwargs"),
    ],
)
def test_bad_bodies_of_tokens(body: dict[str, Any], code: ErrorCode, param: str) -> None:
    error = error_of(TokenizeRequest.parse, body)
    assert (error.code, error.param) == (code, param)


def test_the_text_of_tokens() -> None:
    assert decode_body({"tokens": [1, 2]}, DetokenizeBody).tokens == [1, 2]
    assert decode_body({"tokens": []}, DetokenizeBody).tokens == []
    assert error_of(lambda body: decode_body(body, DetokenizeBody), {"tokens": [-1]}).param == "tokens[0]"


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        (CompletionBody, completion_create_params.CompletionCreateParamsStreaming),
        (EmbeddingBody, embedding_create_params.EmbeddingCreateParams),
        (ResponsesBody, response_create_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_field_of_the_openai_client_is_known(body: Any, theirs: Any) -> None:
    assert set(get_type_hints(theirs)) <= set(body.__struct_fields__)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "role", "text"]), inner),
    max_leaves=8,
)
BODIES: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
    (CompletionBody, CompletionRequest.parse, {"prompt": "a"}),
    (ResponsesBody, ResponsesRequest.parse, {"input": "a"}),
    (EmbeddingBody, EmbeddingRequest.parse, {"input": "a"}),
    (TokenizeBody, TokenizeRequest.parse, {"content": "a"}),
    (DetokenizeBody, lambda body: decode_body(body, DetokenizeBody), {"tokens": []}),
)


@pytest.mark.parametrize(("struct", "parse", "smallest"), BODIES)
@given(data=st.data())
@settings(max_examples=40)
def test_any_field_is_accepted_or_one_error(
    struct: Any, parse: Any, smallest: dict[str, Any], data: st.DataObject
) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(struct.__struct_fields__), JSON, max_size=3))
    message = ""
    try:
        parse(json.dumps({**smallest, **fields}).encode())
    except RequestError as error:
        message = str(error)
    assert len(message) < 600


@pytest.mark.parametrize(("struct", "parse", "smallest"), BODIES)
def test_unknown_fields_are_refused(struct: Any, parse: Any, smallest: dict[str, Any]) -> None:
    error = error_of(parse, {**smallest, "unheard_of": 1})
    assert (error.code, error.param) == (ErrorCode.UNKNOWN_FIELD, "unheard_of")
    assert parse(smallest) == parse({**dict.fromkeys(struct.__struct_fields__), **smallest})
