"""Answers that are cancelled at random moments leave no trace in later ones."""

from __future__ import annotations

import random
import threading

import pytest

from support.rpc_client import RpcClient, RpcFailedError


@pytest.mark.parametrize("cancels", [12, pytest.param(200, marks=pytest.mark.nightly)])
def test_after_random_cancels_the_same_prompt_gives_the_same_text(client: RpcClient, cancels: int) -> None:
    choice = random.Random(cancels)
    expected = client.text("the and of", max_tokens=40)
    session = client.call("session/new")["session_id"]
    for _ in range(cancels):
        prompt = "".join(choice.choice("ab the") for _ in range(choice.randrange(1, 60)))
        if choice.random() < 0.3:
            method, params = "session/prompt", {"session_id": session, "prompt": prompt}
        else:
            method, params = "generate", {"messages": [{"role": "user", "content": prompt}], "stream": True}
        params |= {"ignore_eos": True, "max_tokens": 300, "temperature": choice.choice([0, 1])}
        request = client.send(method, params)
        if choice.random() < 0.8:
            client.until_update(request)
        threading.Event().wait(choice.random() * 0.03)
        client.tell("$/cancelRequest", {"id": request})
        try:
            client.result(request)
        except RpcFailedError as error:
            assert error.code in ("cancelled", "context_length_exceeded")  # noqa: PT017  either end is right
        if choice.random() < 0.2:
            client.call("session/close", {"session_id": session})
            session = client.call("session/new")["session_id"]
    assert client.text("the and of", max_tokens=40) == expected
    client.call("session/close", {"session_id": session})
    assert client.call("status")["requests"] == {"running": 1, "sessions": 0}


@pytest.mark.parametrize("requests", [40, pytest.param(600, marks=pytest.mark.nightly)])
def test_requests_at_the_same_time_keep_their_texts(client: RpcClient, requests: int) -> None:
    choice = random.Random(requests)
    prompts = ["the and of", "ab", "in the", "on"]
    options = {"temperature": 0, "max_tokens": 30}
    expected = {prompt: client.text(prompt, max_tokens=30) for prompt in prompts}
    sent: dict[int, tuple[str, bool]] = {}
    for _ in range(requests):
        prompt, cancelled = choice.choice(prompts), choice.random() < 0.4
        messages = [{"role": "user", "content": prompt}]
        id_ = client.send("generate", {"messages": messages, "stream": choice.random() < 0.5, **options})
        sent[id_] = prompt, cancelled
        if choice.random() < 0.3:
            client.result(client.send(choice.choice(["status", "models/list"])))
        if cancelled:
            client.tell("$/cancelRequest", {"id": id_})
        while len(sent) > choice.randrange(1, 12):
            first = next(iter(sent))
            check_answer(client, first, *sent.pop(first), expected)
    for id_, (prompt, cancelled) in sent.items():
        check_answer(client, id_, prompt, cancelled, expected)


def check_answer(client: RpcClient, id_: int, prompt: str, cancelled: bool, expected: dict[str, str]) -> None:
    """Compare an answer with that of a lone request; it may have been cancelled."""
    try:
        result = client.result(id_)
    except RpcFailedError as error:
        assert (error.code, cancelled) == ("cancelled", True)  # noqa: PT017  either end is right
    else:
        assert result["choices"][0]["message"]["content"] == expected[prompt]
