"""Methods about models: progress and cancelling of loads and downloads, the memory budget, idle models."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import edgerun
from support.commands import Capture, Patch, fails
from support.encoders import write_encoder
from support.hub_server import HubServer, files_of, own_hub
from support.infill_models import write_infill_bundle
from support.rerankers import write_reranker
from support.rpc_client import RpcClient, rpc


@pytest.fixture
def hub(tmp_path: Path, tiny_bundle: Path, monkeypatch: Patch) -> Iterator[HubServer]:
    """A hub with one model, which the processes of the test find through the environment; nothing was exported."""
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path / "home"))
    with own_hub(tmp_path / "hf") as server:
        server.repo("org/tiny", files_of(tiny_bundle))
        yield server


def progress_of(client: RpcClient, id_: int) -> list[tuple[str, float]]:
    found = [each["params"] for each in client.messages if each.get("method") == "$/progress"]
    return [(each["stage"], each["fraction"]) for each in found if each["request_id"] == id_]


def test_a_model_is_pulled_loaded_used_and_unloaded(hub: HubServer) -> None:
    with rpc() as client:
        assert [each["id"] for each in client.call("models/list")["models"]] == ["shell-helper"]
        pull = client.send("models/pull", {"id": "org/tiny"})
        pulled = client.result(pull)
        assert pulled["id"] == "org/tiny"
        assert pulled["offered"]
        assert {stage for stage, _ in progress_of(client, pull)} == {"org/tiny"}
        assert progress_of(client, pull)[-1][1] == 1
        listed = client.call("models/list")["models"]
        assert [(each["id"], each["loaded"], each["owner"], each["capabilities"]) for each in listed] == [
            ("shell-helper", False, "edge-run", ["completion", "tools"]),
            ("org/tiny", False, "org", ["completion", "tools"]),
        ]
        load = client.send("models/load", {"model": "org/tiny"})
        assert client.result(load)["loaded"]
        assert progress_of(client, load)[0] == ("loading the model", 0)
        assert progress_of(client, load)[-1] == ("loading the model", 1)
        assert client.text(model="org/tiny", max_tokens=2)
        assert client.call("models/unload", {"model": "org/tiny"}) == {"unloaded": True}
        error = client.refused("models/pull", {"id": "org/none"})
        assert error.code == "invalid_request"
        assert "neither a model on the hub" in str(error)
        assert client.end() == (0, "")


def test_a_download_is_cancelled_while_the_network_is_silent_and_resumed(hub: HubServer) -> None:
    hub.faults.stall["model.onnx.data"] = 5000
    with rpc() as client:
        pull = client.send("models/pull", {"id": "org/tiny"})
        while "model.onnx.data" not in hub.bodies():
            threading.Event().wait(0.01)
        client.tell("$/cancelRequest", {"id": pull})
        assert str(client.failed(pull)) == "the request was cancelled"
        assert [each["id"] for each in client.call("models/list")["models"]] == ["shell-helper"]
        hub.faults.stall.clear()
        hub.faults.go_on.set()
        assert client.call("models/pull", {"id": "org/tiny"})["offered"]
        assert client.end() == (0, "")


def test_a_load_that_waits_for_memory_is_cancelled(tmp_path: Path, long_bundle: Path) -> None:
    shutil.copytree(long_bundle, tmp_path / "other")
    size = (long_bundle / "model.onnx").stat().st_size + (long_bundle / "model.onnx.data").stat().st_size
    with rpc(str(long_bundle), str(tmp_path / "other"), "--memory", f"{size // 1000 + 1}kB") as client:
        answer = client.send(
            "generate", {"messages": [{"role": "user", "content": "a"}], "stream": True, "ignore_eos": True}
        )
        client.until_update(answer)
        load = client.send("models/load", {"model": "other"})
        while not progress_of(client, load):
            client.receive()
        client.tell("$/cancelRequest", {"id": load})
        assert client.failed(load).code == "cancelled"
        load = client.send("models/load", {"model": "other"})
        client.tell("$/cancelRequest", {"id": answer})
        assert client.failed(answer).code == "cancelled"
        assert client.result(load)["id"] == "other"
        assert [each["id"] for each in client.call("status")["models"]] == ["other"]
        assert client.end() == (0, "")


def test_a_request_says_how_long_its_model_stays_in_memory(long_bundle: Path) -> None:
    with rpc(str(long_bundle)) as client:
        client.text(max_tokens=1)
        assert [each["expires"] for each in client.call("status")["models"]] == [None]
        client.text(max_tokens=1, keep_alive="1h")
        (kept,) = client.call("status")["models"]
        assert kept["expires"] - kept["last_used"] == pytest.approx(3600)
        client.call("complete", {"prompt": "ab", "max_tokens": 1, "keep_alive": 0})
        while client.call("status")["models"]:
            threading.Event().wait(0.01)
        assert client.end() == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/none"], "does not exist"),
        (["--max-line", "10"], "--max-line is '10'"),
        (["--max-line", "1B"], "--max-line is 1B"),
        (["--memory", "lots"], "--memory is 'lots'"),
        ([], "standard input is closed; "),
    ],
)
def test_wrong_options_are_one_line(capsys: Capture, monkeypatch: Patch, arguments: list[str], message: str) -> None:
    if not arguments:
        monkeypatch.setattr("sys.stdin", None)
    assert message in fails(capsys, "rpc", *arguments)


def test_completions_fill_gaps(tmp_path: Path) -> None:
    bundle = write_infill_bundle(tmp_path, max_position_embeddings=30_000)
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        expected = [choice.text for choice in engine.complete("the sea ", " and", 2, max_tokens=8).choices]
    body = {"prompt": "the sea ", "suffix": " and", "n": 2, "max_tokens": 8, "temperature": 0}
    with rpc(str(bundle)) as client:
        whole = client.call("complete", body)
        request = client.send("complete", body | {"prompt": ["the sea ", "then"], "stream": True})
        both = client.result(request)
        refused = client.refused("complete", body | {"prompt": [1, 2]})
        older = client.send("complete", body | {"document": "a", "max_tokens": -1, "ignore_eos": True, "stream": True})
        client.until_update(older)
        assert client.call("complete", body | {"document": "a"})["choices"] == whole["choices"]
        assert client.failed(older).code == "superseded"
        assert client.end() == (0, "")
    assert refused.param == "suffix"
    assert whole["object"] == "text_completion"
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["text"] for choice in both["choices"][:2]] == expected
    assert len(both["choices"]) == 4
    updates = [each["params"] for each in client.messages if each.get("method") == "generate/update"]
    pieces = [each["chunk"]["choices"] for each in updates if each["request_id"] == request]
    texts = ["".join(piece["text"] for piece in chain(*pieces) if piece["index"] == index) for index in range(4)]
    assert texts == [choice["text"] for choice in both["choices"]]


def test_documents_are_ranked_by_a_language_model_and_by_an_encoder(tmp_path: Path) -> None:
    reranker = write_reranker(tmp_path).with_name("bundle")
    encoder = write_encoder(tmp_path / "pairs", "logits")
    documents = ["the sand", "the other sea"]
    with edgerun.load(reranker, cache=False) as engine, edgerun.load_encoder(encoder) as pairs:
        expected = [engine.score("a", documents).scores.tolist(), pairs.score("a", documents).scores.tolist()]
    with rpc(str(reranker), str(encoder)) as client:
        assert client.call("models/list")["models"][1]["capabilities"] == ["rerank"]
        found = [client.call("rank", {"model": name, "query": "a", "documents": documents}) for name in (None, "pairs")]
        assert [each["scores"] for each in found] == [pytest.approx(each, abs=1e-5) for each in expected]
        error = client.refused("rank", {"model": "pairs", "query": "a", "documents": ["b"], "instruction": "c"})
        assert "pairs takes no instruction" in str(error)
        assert "is an encoder" in str(client.refused("tokenize", {"model": "pairs", "content": "a"}))
        assert client.end() == (0, "")
