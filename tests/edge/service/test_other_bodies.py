"""Bodies of text completions, responses, embeddings and tokens; what all bodies share; codes of errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from openai.types import chat, completion_create_params, embedding_create_params
from openai.types.responses import response_create_params

from edgerun import errors
from edgerun.edge.service.body_decoder import decode_body
from edgerun.edge.service.generation_fields import GenerationRequest
from edgerun.edge.service.request_error import ErrorCode, RequestError, describe
from edgerun.edge.service.responses_body import ResponsesBody
from edgerun.edge.service.text_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
    texts_or_ids,
)
from support import generated_texts

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
    request = CompletionBody.parse({"prompt": prompt})
    assert request.prompts == prompts
    assert request.options.raw
    assert request.options.max_tokens == 16
    assert texts_or_ids("input", prompt) == prompts


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
    for field, parse in (("prompt", CompletionBody.parse), ("input", EmbeddingBody.parse)):
        error = error_of(parse, {field: prompt})
        assert (error.code, error.param) == (code, f"{field}{place}")


def test_options_of_a_text_completion() -> None:
    fields = {"max_tokens": 3, "n": 2, "best_of": 2, "echo": False, "logprobs": 2, "stop": "x", "temperature": 0.5}
    options = CompletionBody.parse({"prompt": "a", **fields}).options
    assert CompletionBody.parse({"prompt": "a", "max_tokens": -1}).options.max_tokens is None
    assert (options.max_tokens, options.n, options.logprobs) == (3, 2, 2)
    assert (options.stops, options.temperature) == (("x",), 0.5)


@pytest.mark.parametrize("parse", [CompletionBody.parse, ChatBody.parse])
def test_the_best_of_several_answers(parse: Callable[..., GenerationRequest]) -> None:
    prompt = {"prompt": "a"} if parse == CompletionBody.parse else {"messages": [USER]}
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


def test_fields_of_a_response() -> None:
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
    fields = {"instructions": "Be brief.", "max_output_tokens": 5, "tools": [tool]}
    request = ResponsesBody.parse({"input": "hello", **fields, "reasoning": {"effort": "none", "summary": "auto"}})
    assert request.messages == [{"role": "system", "content": "Be brief."}, USER]
    assert request.options.max_tokens == 5
    assert request.options.tools == (
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
    )
    assert request.options.template_variables == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
    }
    assert request.options.logprobs is None
    assert {name: request.repeated[name] for name in fields} == fields
    hidden = ResponsesBody.parse({"input": "a", "tools": [tool], "tool_choice": "none", "reasoning": {}})
    assert hidden.options.tools == ()
    assert hidden.repeated["tool_choice"] == "none"
    assert hidden.options.template_variables is None
    included = {"input": "a", "include": ["message.output_text.logprobs"]}
    assert ResponsesBody.parse(included).options.logprobs == 0
    assert ResponsesBody.parse({**included, "top_logprobs": 3}).options.logprobs == 3
    assert error_of(ResponsesBody.parse, {"input": "a", "top_logprobs": 3}).param == "top_logprobs"


def test_items_of_a_response_become_messages() -> None:
    thought = [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": each}]} for each in ("a", "b")]
    request = ResponsesBody.parse(
        {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
                {**USER, "type": "message"},
                CALL,
                {**CALL, "call_id": "2"},
                {"type": "function_call_output", "call_id": "1", "output": "3", "id": None, "status": None},
                {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "4"}]},
                *thought,
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
                },
                USER,
            ]
        }
    )
    assert request.messages == [
        {"role": "developer", "content": "a"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CHAT_CALL, {**CHAT_CALL, "id": "2"}]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "tool", "content": "4", "tool_call_id": "2"},
        {"role": "assistant", "content": "b", "reasoning_content": "ab"},
        USER,
    ]


def test_embeddings() -> None:
    request = EmbeddingBody.parse({"input": ["a"], "encoding_format": "base64", "dimensions": 4, "user": "u"})
    request.check_dimensions(4)
    assert error_of(request.check_dimensions, 8).code is ErrorCode.UNSUPPORTED_FIELD
    assert error_of(EmbeddingBody.parse, {"input": "a", "encoding_format": "int8"}).param == "encoding_format"


def test_texts_and_conversations_to_tokenize_and_tokens_to_decode() -> None:
    request = TokenizeBody.parse({"prompt": "a", "add_special_tokens": True, "return_token_strs": True})
    assert (request.content, request.add_special, request.with_pieces) == ("a", True, True)
    assert TokenizeBody.parse({"content": ""}).content == ""
    request = TokenizeBody.parse({"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}})
    assert (request.content, len(request.messages)) == (None, 1)
    for tokens in ([1, 2], []):
        assert decode_body({"tokens": tokens}, DetokenizeBody).tokens == tokens
    assert error_of(lambda body: decode_body(body, DetokenizeBody), {"tokens": [-1]}).param == "tokens[0]"


UNSUPPORTED: list[tuple[Parse, dict[str, Any], str]] = [
    (CompletionBody.parse, {"prompt": "a", "echo": True}, "echo"),
    *(
        (ResponsesBody.parse, {"input": "a", **fields}, param)
        for fields, param in (
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
            ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        )
    ),
]
"""What edge-run does not do."""
WRONG: list[tuple[Parse, dict[str, Any], ErrorCode, str]] = [
    (ResponsesBody.parse, {}, ErrorCode.MISSING_FIELD, "input"),
    (ResponsesBody.parse, {"input": []}, ErrorCode.INVALID_VALUE, "input"),
    (ResponsesBody.parse, {"input": [3]}, ErrorCode.INVALID_TYPE, "input[0]"),
    (ResponsesBody.parse, {"input": [{"content": "a"}]}, ErrorCode.MISSING_FIELD, "input[0].role"),
    (ResponsesBody.parse, {"input": [{"role": "user", "content": "a", "x": 1}]}, ErrorCode.UNKNOWN_FIELD, "input[0].x"),
    (ResponsesBody.parse, {"input": [{"role": "tool", "content": "a"}]}, ErrorCode.INVALID_VALUE, "input[0].role"),
    (ResponsesBody.parse, {"input": [{"type": "thing"}]}, ErrorCode.INVALID_VALUE, "input[0].type"),
    (
        ResponsesBody.parse,
        {"instructions": "i", "input": [USER, {**CALL, "arguments": "{"}]},
        ErrorCode.INVALID_VALUE,
        "input[1].tool_calls[0]",
    ),
    (
        ResponsesBody.parse,
        {"input": "a", "include": ["file_search_call.results"]},
        ErrorCode.INVALID_VALUE,
        "include[0]",
    ),
    (ResponsesBody.parse, {"input": "a", "max_output_tokens": 0}, ErrorCode.INVALID_VALUE, "max_output_tokens"),
    (TokenizeBody.parse, {}, ErrorCode.MISSING_FIELD, "content"),
    (TokenizeBody.parse, {"content": "a", "messages": [USER]}, ErrorCode.INVALID_VALUE, "content"),
    (TokenizeBody.parse, {"content": "a", "prompt": "b"}, ErrorCode.INVALID_VALUE, "prompt"),
    (TokenizeBody.parse, {"messages": []}, ErrorCode.INVALID_VALUE, "messages"),
    (
        TokenizeBody.parse,
        {"content": "a", "chat_template_kwargs": {"tools": []}},
        ErrorCode.INVALID_VALUE,
        "chat_template_kwargs",
    ),
]


@pytest.mark.parametrize(
    ("parse", "body", "code", "param"),
    [*((parse, body, ErrorCode.UNSUPPORTED_FIELD, param) for parse, body, param in UNSUPPORTED), *WRONG],
)
def test_what_is_refused_is_named(parse: Parse, body: dict[str, Any], code: ErrorCode, param: str) -> None:
    error = error_of(parse, body)
    assert (error.code, error.param) == (code, param)
    if param == "previous_response_id":
        assert error.hint == "responses are not stored, send the whole conversation as input"


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        (ChatBody, chat.completion_create_params.CompletionCreateParamsStreaming),
        (CompletionBody, completion_create_params.CompletionCreateParamsStreaming),
        (EmbeddingBody, embedding_create_params.EmbeddingCreateParams),
        (ResponsesBody, response_create_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_field_of_the_openai_client_is_known(body: Any, theirs: Any) -> None:
    assert set(get_type_hints(theirs)) <= set(body.__struct_fields__)


BODIES: tuple[tuple[Any, Any, dict[str, Any]], ...] = (
    (ChatBody, ChatBody.parse, {"messages": [USER]}),
    (CompletionBody, CompletionBody.parse, {"prompt": "a"}),
    (ResponsesBody, ResponsesBody.parse, {"input": "a"}),
    (EmbeddingBody, EmbeddingBody.parse, {"input": "a"}),
    (TokenizeBody, TokenizeBody.parse, {"content": "a"}),
    (DetokenizeBody, lambda body: decode_body(body, DetokenizeBody), {"tokens": []}),
)


@pytest.mark.parametrize(("struct", "parse", "smallest"), BODIES)
def test_unknown_fields_are_refused(struct: Any, parse: Any, smallest: dict[str, Any]) -> None:
    error = error_of(parse, {**smallest, "unheard_of": 1})
    assert (error.code, error.param) == (ErrorCode.UNKNOWN_FIELD, "unheard_of")
    assert parse(smallest) == parse({**dict.fromkeys(struct.__struct_fields__), **smallest})


def test_the_tables_list_every_field_of_the_bodies() -> None:
    page = generated_texts.PAGE.read_text(encoding="utf-8")
    assert all(f"\n## {heading}\n" in page for heading in generated_texts.BODIES)
    assert generated_texts.with_tables(page) == page


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ContextError("context full: 527 of 512 tokens", "send less"), "context_length_exceeded"),
        (errors.TemplateError("roles must alternate"), "template_error"),
        (errors.BusyError("64 requests wait"), "busy"),
        (errors.BundleError("no model"), "model_error"),
        (errors.CheckpointError("damaged"), "model_error"),
        (errors.HubError("not reached"), "model_error"),
        (errors.DeviceError("no provider"), "model_error"),
        (errors.InputError("top-k is -1"), "invalid_request"),
        (errors.EdgeError("infinite logits"), "server_error"),
    ],
)
def test_every_error_gets_its_code_and_keeps_its_message(error: errors.EdgeError, code: str) -> None:
    described = describe(error)
    assert (described.code, described.param) == (code, None)
    assert str(described) == str(error)
    assert described.__cause__ is error
    assert describe(described) is described


PROGRAM = """
import sys, threading, types
from edgerun.edge.service.body_decoder import decode_body
SOURCE = '''
from __future__ import annotations
from typing import Annotated
import msgspec
class A(msgspec.Struct, tag="a", tag_field="t"):
    x: Annotated[int, msgspec.Meta(ge=1)] | None = None
class B(msgspec.Struct, tag="b", tag_field="t"):
    x: list[A | None] | None = None
class Body(msgspec.Struct):
    m: list[A | B]
    z: dict[str, B] | None = None
'''
sys.setswitchinterval(1e-6)
for number in range(100):
    module = sys.modules[f"bodies{number}"] = types.ModuleType(f"bodies{number}")
    exec(SOURCE, module.__dict__)
    begin, decoded = threading.Barrier(6), []
    def work():
        begin.wait()
        decoded.append(decode_body({"m": [{"t": "a", "x": 2}]}, module.Body))
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(decoded) == 6
"""


def test_threads_decode_the_first_bodies_of_a_kind() -> None:
    # A process of its own: without the lock around the first use of a type, msgspec crashes.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=False, timeout=300)
    assert (done.returncode, done.stderr.decode()) == (0, "")
