"""Answers that the app generates in the background, as a page sees them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from edgerun import load
from edgerun.edge.app.app_context import AppContext, EventChannel
from edgerun.edge.app.generations import Generations
from edgerun.edge.conversations.records import ChangeKind, MessageState
from edgerun.edge.conversations.store import ConversationStore
from edgerun.edge.server.http_protocol import RefusedError
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.edge.service.model_pool import ModelPool
from support.app_server import RunningApp, new_conversation, post, read, running_app, send, window
from support.waiting import wait_until


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, endless_bundle: Path) -> Iterator[RunningApp]:
    """An app whose model never ends an answer by itself."""
    with running_app(tmp_path_factory.mktemp("home"), endless_bundle, "--draft", "none") as started:
        yield started


@pytest.fixture
def generations(tmp_path: Path, endless_bundle: Path) -> Iterator[Generations]:
    """Generations of an app without a page, with that model."""
    with (
        ConversationStore(tmp_path / "conversations.sqlite3") as store,
        ModelPool([str(endless_bundle)], lambda path, progress: load(path, progress=progress, draft=None)) as pool,
    ):
        generations = Generations(AppContext(store, pool, EventChannel(), ServerSettings()))
        yield generations
        generations.close()


def test_an_answer_goes_on_while_no_window_is_open(app: RunningApp, cookies: httpx.Cookies) -> None:
    with window(app, cookies) as first:
        conversation = new_conversation(first.client)
        answer = send(first.client, conversation, "hello")["id"]
        first.wait(lambda: first.of("delta", answer), "the answer begins")
    with window(app, cookies) as second:
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


def test_an_answer_can_be_stopped_as_soon_as_it_is_told_of(generations: Generations) -> None:
    store = generations._context.store
    stopping: list[threading.Thread] = []

    def cancel(message_id: str) -> None:
        generation = generations.live(message_id)
        assert generation is not None
        generation.cancellation.cancel()

    def stop(_kind: ChangeKind, _conversation_id: str, message_id: str) -> None:
        message = store.message(message_id) if message_id else None
        if message is not None and message.state is MessageState.WRITING and not stopping:
            stopping.append(threading.Thread(target=cancel, args=(message.id,)))
            stopping[0].start()
            # It has to wait for the answer's beginning; without that it would be through here.
            stopping[0].join(0.2)

    store.listener = stop
    # Without the stop, the answer ends by its length.
    question = store.add_message(store.create(sampling={"max_tokens": 20_000}).id, None, "user", "hello")
    (answer,) = generations.begin(question)
    wait_until(lambda: store.message(answer.id).state is not MessageState.WRITING)
    assert store.message(answer.id).state is MessageState.STOPPED
    stopping[0].join()


def test_an_answer_that_is_resumed_twice_at_once_goes_on_once(generations: Generations) -> None:
    store = generations._context.store
    question = store.add_message(store.create(sampling={"max_tokens": 3}).id, None, "user", "hello")
    (answer,) = generations.begin(question)
    wait_until(lambda: store.message(answer.id).state is not MessageState.WRITING)
    ended = store.message(answer.id)  # what two requests have read that come at once
    store.change(question.conversation, sampling={"max_tokens": 20_000})
    generations.resume(ended, question)
    wait_until(lambda: len(store.message(answer.id).content) > len(ended.content))
    with pytest.raises(RefusedError):
        generations.resume(ended, question)
    assert len(store.message(answer.id).content) > len(ended.content)
