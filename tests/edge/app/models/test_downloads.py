"""Downloads of the app: cancel, restart, and what is said without a connection."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.app_server import ask, running_app
from support.hub_server import HubServer, files_of, own_hub, partial_files
from support.waiting import wait_until

REPO = "acme/Tiny-Chat"
WEIGHTS = "model.onnx.data"
STALL_AT = 1_400_000


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A model whose weights are more than one report of progress."""
    from support.tiny_models import write_bundle

    return files_of(write_bundle(tmp_path_factory.mktemp("padded"), hidden_size=256, intermediate_size=512))


@pytest.fixture
def hub(tmp_path: Path, padded: dict[str, bytes]) -> Iterator[HubServer]:
    with own_hub(tmp_path / "hf") as server:
        server.repo(REPO, padded)
        yield server


def downloads(client: httpx.Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(client, "/api/downloads")["downloads"]
    return found


def wait_for(client: httpx.Client, state: str) -> dict[str, Any]:
    wait_until(lambda: [each["state"] for each in downloads(client)] == [state])
    return downloads(client)[0]


def start_stalled(client: httpx.Client, hub: HubServer, hf: Path) -> dict[str, Any]:
    """Begin a download that stops in the middle of its weights."""
    hub.faults.stall[WEIGHTS] = STALL_AT
    ask(client, "/api/downloads", {"id": REPO})
    wait_until(lambda: downloads(client)[0]["received"] > 1_000_000)
    download = downloads(client)[0]
    assert download["state"] == "downloading"
    assert download["received"] < download["total"]
    assert partial_files(hf)
    return download


def test_a_cancelled_download_leaves_nothing_and_one_of_no_model_says_so(tmp_path: Path, hub: HubServer) -> None:
    hf = tmp_path / "hf"
    hub.repo("acme/Empty", {"README.md": os.urandom(10)})
    with running_app(tmp_path / "home") as app, app.entered() as client:
        key = start_stalled(client, hub, hf)["key"]
        assert ask(client, f"/api/downloads/{key}/cancel", {})["download"]["state"] == "removed"
        assert downloads(client) == []
        hub.faults.go_on.set()
        wait_until(lambda: not partial_files(hf))
        assert [model["id"] for model in ask(client, "/api/models")["models"]] == ["shell-helper"]
        gone = client.post(f"/api/downloads/{key}/pause", json={})
        assert gone.status_code == 404
        assert gone.json()["error"]["message"] == "this download is no longer in the list; reload the page"
        ask(client, "/api/downloads", {"id": "https://huggingface.co/acme/Empty"})
        assert "holds no .onnx file" in wait_for(client, "failed")["error"]


def test_downloads_wait_for_one_another_and_outlive_the_app(tmp_path: Path, hub: HubServer) -> None:
    hf = tmp_path / "hf"
    hub.repo("acme/Second", hub.repos[REPO].commits[hub.repos[REPO].refs["main"]])
    with running_app(tmp_path / "home") as app, app.entered() as client:
        start_stalled(client, hub, hf)
        assert ask(client, "/api/downloads", {"id": "acme/Second"})["download"]["state"] == "queued"
        app.process.kill()
        app.process.wait()
    hub.faults.stall.clear()
    hub.faults.go_on.set()
    with running_app(tmp_path / "home") as app, app.entered() as client:
        assert [(each["id"], each["state"]) for each in downloads(client)] == [
            (REPO, "paused"),
            ("acme/Second", "paused"),
        ]
        for each in downloads(client):
            ask(client, f"/api/downloads/{each['key']}/resume", {})
        wait_until(lambda: {each["state"] for each in downloads(client)} == {"done"})
        assert {REPO, "acme/Second"} <= {model["id"] for model in ask(client, "/api/models")["models"]}


def test_without_a_connection_one_message_says_so(tmp_path: Path, hub: HubServer) -> None:
    # Nothing listens on the port of a server that has ended.
    with HubServer() as gone:
        address = gone.url
    with running_app(tmp_path / "home", HF_ENDPOINT=address) as app, app.entered() as client:
        ask(client, "/api/downloads", {"id": REPO})
        error = wait_for(client, "failed")["error"]
        assert error.startswith("edge-run cannot reach the hub: ")
        assert "\n" not in error
        search = client.get("/api/models/search", params={"q": "chat"})
        assert search.status_code == 502
        assert re.fullmatch(rf"{address} cannot be searched: [^\n]+; check .+", search.json()["error"]["message"])
        wrong = client.post("/api/downloads", json={"id": "no id"})
        assert wrong.status_code == 400
        assert "is not an id of a model on the Hugging Face Hub" in wrong.json()["error"]["message"]
    with running_app(tmp_path / "other", HF_HUB_OFFLINE="1") as app, app.entered() as client:
        offline = client.post("/api/downloads", json={"id": REPO})
        assert offline.status_code == 503
        assert offline.json()["error"]["message"].startswith("edge-run cannot reach the hub: ")
        search = client.get("/api/models/search", params={"q": "chat"})
        assert (search.status_code, search.json()) == (503, offline.json())
