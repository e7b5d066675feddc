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
