"""Requests that OpenAI's clients send to a server, and what each of them must show."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Final

import pytest

from edgerun import Engine, GenerateOptions
from edgerun.errors import ContextError
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from edgerun.runtime.decode import FinishReason
from edgerun.runtime.result import Reply
from support.openai_clients import ClientCall, Outcome
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
    """A request, and what its outcome must show: values by the names of fields, at any depth."""

    name: str
    call: ClientCall
    expected: dict[str, Any]

    def shown(self, outcome: Outcome) -> Any:
        """What an outcome has of the expected fields."""
        if outcome.error is not None:
            return _fields(outcome.error, self.expected)
        if self.call.arguments.get("stream"):
            return _fields(_joined(outcome.objects), self.expected)
        if self.call.method == "models.list":
            return _fields({"data": outcome.objects}, self.expected)
        (found,) = outcome.objects
        return _fields({**found, "output_text": outcome.text}, self.expected)


def _fields(value: Any, expected: Any) -> Any:
    """A value without the fields that are not expected."""
    if isinstance(expected, dict) and isinstance(value, dict):
        return {name: _fields(value.get(name), each) for name, each in expected.items()}
    if isinstance(expected, list) and isinstance(value, list) and len(value) == len(expected):
        return [_fields(*each) for each in zip(value, expected, strict=True)]
    return set(value) if isinstance(expected, set) else value


def _joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The object that the chunks of a stream are the parts of."""
    if "type" in chunks[0]:
        return {
            **chunks[-1]["response"],
            "events": [kind for kind, _ in groupby(event["type"] for event in chunks)],
            "numbers": [event["sequence_number"] for event in chunks] == [*range(len(chunks))],
            "output_text": "".join(event["delta"] for event in chunks if event["type"] == "response.output_text.delta"),
        }
    choices: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        delta = choice.get("delta", {"content": choice.get("text")})
        first = {"index": choice["index"], "message": {"role": delta.get("role")}, "pieces": [], "logprobs": []}
        whole = choices.setdefault(choice["index"], first)
        assert whole.get("finish_reason") is None
        whole["finish_reason"] = choice["finish_reason"]
        whole["pieces"] += filter(None, [delta.get("content")])
        whole["logprobs"] += (choice["logprobs"] or {}).get("content", [])
    for whole in choices.values():
        whole["text"] = whole["message"]["content"] = "".join(whole["pieces"])
        whole["in pieces"] = len(whole["pieces"]) > 1
        whole["logprobs"] = {"content": whole["logprobs"]} if whole["logprobs"] else None
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")] or [None]
    ids = {chunk["id"] for chunk in chunks}
    ordered = [choices[index] for index in sorted(choices)]
    return {**chunks[0], "usage": usage, "choices": ordered, "ids": len(ids), "chunks": len(chunks)}


@dataclass(frozen=True, eq=False)
class _Fitting:
    """Equals every text for which a condition holds."""

    fits: Callable[[str], bool]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.fits(other)

    __hash__ = None


def _expected_chat(reply: Reply, model: str) -> dict[str, Any]:
    def logprobs(choice: Reply) -> dict[str, Any] | None:
        def numbered(token: Any) -> dict[str, Any]:
            said = {"token": token.text, "bytes": list(token.bytes)}
            return {**said, "logprob": pytest.approx(token.logprob, abs=1e-4)}

        tokens = [{**numbered(token), "top_logprobs": [*map(numbered, token.top)]} for token in choice.logprobs]
        return {"content": tokens} if tokens else None

    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": choice.text},
            "finish_reason": choice.finish_reason.value,
            "logprobs": logprobs(choice),
        }
        for index, choice in enumerate(reply.choices)
    ]
    return {"model": model, "choices": choices, "usage": _usage([reply])}


def _usage(replies: list[Reply]) -> dict[str, int]:
    prompt = sum(reply.stats.prompt_tokens for reply in replies)
    answers = sum(choice.stats.completion_tokens for reply in replies for choice in reply.choices)
    return {"prompt_tokens": prompt, "completion_tokens": answers, "total_tokens": prompt + answers}


def _expected_completion(replies: list[Reply]) -> dict[str, Any]:
    choices = [
        {
            "index": index,
            "text": answer.text,
            "finish_reason": answer.finish_reason.value,
            "logprobs": {
                "tokens": [token.text for token in answer.logprobs],
                "token_logprobs": pytest.approx([token.logprob for token in answer.logprobs], abs=1e-4),
                "top_logprobs": [{each.text for each in token.top} for token in answer.logprobs],
                "text_offset": [*accumulate((len(token.text) for token in answer.logprobs), initial=0)][:-1],
            }
            if answer.logprobs
            else None,
        }
        for index, answer in enumerate(answer for reply in replies for answer in reply.choices)
    ]
    return {"choices": choices, "usage": _usage(replies)}


def _expected_response(reply: Reply) -> dict[str, Any]:
    ended = reply.finish_reason is FinishReason.STOP
    prompt, completion, total = _usage([reply]).values()
    return {
        "status": "completed" if ended else "incomplete",
        "incomplete_details": None if ended else {"reason": "max_output_tokens"},
        "output": [{"content": [{"text": reply.text}]}],
        "output_text": reply.text,
        "usage": {"input_tokens": prompt, "output_tokens": completion, "total_tokens": total},
    }


def _refusal(
    name: str, status: int, code: str, param: str | None, said: str, *, kind: str = "invalid_request_error"
) -> dict[str, Any]:
    """What is described of an exception whose message contains `said`."""
    message = _Fitting(lambda text: said in text)
    return {"class": name, "status": status, "code": code, "param": param, "type": kind, "message": message}


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
    expected = _expected_chat(engine.generate(messages, GenerateOptions(**options)), CHAT)
    if changed.get("stream"):
        expected["ids"] = 1
        for choice in expected["choices"]:
            choice["in pieces"] = True
        if "stream_options" not in changed:
            expected["usage"] = None
    return Request(name, call, expected)


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
    texts = {
        request.name: tuple(choice["message"]["content"] for choice in request.expected["choices"])
        for request in requests
    }
    assert all(text != (greedy,) for text in texts.values()), texts
    assert len({texts[name] for name in ("seed", "another seed", "temperature", "top_p")}) == 4, texts
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
        Request("stream: put together by the client", whole, {**_expected_chat(ended, CHAT), "usage": None}),
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
    requests = [_chat(engine, "a first turn", first, {}), _chat(engine, "a second turn", second, {})]
    for request, expected in zip(requests, (answer, reply), strict=True):
        request.expected["usage"]["prompt_tokens_details"] = {"cached_tokens": expected.stats.reused_tokens}
    return requests


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
        return Request(name, ClientCall("completions.create", arguments), _expected_completion(replies))

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
    streamed = engine.generate(turns, **_GREEDY)
    return [
        Request(
            "response",
            ClientCall("responses.create", {**cut, "input": TELL[0]["content"], "instructions": "be brief"}),
            _expected_response(engine.generate([system, *TELL], **_GREEDY)),
        ),
        Request(
            "response: streamed",
            ClientCall("responses.create", {**cut, "input": turns, "stream": True}),
            {
                **_expected_response(streamed),
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
                "numbers": True,
            },
        ),
        Request(
            "response: put together by the client",
            ClientCall(
                "responses.stream", {"model": CHAT, "input": ending, "temperature": 0, "max_output_tokens": 100}
            ),
            _expected_response(ended),
        ),
    ]


def _models_and_embeddings(engines: Mapping[str, Engine]) -> list[Request]:
    texts = ["a text", "and another one"]
    engine = engines[VECTORS]

    def embeddings(name: str, given: Any, encoded: list[str], **fields: Any) -> Request:
        tokens = sum(len(engine.tokenizer.encode(text, add_special_tokens=True)) for text in encoded)
        vectors = [pytest.approx(vector, abs=1e-5) for vector in engine.embed(encoded).tolist()]
        expected = {
            "data": [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return Request(name, ClientCall("embeddings.create", {"model": VECTORS, "input": given, **fields}), expected)

    models = [{"id": name, "object": "model", "owned_by": "edge-run"} for name in engines]
    return [
        Request("models", ClientCall("models.list", {}), {"data": models}),
        Request("a model", ClientCall("models.retrieve", {"model": VECTORS}), {"id": VECTORS}),
        embeddings("embeddings: a text", texts[0], texts[:1]),
        embeddings("embeddings: texts as numbers", texts, texts, encoding_format="float"),
    ]


def _errors(engine: Engine) -> list[Request]:
    long = [{"role": "user", "content": "word " * 600}]
    with pytest.raises(ContextError, match=r"\d+\D+\d+") as raised:
        engine.generate(long, **_GREEDY)
    too_long = _refusal("BadRequestError", 400, "context_length_exceeded", None, str(raised.value))
    unknown = _refusal("NotFoundError", 404, "model_not_found", "model", "gpt-4", kind="not_found_error")
    no_field = _refusal("BadRequestError", 400, "unknown_parameter", "colour", "colour")
    no_vectors = _refusal("BadRequestError", 400, "invalid_request", None, "does not give hidden states")
    wrong_key = _refusal("AuthenticationError", 401, "invalid_api_key", None, "API key", kind="authentication_error")

    def chat(**fields: Any) -> dict[str, Any]:
        return {"model": CHAT, "messages": TELL, **_GREEDY, **fields}

    method = "chat.completions.create"
    return [
        Request("error: unknown model", ClientCall(method, chat(model="gpt-4")), unknown),
        Request("error: unknown field", ClientCall(method, chat(), {"colour": "red"}), no_field),
        Request("error: context too long", ClientCall(method, chat(messages=long)), too_long),
        Request("error: context too long, streamed", ClientCall(method, chat(messages=long, stream=True)), too_long),
        Request(
            "error: no hidden states", ClientCall("embeddings.create", {"model": CHAT, "input": "text"}), no_vectors
        ),
        Request("error: wrong API key", ClientCall("models.list", {}, api_key="wrong"), wrong_key),
    ]


def _leaving(engine: Engine) -> list[Request]:
    answer = engine.generate(TELL, temperature=0.0, max_tokens=40).text
    endless = {"model": ENDLESS, "messages": TELL, "temperature": 0, "stream": True, "max_tokens": 20_000}
    chat = {**endless, "stream": False, "max_tokens": 40}
    begun = {"chunks": 4, "choices": [{"in pieces": True, "text": _Fitting(answer.startswith)}]}
    whole = {"choices": [{"message": {"content": answer}}]}
    method = "chat.completions.create"
    busy = _refusal("RateLimitError", 429, "busy", None, "wait", kind="rate_limit_error")
    return [
        Request("a stream that is left", ClientCall(method, endless, leave_after=4), begun),
        Request("the same prompt after that", ClientCall(method, chat), whole),
        Request("error: busy", ClientCall(method, chat, held=(endless,) * BUSY_AFTER), busy),
        Request("the same prompt with retries", ClientCall(method, chat, retries=5), whole),
    ]
