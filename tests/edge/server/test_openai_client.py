"""OpenAI's own Python client against a running server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

import edgerun
from support.serving import Served, served, wait_until

TELL: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "tell me about the tone"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[edgerun.Engine]:
    with edgerun.load(tiny_bundle, draft=None, cache=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[Served]:
    with served([tiny_bundle], "--draft", "none") as server:
        yield server


@pytest.fixture
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.base}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> str:
    return tiny_bundle.name


def test_a_chat_gives_the_engines_text_and_usage(client: OpenAI, engine: edgerun.Engine, model: str) -> None:
    reply = engine.generate(TELL, **GREEDY)
    done = client.chat.completions.create(model=model, messages=TELL, **GREEDY)
    assert done.choices[0].message.content == reply.text
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.prompt_tokens == reply.stats.prompt_tokens
    assert done.usage.completion_tokens == reply.stats.completion_tokens == 12
    assert done.model == model


def test_a_stream_gives_the_same_text_in_pieces(client: OpenAI, engine: edgerun.Engine, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=TELL, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    texts = [choice.delta.content for chunk in chunks for choice in chunk.choices if choice.delta.content]
    assert "".join(texts) == engine.generate(TELL, **GREEDY).text
    assert len(texts) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_second_request_of_a_conversation_reuses_the_first(client: OpenAI, model: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "a question that no other test asks"}]
    first = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    messages += [first.choices[0].message.model_dump(include={"role", "content"}), {"role": "user", "content": "go on"}]
    second = client.chat.completions.create(model=model, messages=messages, **GREEDY)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_log_probabilities(client: OpenAI, engine: edgerun.Engine, model: str) -> None:
    done = client.chat.completions.create(model=model, messages=TELL, logprobs=True, top_logprobs=3, **GREEDY)
    expected = engine.generate(TELL, logprobs=3, **GREEDY).logprobs
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [token.token for token in logprobs.content] == [token.text for token in expected]
    assert [token.logprob for token in logprobs.content] == pytest.approx(
        [token.logprob for token in expected], abs=1e-4
    )
    assert all(len(token.top_logprobs) == 3 for token in logprobs.content)


def test_stop_sequences_and_seeds(client: OpenAI, engine: edgerun.Engine, model: str) -> None:
    text = engine.generate(TELL, **GREEDY).text
    stop = text[4:7]
    done = client.chat.completions.create(model=model, messages=TELL, stop=[stop], **GREEDY)
    assert done.choices[0].message.content == text[: text.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    seeded = [
        client.chat.completions.create(model=model, messages=TELL, seed=seed, temperature=1.0, max_tokens=12)
        for seed in (7, 7, 8)
    ]
    texts = [each.choices[0].message.content for each in seeded]
    assert texts[0] == texts[1] != texts[2]


def test_completions(client: OpenAI, engine: edgerun.Engine, model: str) -> None:
    prompts = ["the tone of the", "another one"]
    expected = [engine.generate(prompt, raw=True, **GREEDY).text for prompt in prompts]
    done = client.completions.create(model=model, prompt=prompts, **GREEDY)
    assert [choice.text for choice in done.choices] == expected
    ids = [engine.tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(model=model, prompt=ids, stream=True, **GREEDY):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == expected


def test_responses(client: OpenAI, engine: edgerun.Engine, model: str) -> None:
    expected = engine.generate(TELL, **GREEDY).text
    done = client.responses.create(model=model, input="tell me about the tone", temperature=0, max_output_tokens=12)
    assert done.output_text == expected
    with client.responses.stream(
        model=model, input="tell me about the tone", temperature=0, max_output_tokens=12
    ) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"


def test_models(client: OpenAI, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_embeddings_of_a_graph_without_hidden_states_are_refused(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="does not give hidden states"):
        client.embeddings.create(model=model, input="text")


def test_errors_are_the_clients_own(client: OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=TELL)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(model=model, messages=TELL, extra_body={"colour": "red"})
    assert unknown.value.param == "colour"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "word " * 300}], stream=True)
    assert long.value.code == "context_length_exceeded"


def test_leaving_a_stream_ends_its_answer(endless_server: Served) -> None:
    with OpenAI(base_url=f"{endless_server.base}/v1", api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(model="bundle", messages=TELL, stream=True, max_tokens=20_000)
        for number, _ in enumerate(stream):
            if number == 3:
                break
        stream.close()
    wait_until(lambda: endless_server.load() == (0, 0), "the answer has ended")
