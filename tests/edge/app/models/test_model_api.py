"""Models, comparisons, exactness checks and exports over HTTP."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgerun import load
from edgerun.edge.app.app_context import AppContext, EventChannel
from edgerun.edge.app.models import export_jobs
from edgerun.edge.app.models.export_jobs import ExportJobs
from edgerun.edge.app.models.model_endpoints import model_objects
from edgerun.edge.conversations.store import ConversationStore
from edgerun.edge.server.server_settings import ServerSettings
from edgerun.edge.service.model_pool import ModelPool
from edgerun.models.bundle import open_bundle
from support.app_server import ask, running_app
from support.processes import started
from support.tiny_models import write_checkpoint
from support.waiting import wait_until

TOKENS = 1200
"""Calibration tokens: enough for a tiny model."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny-chat", num_hidden_layers=1)


@pytest.fixture(scope="module")
def client(
    home: Path, cache: Path, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    hub = str(tmp_path_factory.mktemp("hf"))
    with (
        running_app(home, tiny_bundle, EDGERUN_CACHE=str(cache), HF_HOME=hub, HF_HUB_OFFLINE="1") as app,
        app.entered() as client,
    ):
        yield client


def refused(client: httpx.Client, path: str, body: dict[str, Any]) -> str:
    response = client.post(path, json=body)
    assert response.status_code >= 400, response.text
    return str(response.json()["error"]["message"])


def model_of(client: httpx.Client, name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = ask(client, "/api/models")["models"]
    return next(model for model in found if model["id"] == name)


def test_models_say_what_they_need_and_are_loaded_and_unloaded(client: httpx.Client, tiny_bundle: Path) -> None:
    bundle = open_bundle(tiny_bundle)
    ask(client, "/api/models/unload", {"id": "bundle"})  # in whatever order the tests run
    model = model_of(client, "bundle")
    cache_bytes = 2 * bundle.config["num_hidden_layers"] * bundle.config["num_key_value_heads"] * 16 * 4
    assert model["weight_bytes"] == bundle.weight_bytes
    assert model["cache_bytes_per_token"] == cache_bytes
    assert model["context"] == bundle.context
    assert model["memory_bytes"] == bundle.weight_bytes + bundle.context * cache_bytes
    assert model["disk_bytes"] >= bundle.weight_bytes
    assert (model["loaded"], model["removable"], "tools" in model["capabilities"]) == (False, False, True)
    # The graph says the same of its cache as the configuration.
    ask(client, "/api/models/load", {"id": "bundle"})
    assert model_of(client, "bundle") == {**model, "loaded": True}
    ask(client, "/api/models/unload", {"id": "bundle"})
    assert model_of(client, "bundle") == model
    assert refused(client, "/api/models/load", {"id": "nothing"}).startswith("there is no model 'nothing'")
    helper = model_of(client, "shell-helper")
    assert helper["bundled"]
    assert "It is not a chat model" in helper["about"]
    got = ask(client, "/api/models/recommended")
    for each in got["recommended"]:
        assert each["fits"] == (each["minimum_free_bytes"] <= got["free_bytes"])
        assert not each["downloaded"]
    # Only models of the app are removed.
    assert "comes with edge-run" in refused(client, "/api/models/remove", {"id": "shell-helper"})
    assert "is not a model that edge-run downloaded" in refused(client, "/api/models/remove", {"id": "bundle"})
    assert (tiny_bundle / "model.onnx").is_file()


def test_one_comparison_runs_at_a_time_and_can_be_stopped(client: httpx.Client) -> None:
    """Also of the last question of a conversation, whose answer tells the speed of its model."""
    body = {"prompt": "hello", "model": "bundle", "max_tokens": 200}

    def a_second_is_refused() -> bool:
        ask(client, "/api/comparisons", body)
        response = client.post("/api/comparisons", json=body)
        ask(client, "/api/comparisons/stop", {})
        wait_until(lambda: ask(client, "/api/comparisons")["comparison"]["state"] in {"stopped", "done"})
        return response.status_code == 400

    wait_until(a_second_is_refused)  # on a busy machine, the first may be done before the second is asked for
    assert model_of(client, "bundle")["tokens_per_second"] is None
    fields = {"sampling": {"max_tokens": 40, "temperature": 1.0, "seed": 3}, "model": "bundle"}
    conversation = ask(client, "/api/conversations", fields)["conversation"]["id"]
    ask(client, f"/api/conversations/{conversation}/messages", {"content": "what of the thing"})
    wait_until(lambda: model_of(client, "bundle")["tokens_per_second"] is not None)
    wait_until(lambda: not ask(client, f"/api/conversations/{conversation}")["writing"])
    stats = ask(client, f"/api/conversations/{conversation}")["messages"][-1]["stats"]
    assert stats["tokens"] == 40
    assert model_of(client, "bundle")["tokens_per_second"] == pytest.approx(stats["tokens_per_second"], rel=0.01)
    got = ask(client, "/api/comparisons", {"conversation": conversation, "max_tokens": 8})["comparison"]
    assert got["model"] == "bundle"
    wait_until(lambda: ask(client, "/api/comparisons")["comparison"]["state"] == "done")
    got = ask(client, "/api/comparisons")["comparison"]
    plain, drafted = got["plain"], got["drafted"]
    assert (plain["text"], plain["tokens"], plain["drafted"]) == (drafted["text"], drafted["tokens"], 0)
    assert (got["differs_at"], got["summary"].endswith("Both texts are identical.")) == (None, True)
    assert refused(client, "/api/comparisons", {"model": "bundle"}).startswith("a comparison needs a prompt")
    assert refused(client, "/api/comparisons", {**body, "max_tokens": 1}).endswith("it must be at least 2")
    assert refused(client, "/api/comparisons", {**body, "prompt": " "}) == "the prompt is empty; write one"


def test_an_exactness_check_is_explained_and_kept_or_cancelled(client: httpx.Client) -> None:
    assert ask(client, "/api/exactness")["reports"] == {}
    begun = ask(client, "/api/exactness", {"model": "bundle", "max_tokens": 8})["check"]
    assert begun["state"] == "running"
    assert refused(client, "/api/exactness", {"model": "bundle"}).startswith("an exactness check is running")
    wait_until(lambda: ask(client, "/api/exactness")["check"]["state"] != "running")
    got = ask(client, "/api/exactness")
    assert got["check"]["state"] == "done", got["check"]
    report = got["reports"]["bundle"]["report"]
    assert report["passed"]
    assert report["result"].startswith(("Bit-identical for every pass width", "Identical up to near ties"))
    assert {row["kind"] for row in report["rows"]} == {"greedy", "sampled", "exact", "together"}
    for row in report["rows"]:
        assert row["texts"] == row["identical"] + row["near_ties"] + row["failed"]
    assert all(row["texts"] > 0 for row in report["rows"])
    # The next one is cancelled.
    ask(client, "/api/exactness", {"model": "bundle", "limit": 20, "max_tokens": 200})
    wait_until(lambda: ask(client, "/api/exactness")["check"]["stage"] == "comparing texts")
    ask(client, "/api/exactness/cancel", {})
    wait_until(lambda: ask(client, "/api/exactness")["check"]["state"] != "running")
    assert ask(client, "/api/exactness")["check"]["state"] == "cancelled"


def test_a_check_opens_the_model_as_the_app_does(tmp_path: Path, tiny_bundle: Path) -> None:
    with running_app(tmp_path, tiny_bundle, "--context", "4") as app, app.entered() as client:
        ask(client, "/api/exactness", {"max_tokens": 8})
        wait_until(lambda: ask(client, "/api/exactness")["check"]["state"] != "running")
        check = ask(client, "/api/exactness")["check"]
        assert check["state"] == "failed"
        assert "context" in check["error"]


def test_the_sampling_that_a_model_asks_for_is_told(tmp_path: Path, tiny_bundle: Path) -> None:
    models = [tmp_path / name for name in ("greedy", "sampled")]
    for folder in models:
        shutil.copytree(tiny_bundle, folder)
    (models[0] / "generation_config.json").write_text('{"do_sample": false, "top_k": 20}', encoding="utf-8")
    sampled = '{"do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 1.0}'
    (models[1] / "generation_config.json").write_text(sampled, encoding="utf-8")
    with (
        ModelPool([str(folder) for folder in models], lambda path, progress: load(path, progress=progress)) as pool,
        ConversationStore.in_memory() as store,
    ):
        context = AppContext(store, pool, EventChannel(), ServerSettings())
        told = [model["sampling_defaults"] for model in model_objects(context)]
    assert told == [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 20}]


def job_of(client: httpx.Client, key: str) -> dict[str, Any]:
    jobs: list[dict[str, Any]] = ask(client, "/api/exports")["jobs"]
    return next(job for job in jobs if job["key"] == key)


def job_that_is(client: httpx.Client, key: str, state: str) -> dict[str, Any]:
    """The job, once it does not work any more; it has this state then."""
    wait_until(lambda: job_of(client, key)["state"] not in {"queued", "measuring", "exporting"})
    job = job_of(client, key)
    assert job["state"] == state, job["error"]
    return job


def left_over(home: Path, cache: Path) -> list[Path]:
    """Folders of exports that are not whole."""
    models = home / "models"
    hidden = [path for path in models.iterdir() if path.name.startswith(".")] if models.is_dir() else []
    work = cache / "app-exports"
    return [*hidden, *(work.iterdir() if work.is_dir() else ())]


def test_an_export_follows_the_plan_that_is_chosen(
    client: httpx.Client, checkpoint: Path, home: Path, cache: Path
) -> None:
    body = {"source": str(checkpoint), "name": "Tiny mixed", "calibration_tokens": TOKENS}
    key = ask(client, "/api/exports", body)["job"]["key"]
    assert "there is a model with the name" in refused(client, "/api/exports", body)
    plans = job_that_is(client, key, "choosing")["plans"]
    assert len(plans) >= 3
    # A frontier: every larger plan is closer to the original.
    assert [plan["bytes_read"] for plan in plans] == sorted(plan["bytes_read"] for plan in plans)
    assert [plan["kl"] for plan in plans] == sorted((plan["kl"] for plan in plans), reverse=True)
    assert refused(client, f"/api/exports/{key}/choose", {"plan": 99}).startswith("plan is 99")
    ask(client, f"/api/exports/{key}/choose", {"plan": 1})
    assert job_that_is(client, key, "done")["result"]["kl"] > plans[-1]["kl"]
    assert left_over(home, cache) == []
    manifest = open_bundle(home / "models" / "Tiny mixed").manifest
    assert manifest is not None
    assert manifest.command == "edge-run app"
    assert manifest.bits_per_weight < plans[-1]["bits_per_weight"]
    # It is offered at once, answers, and can be removed.
    assert model_of(client, "Tiny mixed")["removable"]
    ask(client, "/api/models/load", {"id": "Tiny mixed"})
    ask(client, "/api/models/remove", {"id": "Tiny mixed"})
    assert not (home / "models" / "Tiny mixed").exists()


def test_a_cancelled_export_leaves_nothing(client: httpx.Client, checkpoint: Path, home: Path, cache: Path) -> None:
    body = {"source": str(checkpoint), "name": "cancelled", "calibration_tokens": TOKENS}
    key = ask(client, "/api/exports", body)["job"]["key"]
    wait_until(lambda: left_over(home, cache))
    ask(client, f"/api/exports/{key}/cancel", {})
    job_that_is(client, key, "cancelled")
    assert left_over(home, cache) == []
    assert not (home / "models" / "cancelled").exists()
    ask(client, f"/api/exports/{key}/cancel", {})
    assert all(job["key"] != key for job in ask(client, "/api/exports")["jobs"])


def test_an_export_of_one_format_has_one_step(client: httpx.Client, checkpoint: Path, home: Path) -> None:
    key = ask(client, "/api/exports", {"source": str(checkpoint), "bits": 8})["job"]["key"]
    job = job_that_is(client, key, "done")
    assert job["name"] == "tiny-chat"
    assert job["result"]["bits_per_weight_in_file"] == 9.0
    assert (home / "models" / "tiny-chat" / "model.onnx").is_file()


def test_an_export_that_is_cancelled_while_its_plans_arrive_does_not_wait_for_a_choice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path))
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    jobs, measured = ExportJobs("export", "job", EventChannel()), threading.Event()

    def cancelled_at_the_end(*_: object) -> dict[str, Any]:
        jobs.cancel(jobs.list()["jobs"][0]["key"])
        measured.set()
        return {"plans": [{"bytes_read": 1, "bits_per_weight": 4.0, "kl": 0.1, "plan": ""}]}

    monkeypatch.setattr(export_jobs, "run_job", cancelled_at_the_end)
    jobs.add("checkpoint")
    measured.wait()
    jobs.close()
    assert [job["state"] for job in jobs.list()["jobs"]] == ["cancelled"]


def test_exports_that_cannot_be_made_are_errors_of_one_line(client: httpx.Client, tmp_path: Path) -> None:
    for body, message in (
        ({"source": " "}, "the source is empty"),
        ({"source": "x", "name": "../up"}, "'../up' cannot be the name of a model"),
        ({"source": "x", "name": "shell-helper"}, "'shell-helper' cannot be the name of a model"),
        ({"source": "x", "bits": 3}, "bits is 3"),
    ):
        assert refused(client, "/api/exports", body).startswith(message)
    key = ask(client, "/api/exports", {"source": str(tmp_path / "missing")})["job"]["key"]
    assert job_that_is(client, key, "failed")["error"].startswith(f"{tmp_path / 'missing'} does not exist")


def test_a_plain_install_is_told_which_extra_an_export_needs(checkpoint: Path) -> None:
    program = (
        "import sys; sys.modules['onnx'] = None; from edgerun.edge.app.models.job_process import main; sys.exit(main())"
    )
    request = {"kind": "export", "arguments": {"source": str(checkpoint), "destination": "unused"}}
    command = [sys.executable, "-c", program]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None  # it stays open: the process ends its work where it is closed
        assert process.stdout is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        message = json.loads(process.stdout.readline())
    assert message["error"]["what"] == "export needs the package onnx"
    assert "edge-run[export]" in message["error"]["hint"]
