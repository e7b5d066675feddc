"""Requests that OpenAI's clients send to a server, and what each of them must show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from edgerun import Engine, GenerateOptions
from edgerun.errors import ContextError
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from edgerun.runtime.decode import FinishReason
from edgerun.runtime.result import Reply
from support.openai_clients import ClientCall, Outcome
from support.openai_outcomes import (
    cached_tokens,
    expected_chat,
    expected_completion,
    expected_response,
    read_chat,
    read_completion,
    read_error,
    read_response,
    read_streamed_chat,
    read_streamed_completion,
    read_streamed_response,
    refusal,
)
from support.tiny_models import write_bundle, write_checkpoint, write_endless_bundle, write_json

CHAT, ENDLESS, VECTORS = "chat", "endless", "vectors"
"""Names of the models that the server has."""
BUSY_AFTER: Final = 2
"""Requests that the server answers at a time (1) or lets wait (1)."""

TELL: Final = [{"role": "user", "content": "tell me about the tone"}]
TOOL: Final = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
_GREEDY: Final = {"temperature": 0.0, "max_tokens": 12}
_SAMPLED: Final = {"temperature": 1.0, "seed": 7}
_TEMPLATE: Final = (
    "{% for t in tools or [] %}<|tool|>{{ t['function']['name'] }}{% endfor %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['name'] %}{{ m['name'] }}: {% endif %}{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A chat template that shows tools, calls and names of authors."""


@dataclass(frozen=True)
class Request:
    """A request, what is read of its outcome, and what that must be."""

    name: str
    call: ClientCall
    read: Callable[[Outcome], Any]
    expected: Any


def write_models(folder: Path) -> list[Path]:
    """Write the models CHAT, ENDLESS and VECTORS."""
    source = write_checkpoint(folder / "1", max_position_embeddings=512)
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(source / "tokenizer_config.json", {**settings, "chat_template": _TEMPLATE})
    chat = export_checkpoint(source, folder / CHAT, ExportRecipe(FP32)).bundle
    endless = write_endless_bundle(folder / "2").rename(folder / ENDLESS)
    recipe = ExportRecipe(FP32, hidden_states=True)
    return [chat, endless, write_bundle(folder / "3", weights=recipe).rename(folder / VECTORS)]


def openai_requests(engines: Mapping[str, Engine], client: str) -> list[Request]:
    """The requests, in the order in which they are made.

    Args:
        engines: the models of `write_models`, which say what the answers are.
        client: name of the client that makes them: conversations of two clients must not share a beginning.
    """
    chat = engines[CHAT]
    ending = _ending(chat)
    return [
        *_chats(chat),
        *_streamed_chats(chat, *ending),
        *_conversation(chat, client),
        *_completions(chat),
        *_responses(chat, *ending),
        *_models_and_embeddings(engines),
        *_errors(chat),
        *_leaving(engines[ENDLESS]),
    ]


def _chat(engine: Engine, name: str, messages: list[Any], options: Mapping[str, Any], /, **changed: Any) -> Request:
    """A chat, expected to be what the engine answers to the same messages and options.

    Args:
        engine: the model CHAT.
        name: what the request shows.
        messages: the conversation.
        options: options of the engine, which are fields of the request too.
        **changed: fields of the request that differ from the options; None for those that it does not have.
    """
    options = {**_GREEDY, **options}
    fields = {"model": CHAT, "messages": messages, **options, **changed}
    call = ClientCall("chat.completions.create", {key: value for key, value in fields.items() if value is not None})
    expected = expected_chat(engine.generate(messages, GenerateOptions(**options)), CHAT)
    if not changed.get("stream"):
        return Request(name, call, read_chat, expected)
    if "stream_options" not in changed:
        expected["usage"] = []
    return Request(name, call, read_streamed_chat, {**expected, "ids": 1, "is in pieces": True})


def _chats(engine: Engine) -> list[Request]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
    used_tool = [
        *TELL,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a pure tone"},
    ]
    greedy = engine.generate(TELL, **_GREEDY).text
    requests = [
        _chat(engine, "system", [{"role": "system", "content": "be brief"}, *TELL], {}),
        _chat(
            engine, "turns", [*TELL, {"role": "assistant", "content": "no"}, {"role": "user", "content": "go on"}], {}
        ),
        _chat(engine, "tool messages", used_tool, {"tools": (TOOL,)}, tools=[TOOL]),
        _chat(engine, "max_tokens", TELL, {"max_tokens": 3}),
        _chat(engine, "max_completion_tokens", TELL, {"max_tokens": 4}, max_tokens=None, max_completion_tokens=4),
        _chat(engine, "stop: a string", TELL, {"stop": (greedy[4:6],)}, stop=greedy[4:6]),
        _chat(engine, "stop: a list", TELL, {"stop": ("never", greedy[2:4])}, stop=["never", greedy[2:4]]),
        _chat(engine, "seed", TELL, _SAMPLED),
        _chat(engine, "another seed", TELL, {**_SAMPLED, "seed": 8}),
        _chat(engine, "temperature", TELL, {**_SAMPLED, "temperature": 0.5}),
        _chat(engine, "top_p", TELL, {**_SAMPLED, "top_p": 0.2}),
        _chat(engine, "penalties", TELL, {"presence_penalty": 2.0, "frequency_penalty": 2.0}),
        _chat(engine, "logit_bias", TELL, {"logit_bias": {100: 100.0}}, logit_bias={"100": 100}),
        _chat(engine, "n", TELL, {**_SAMPLED, "n": 3}),
        _chat(engine, "logprobs", TELL, {**_SAMPLED, "n": 2, "logprobs": 3}, logprobs=True, top_logprobs=3),
    ]
    # Every request of these is there for an option or a message that changes the answer.
    texts = {request.name: request.expected["texts"] for request in requests}
    assert all(text != [greedy] for text in texts.values()), texts
    assert len({tuple(texts[name]) for name in ("seed", "another seed", "temperature", "top_p")}) == 4, texts
    assert len(set(texts["n"])) == 3, texts
    return requests


def _streamed_chats(engine: Engine, ending: list[Any], ended: Reply) -> list[Request]:
    usage = {"include_usage": True}
    whole = ClientCall(
        "chat.completions.stream", {"model": CHAT, "messages": ending, "temperature": 0, "max_tokens": 100}
    )
    return [
        _chat(engine, "stream", TELL, {}, stream=True),
        _chat(engine, "stream: usage", TELL, {}, stream=True, stream_options=usage),
        _chat(engine, "stream: n", TELL, {**_SAMPLED, "n": 4}, stream=True, stream_options=usage),
        _chat(
            engine,
            "stream: logprobs",
            TELL,
            {**_SAMPLED, "n": 2, "logprobs": 2},
            stream=True,
            logprobs=True,
            top_logprobs=2,
        ),
        Request("stream: put together by the client", whole, read_chat, {**expected_chat(ended, CHAT), "usage": []}),
    ]


def _ending(engine: Engine) -> tuple[list[Any], Reply]:
    """Messages and their answer, which the model ends: the clients put together no streams of other answers."""
    asked = ([{"role": "user", "content": f"tell me about tone {number}"}] for number in range(100))
    answers = ((messages, engine.generate(messages, temperature=0.0, max_tokens=100)) for messages in asked)
    return next(each for each in answers if each[1].finish_reason is FinishReason.STOP)


def _conversation(engine: Engine, client: str) -> list[Request]:
    first = [{"role": "user", "content": f"{client} asks a question that nobody else asks"}]
    answer = engine.generate(first, **_GREEDY)
    second = [*first, {"role": "assistant", "content": answer.text}, {"role": "user", "content": "go on"}]
    reply = engine.generate(second, **_GREEDY)
    assert answer.stats.prompt_tokens <= reply.stats.reused_tokens < reply.stats.prompt_tokens
    return [
        Request(
            name,
            ClientCall("chat.completions.create", {"model": CHAT, "messages": messages, **_GREEDY}),
            lambda outcome: {**read_chat(outcome), "cached": cached_tokens(outcome)},
            {**expected_chat(expected, CHAT), "cached": expected.stats.reused_tokens},
        )
        for name, messages, expected in (("a first turn", first, answer), ("a second turn", second, reply))
    ]


def _completions(engine: Engine) -> list[Request]:
    prompts = ["the tone of the", "another one"]
    ids = [engine.tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    continued = [engine.generate(prompt, raw=True, **_GREEDY) for prompt in prompts]
    several = {**_SAMPLED, "max_tokens": 12, "n": 2}
    sampled, with_logprobs = (
        [engine.generate(prompt, GenerateOptions(raw=True, logprobs=logprobs, **several)) for prompt in prompts]
        for logprobs in (None, 2)
    )

    def completion(name: str, prompt: Any, replies: list[Reply], **fields: Any) -> Request:
        arguments = {"model": CHAT, "prompt": prompt, **_GREEDY, **fields}
        read = read_streamed_completion if "stream" in fields else read_completion
        return Request(name, ClientCall("completions.create", arguments), read, expected_completion(replies))

    return [
        completion("completion: a text", prompts[0], continued[:1]),
        completion("completion: texts", prompts, continued),
        completion("completion: token ids", ids[1], continued[1:]),
        completion(
            "completion: lists of token ids, streamed",
            ids,
            sampled,
            **several,
            stream=True,
            stream_options={"include_usage": True},
        ),
        completion("completion: logprobs", prompts, with_logprobs, **several, logprobs=2),
    ]


def _responses(engine: Engine, ending: list[Any], ended: Reply) -> list[Request]:
    system = {"role": "system", "content": "be brief"}
    turns = [*TELL, {"role": "assistant", "content": "no"}, {"role": "user", "content": "go on"}]
    cut = {"model": CHAT, "temperature": 0, "max_output_tokens": 12}
    return [
        Request(
            "response",
            ClientCall("responses.create", {**cut, "input": TELL[0]["content"], "instructions": "be brief"}),
            read_response,
            expected_response(engine.generate([system, *TELL], **_GREEDY)),
        ),
        Request(
            "response: streamed",
            ClientCall("responses.create", {**cut, "input": turns, "stream": True}),
            read_streamed_response,
            {
                "events": [
                    "response.created",
                    "response.in_progress",
                    "response.output_item.added",
                    "response.content_part.added",
                    "response.output_text.delta",
                    "response.output_text.done",
                    "response.content_part.done",
                    "response.output_item.done",
                    "response.incomplete",
                ],
                "are numbered": True,
                "text": engine.generate(turns, **_GREEDY).text,
                "response": {**expected_response(engine.generate(turns, **_GREEDY)), "output_text": None},
            },
        ),
        Request(
            "response: put together by the client",
            ClientCall(
                "responses.stream", {"model": CHAT, "input": ending, "temperature": 0, "max_output_tokens": 100}
            ),
            read_response,
            expected_response(ended),
        ),
    ]


def _models_and_embeddings(engines: Mapping[str, Engine]) -> list[Request]:
    texts = ["a text", "and another one"]
    engine = engines[VECTORS]

    def embeddings(name: str, given: Any, encoded: list[str], **fields: Any) -> Request:
        tokens = sum(len(engine.tokenizer.encode(text, add_special_tokens=True)) for text in encoded)
        return Request(
            name,
            ClientCall("embeddings.create", {"model": VECTORS, "input": given, **fields}),
            lambda outcome: {
                "indexes": [each["index"] for each in outcome.objects[0]["data"]],
                "vectors": [number for each in outcome.objects[0]["data"] for number in each["embedding"]],
                "usage": outcome.objects[0]["usage"],
            },
            {
                "indexes": [*range(len(encoded))],
                "vectors": pytest.approx(engine.embed(encoded).ravel().tolist(), abs=1e-5),
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            },
        )

    return [
        Request(
            "models",
            ClientCall("models.list", {}),
            lambda outcome: [(each["id"], each["object"], each["owned_by"]) for each in outcome.objects],
            [(name, "model", "edge-run") for name in engines],
        ),
        Request(
            "a model",
            ClientCall("models.retrieve", {"model": VECTORS}),
            lambda outcome: outcome.objects[0]["id"],
            VECTORS,
        ),
        embeddings("embeddings: a text", texts[0], texts[:1]),
        embeddings("embeddings: texts as numbers", texts, texts, encoding_format="float"),
    ]


def _errors(engine: Engine) -> list[Request]:
    long = [{"role": "user", "content": "word " * 600}]
    too_long = refusal("BadRequestError", 400, "context_length_exceeded", None, _context_error(engine, long))

    def chat(name: str, expected: dict[str, Any], extra: Mapping[str, Any] | None = None, **fields: Any) -> Request:
        arguments = {"model": CHAT, "messages": TELL, **_GREEDY, **fields}
        return Request(
            f"error: {name}",
            ClientCall("chat.completions.create", arguments, dict(extra or {})),
            read_error,
            expected,
        )

    unknown = refusal("NotFoundError", 404, "model_not_found", "model", "gpt-4", kind="not_found_error")
    return [
        chat("unknown model", unknown, model="gpt-4"),
        chat(
            "unknown field",
            refusal("BadRequestError", 400, "unknown_parameter", "colour", "colour"),
            {"colour": "red"},
        ),
        chat("context too long", too_long, messages=long),
        chat("context too long, streamed", too_long, messages=long, stream=True),
        Request(
            "error: no hidden states",
            ClientCall("embeddings.create", {"model": CHAT, "input": "text"}),
            read_error,
            refusal("BadRequestError", 400, "invalid_request", None, "does not give hidden states"),
        ),
        Request(
            "error: wrong API key",
            ClientCall("models.list", {}, api_key="wrong"),
            read_error,
            refusal("AuthenticationError", 401, "invalid_api_key", None, "API key", kind="authentication_error"),
        ),
    ]


def _context_error(engine: Engine, messages: list[Any]) -> str:
    """What the engine says to a prompt that is too long."""
    with pytest.raises(ContextError) as raised:
        engine.generate(messages, **_GREEDY)
    assert len(re.findall(r"\d+", str(raised.value))) >= 2
    return str(raised.value)


def _leaving(engine: Engine) -> list[Request]:
    answer = engine.generate(TELL, temperature=0.0, max_tokens=40).text
    endless = {"model": ENDLESS, "messages": TELL, "temperature": 0, "stream": True, "max_tokens": 20_000}
    chat = {**endless, "stream": False, "max_tokens": 40}

    def again(name: str, retries: int) -> Request:
        call = ClientCall("chat.completions.create", chat, retries=retries)
        return Request(name, call, lambda outcome: read_chat(outcome)["texts"], [answer])

    return [
        Request(
            "a stream that is left",
            ClientCall("chat.completions.create", endless, leave_after=4),
            lambda outcome: (
                len(outcome.objects),
                read_streamed_chat(outcome)["is in pieces"],
                answer.startswith(read_streamed_chat(outcome)["texts"][0]),
            ),
            (4, True, True),
        ),
        again("the same prompt after that", 0),
        Request(
            "error: busy",
            ClientCall("chat.completions.create", chat, held=(endless,) * BUSY_AFTER),
            read_error,
            refusal("RateLimitError", 429, "busy", None, "wait", kind="rate_limit_error"),
        ),
        again("the same prompt with retries", 5),
    ]
