"""Conversations, settings, presets, search, export and import of the app, as a page uses them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from edgerun.edge.conversations.store import FILE_NAME, ConversationStore
from edgerun.version import __version__
from support.app_server import RunningApp, Window, ask, messages_of, new_conversation, post, send


def change(client: httpx.Client, path: str, status: int = 200, **changes: Any) -> Any:
    response = client.patch(path, json=changes)
    assert response.status_code == status, response.text
    return response.json()


def test_the_state_and_the_settings_of_the_app(page: Window) -> None:
    state = ask(page.client, "/api/state")
    assert state["version"] == __version__
    # What the command is given comes first; what is on this machine is offered too.
    assert state["models"][0]["id"] == state["default_model"] == "bundle"
    assert state["machine"]["memory_bytes"] > 1e8
    changed = change(page.client, "/api/settings", theme="dark", font_size=18)
    assert changed["settings"] == {**state["settings"], "theme": "dark", "font_size": 18}
    page.wait(lambda: page.of("settings"), "the window is told")
    assert ask(page.client, "/api/state")["settings"] == changed["settings"]
    for wrong in ({"theme": "pink"}, {"font_size": 100}, {"colour": "red"}, {"enter_sends": "yes"}):
        error = change(page.client, "/api/settings", 400, **wrong)["error"]
        assert next(iter(wrong)) in error["message"]
    change(page.client, "/api/settings", theme="system", font_size=16)


def test_fields_of_a_conversation(page: Window) -> None:
    client = page.client
    conversation = new_conversation(client, system="Be brief.", sampling={"temperature": 0.5, "top_k": None})
    path = f"/api/conversations/{conversation}"
    assert ask(client, path)["conversation"]["sampling"] == {"temperature": 0.5}
    changed = change(client, path, title="Title", pinned=True, folder="work", sampling={}, model="bundle")
    fields = {"title": "Title", "pinned": True, "folder": "work", "sampling": {}, "system": "Be brief."}
    assert changed["conversation"] | fields == changed["conversation"]
    page.wait(lambda: {"type": "conversation", **changed} in page.of("conversation"), "the window is told")
    assert "work" in ask(client, "/api/state")["folders"]
    assert change(client, path, folder=None)["conversation"]["folder"] is None
    assert change(client, path, documents=[str(Path(__file__))])["conversation"]["documents"] == [
        str(Path(__file__).resolve())
    ]
    for wrong in (
        {"documents": ["/none"]},
        {"sampling": {"temperature": -1}},
        {"sampling": {"colour": 1}},
        {"title": 5},
        {"leaf": "none"},
    ):
        assert "\n" not in change(client, path, 400, **wrong)["error"]["message"]


def test_presets(page: Window) -> None:
    name = "a name/with ümlaut"
    preset = {"system": "Be brief.", "sampling": {"temperature": 0.2, "stop": ["x"]}}
    response = page.client.put(f"/api/presets/{name}", json=preset)
    assert response.json()["preset"] == {"name": name, **preset}
    page.wait(lambda: page.of("settings"), "the window is told")
    assert {"name": name, **preset} in ask(page.client, "/api/state")["presets"]
    assert page.client.put("/api/presets/x", json={"sampling": {"temperature": "hot"}}).status_code == 400
    assert page.client.delete(f"/api/presets/{name}").json() == {}
    assert ask(page.client, "/api/state")["presets"] == []
    assert page.client.delete(f"/api/presets/{name}").status_code == 404


def test_tokens_are_counted_while_the_model_is_loaded(page: Window) -> None:
    conversation = new_conversation(page.client, sampling={"max_tokens": 2})
    page.wait_for_end(send(page.client, conversation, "hello")["id"])
    count = post(page.client, "/api/tokens", text="hello and hello")["tokens"]
    assert count > 2
    assert post(page.client, "/api/tokens", text="hello", model="missing")["tokens"] is None
    path = f"/api/conversations/{conversation}/context"
    empty = post(page.client, path)["tokens"]
    attachments = [{"name": "a.txt", "text": "hello and hello"}]
    filled = post(page.client, path, content="hello", attachments=attachments)["tokens"]
    assert filled > empty + count


def test_a_message_is_deleted_while_tokens_are_counted(page: Window) -> None:
    conversation = new_conversation(page.client, sampling={"max_tokens": 2})
    message = page.wait_for_end(send(page.client, conversation, "hello")["id"])["id"]
    path, answer, done = f"/api/conversations/{conversation}", f"/api/messages/{message}", Event()

    def delete_and_restore() -> None:
        while not done.is_set():
            assert page.client.delete(answer).json() == {}
            post(page.client, f"{answer}/restore")

    with ThreadPoolExecutor(1) as pool:
        deleting = pool.submit(delete_and_restore)
        try:
            for _ in range(100):
                assert post(page.client, f"{path}/context")["tokens"]
                assert ask(page.client, path)["messages"]
        finally:
            done.set()
        deleting.result()


@pytest.mark.parametrize(("kind", "suffix"), [("markdown", "md"), ("json", "json")])
def test_conversations_are_exported_and_imported(page: Window, kind: str, suffix: str) -> None:
    client = page.client
    conversation = new_conversation(client, title='A "title"/äö', sampling={"max_tokens": 3})
    answer = page.wait_for_end(send(client, conversation, "what is this?")["id"])
    hits = ask(client, "/api/search?q=what+this")["hits"]
    assert (conversation, answer["parent"]) in {(hit["conversation"], hit["message"]) for hit in hits}
    response = client.get(f"/api/conversations/{conversation}/export", params={"format": kind})
    disposition = response.headers["content-disposition"]
    assert disposition.startswith("attachment; ")
    assert unquote(disposition.partition("filename*=UTF-8''")[2]) == f"A _title_äö.{suffix}"
    imported = post(client, "/api/import", name=f"x.{suffix}", content=response.text)["conversations"]
    assert [each["title"] for each in imported] == ['A "title"/äö']
    contents = [message["content"] for message in messages_of(client, imported[0]["id"]).values()]
    assert contents[0] == "what is this?"
    if kind == "json":
        assert contents[1] == answer["content"]
    assert client.get(f"/api/conversations/{conversation}/export?format=pdf").status_code == 400

    every = client.get("/api/export")
    assert "attachment" in every.headers["content-disposition"]
    before = len(ask(client, "/api/conversations")["conversations"])
    imported = post(client, "/api/import", name="all.json", content=every.text)["conversations"]
    assert len(ask(client, "/api/conversations")["conversations"]) == before + len(imported) == 2 * before
    assert "\n" not in post(client, "/api/import", 400, name="all.json", content="{")["error"]["message"]


def test_windows_are_told_what_another_process_writes(app: RunningApp, page: Window) -> None:
    with ConversationStore(app.home / FILE_NAME) as other:
        conversation = other.create(title="from elsewhere").id
    page.wait(lambda: page.of("reload"), "the window is told")
    assert ask(page.client, f"/api/conversations/{conversation}")["conversation"]["title"] == "from elsewhere"


def test_bodies_have_a_limit(client: httpx.Client) -> None:
    conversation = new_conversation(client)
    body = json.dumps({"content": "x" * 5_000_000}).encode()
    response = client.post(
        f"/api/conversations/{conversation}/messages", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert "characters" in response.json()["error"]["message"]
    assert messages_of(client, conversation) == {}
