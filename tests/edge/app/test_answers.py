"""Answers that the app generates in the background, as a page sees them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.app_server import PATIENCE_S, RunningApp, running_app
from support.waiting import wait_until

Json = dict[str, Any]


class Window:
    """A window that shows the page: a client, and the events that it has seen."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.events: list[Json] = []
        self._changed = threading.Condition()

    def see(self, event: Json) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: str, message: str | None = None) -> list[Json]:
        """The events of a type, or those of a message."""
        return [
            event
            for event in list(self.events)
            if event["type"] == kind and (message is None or message in (event.get("message"), id_of(event)))
        ]

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until the events make a condition true."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_S), what

    def wait_for_end(self, message: str) -> Json:
        """Wait for the end of an answer, and return it."""

        def ends() -> list[Json]:
            return [event["message"] for event in self.of("message", message) if event["message"]["state"] != "writing"]

        self.wait(ends, "the answer ends")
        return ends()[-1]

    def text(self, message: str) -> str:
        """The text of an answer as the events tell it."""
        pieces = self.of("delta", message)
        assert [piece["sequence"] for piece in pieces] == list(range(1, len(pieces) + 1))
        return "".join(piece["text"] for piece in pieces)


def id_of(event: Json) -> str | None:
    message = event.get("message")
    return message["id"] if isinstance(message, dict) else None


@contextmanager
def window(app: RunningApp, cookies: httpx.Cookies) -> Iterator[Window]:
    """Open a window, which listens when this returns."""
    with httpx.Client(base_url=app.base, cookies=cookies, timeout=PATIENCE_S, trust_env=False) as client:
        seen = Window(client)
        ready = threading.Event()
        with client.stream("GET", "/api/events") as response:
            assert response.status_code == 200

            def read() -> None:
                try:
                    for line in response.iter_lines():
                        if line.startswith("data: "):
                            seen.see(json.loads(line.removeprefix("data: ")))
                        ready.set()
                except (httpx.HTTPError, httpx.StreamError):
                    pass

            thread = threading.Thread(target=read, daemon=True)
            thread.start()
            assert ready.wait(PATIENCE_S)
            try:
                yield seen
            finally:
                response.close()
        thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def endless_app(tmp_path_factory: pytest.TempPathFactory, endless_bundle: Path) -> Iterator[RunningApp]:
    """An app whose model never ends an answer by itself."""
    with running_app(tmp_path_factory.mktemp("home"), endless_bundle, "--draft", "none") as app:
        yield app


@pytest.fixture(scope="module")
def cookies(endless_app: RunningApp) -> httpx.Cookies:
    with endless_app.entered() as client:
        return client.cookies


@pytest.fixture
def page(endless_app: RunningApp, cookies: httpx.Cookies) -> Iterator[Window]:
    with window(endless_app, cookies) as opened:
        yield opened


def post(client: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def new_conversation(client: httpx.Client, **fields: Any) -> str:
    return str(post(client, "/api/conversations", **fields)["conversation"]["id"])


def send(client: httpx.Client, conversation: str, content: str, parent: str | None = None) -> Json:
    """Send a message; returns the answer that has begun."""
    sent = post(client, f"/api/conversations/{conversation}/messages", parent=parent, content=content)
    assert sent["message"]["content"] == content
    answer: Json = sent["answer"]
    assert (answer["state"], answer["parent"]) == ("writing", sent["message"]["id"])
    return answer


def read(client: httpx.Client, conversation: str) -> Json:
    got: Json = client.get(f"/api/conversations/{conversation}").json()
    return got


def messages_of(client: httpx.Client, conversation: str) -> dict[str, Json]:
    return {message["id"]: message for message in read(client, conversation)["messages"]}


def test_an_answer_goes_on_while_no_window_is_open(endless_app: RunningApp, cookies: httpx.Cookies) -> None:
    with window(endless_app, cookies) as first:
        conversation = new_conversation(first.client)
        answer = send(first.client, conversation, "hello")["id"]
        first.wait(lambda: first.of("delta", answer), "the answer begins")
    with window(endless_app, cookies) as second:
        shown = read(second.client, conversation)
        (writing,) = shown["writing"]
        text = {message["id"]: message for message in shown["messages"]}[answer]["content"]
        assert writing["message"] == answer
        assert writing["sequence"] > 0
        assert text.startswith(first.text(answer))
        assert second.client.get("/api/conversations").json()["writing"] == [conversation]
        second.wait(lambda: len(second.of("delta", answer)) > 2, "the answer goes on")
        post(second.client, f"/api/messages/{answer}/stop")
        ended = second.wait_for_end(answer)
        assert ended["state"] == "stopped"
        later = [piece for piece in second.of("delta", answer) if piece["sequence"] > writing["sequence"]]
        assert later[0]["sequence"] == writing["sequence"] + 1
        assert text + "".join(piece["text"] for piece in later) == ended["content"]
        assert ended["stats"]["tokens"] > 0
        assert ended["stats"]["tokens_per_second"] > 0
        assert read(second.client, conversation)["writing"] == []


def test_two_windows_see_the_same(endless_app: RunningApp, cookies: httpx.Cookies) -> None:
    with window(endless_app, cookies) as first, window(endless_app, cookies) as second:
        conversation = new_conversation(first.client, sampling={"max_tokens": 40})
        answer = send(first.client, conversation, "hello")["id"]
        ended = first.wait_for_end(answer)
        assert ended["state"] == "length"
        assert second.wait_for_end(answer) == ended
        assert first.text(answer) == second.text(answer) == ended["content"]
        assert first.events == second.events


@pytest.mark.skipif(os.name == "nt", reason="sends signals of POSIX systems")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_answer_is_there_after_the_end_of_the_app(
    tmp_path: Path, endless_bundle: Path, number: signal.Signals
) -> None:
    with ExitStack() as stack:
        app = stack.enter_context(running_app(tmp_path, endless_bundle, "--draft", "none"))
        client = stack.enter_context(app.entered())
        page = stack.enter_context(window(app, client.cookies))
        conversation = new_conversation(client)
        answer = send(client, conversation, "hello")["id"]
        page.wait(lambda: page.of("delta", answer), "the answer begins")
        before = page.text(answer)
        wait_until(lambda: bool(client.get(f"/api/messages/{answer}/tokens").json()["tokens"]))
        app.process.send_signal(number)
        assert app.process.wait(PATIENCE_S) == (0 if number == signal.SIGTERM else -number)
    with running_app(tmp_path, endless_bundle, "--draft", "none") as app, app.entered() as client:
        kept = messages_of(client, conversation)[answer]
        assert kept["state"] == "interrupted"
        tokens = client.get(f"/api/messages/{answer}/tokens").json()["tokens"]
        assert len(tokens) > 10
        assert kept["content"].startswith("".join(token["text"] for token in tokens[:10]))
        assert kept["content"].startswith(before)
