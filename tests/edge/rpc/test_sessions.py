"""Sessions: answers that continue, cancelling, saving, and restoring in another process."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

import edgerun
from edgerun.edge.rpc import session_methods
from edgerun.edge.rpc.protocol import SessionPromptParams
from edgerun.edge.service.model_pool import ModelPool
from edgerun.edge.service.request_error import RequestError
from edgerun.runtime.scheduling.request_run import Cancellation
from support.rpc_client import RpcClient, rpc
from support.waiting import wait_until

PLAIN = {"temperature": 0, "max_tokens": 8}


def prompt(client: RpcClient, session: str, text: str, **options: Any) -> dict[str, Any]:
    return client.call("session/prompt", {"session_id": session, "prompt": text, **PLAIN, **options})


def test_a_session_answers_like_the_librarys_and_continues_after_a_restart(long_bundle: Path, tmp_path: Path) -> None:
    with edgerun.load(long_bundle) as engine, engine.session(system="the and") as chat:
        expected = [chat.send(text, max_tokens=8, temperature=0) for text in ("ab", "of", "in")]
        messages = chat.messages
    saved = str(tmp_path / "saved.session")
    with rpc(str(long_bundle)) as client:
        opened = client.call("session/new", {"system": "the and"})
        id_ = opened["session_id"]
        assert opened["messages"] == [{"role": "system", "content": "the and"}]
        request = client.send("session/prompt", {"session_id": id_, "prompt": "ab", **PLAIN})
        first = client.result(request)
        assert first["text"] == expected[0].text
        pieces = [each["params"] for each in client.messages if each.get("method") == "session/update"]
        assert "".join(piece["text"] for piece in pieces) == expected[0].text
        assert {(piece["session_id"], piece["request_id"]) for piece in pieces} == {(id_, request)}
        second = prompt(client, id_, "of")
        assert second["text"] == expected[1].text
        assert second["usage"]["cached_tokens"] > 0
        assert client.call("session/save", {"session_id": id_, "path": saved})["bytes"] == Path(saved).stat().st_size
        assert client.end() == (0, "")
    with rpc(str(long_bundle)) as client:
        restored = client.call("session/restore", {"path": saved})
        assert restored["messages"] == messages[:5]
        third = prompt(client, restored["session_id"], "in")
        assert third["text"] == expected[2].text
        assert third["usage"]["cached_tokens"] == expected[2].stats.reused_tokens > 0
        assert client.end() == (0, "")


def test_a_cancelled_answer_stays_in_the_conversation(client: RpcClient) -> None:
    id_ = client.call("session/new")["session_id"]
    assert client.call("session/cancel", {"session_id": id_}) == {"cancelled": False}
    for cancel in (client.call, client.tell):
        request = client.send("session/prompt", {"session_id": id_, "prompt": "ab", "ignore_eos": True})
        client.until_update(request)
        cancel("session/cancel", {"session_id": id_})
        result = client.result(request)
        assert result["finish_reason"] == "cancelled"
        assert result["text"]
    request = client.send("session/prompt", {"session_id": id_, "prompt": "ab", "ignore_eos": True})
    client.until_update(request)
    for method, params in (("session/prompt", {"prompt": "x"}), ("session/save", {"path": "x"})):
        error = client.refused(method, {"session_id": id_, **params})
        assert (error.number, error.code) == (-32004, "busy")
        assert "the session is in use by another request" in str(error)
    client.tell("$/cancelRequest", {"id": request})
    assert client.failed(request).code == "cancelled"
    assert prompt(client, id_, "of")["finish_reason"] in ("length", "stop")
    assert client.call("session/close", {"session_id": id_}) == {}
    assert client.refused("session/close", {"session_id": id_}).code == "session_not_found"


def test_closing_a_session_ends_its_answer_and_lets_its_model_go(client: RpcClient) -> None:
    id_ = client.call("session/new")["session_id"]
    assert client.refused("models/unload").code == "busy"
    request = client.send("session/prompt", {"session_id": id_, "prompt": "ab", "ignore_eos": True})
    client.until_update(request)
    client.call("session/close", {"session_id": id_})
    assert client.result(request)["finish_reason"] == "cancelled"
    assert client.call("models/unload") == {"unloaded": True}
    assert client.call("models/unload") == {"unloaded": False}


def test_a_prompt_that_begins_while_its_session_is_closed_does_not_go_on(
    endless_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> Any:
        return SimpleNamespace(id=1, cancellation=Cancellation(), progress=Mock(), notify=Mock())

    def is_closed() -> bool:
        try:
            methods.session_cancel(call(), id_)
        except RequestError:
            return True
        return False

    closing: list[threading.Thread] = []

    class ClosedMeanwhile(Cancellation):
        """What a prompt makes when it has taken the session; another request closes the session just then."""

        def __init__(self) -> None:
            super().__init__()
            closing.append(threading.Thread(target=methods.session_close, args=(call(), id_)))
            closing[0].start()
            wait_until(is_closed)
            closing[0].join(0.05)

    with ModelPool([str(endless_bundle)], lambda path, _: edgerun.load(path, threads=1, draft=None)) as pool:
        methods = session_methods.SessionMethods(pool)
        id_ = methods.session_new(call()).session_id
        monkeypatch.setattr(session_methods, "Cancellation", ClosedMeanwhile)
        with pytest.raises(RequestError, match=f"there is no session '{id_}'"):
            methods.session_prompt(call(), msgspec.convert({"session_id": id_, "prompt": "ab"}, SessionPromptParams))
        closing[0].join()
        assert pool.unload(None)


def test_a_session_cannot_be_saved_everywhere_nor_restored_from_anything(client: RpcClient, tmp_path: Path) -> None:
    id_ = client.call("session/new")["session_id"]
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"PK")
    for path in (str(damaged / "x"), str(tmp_path / "no folder" / "x"), str(tmp_path), "/", "", "a\0b"):
        error = client.refused("session/save", {"session_id": id_, "path": path})
        assert (error.number, error.code) == (-32011, "file_error")
    assert list(tmp_path.iterdir()) == [damaged]
    assert "is not a saved conversation" in str(client.refused("session/restore", {"path": str(damaged)}))
    client.call("session/close", {"session_id": id_})
    assert client.call("status")["requests"]["sessions"] == 0


def test_the_number_of_sessions_is_limited(client: RpcClient) -> None:
    opened = [client.call("session/new")["session_id"] for _ in range(32)]
    error = client.refused("session/new")
    assert (error.code, str(error)) == ("busy", "32 sessions are open, which is the limit")
    for id_ in opened:
        client.call("session/close", {"session_id": id_})
    client.call("session/close", {"session_id": client.call("session/new")["session_id"]})
