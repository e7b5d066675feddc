"""With a history, answers are stored and drafted from: in the same process and in the next, with the same text."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import edgerun
from edgerun import Engine, GenerateOptions, Reply, Speculation
from edgerun.edge.cli.main import main
from edgerun.models.bundle import open_bundle
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.session import SessionConfig
from edgerun.runtime.measure.measurement_store import model_key
from edgerun.runtime.measure.pass_timing import PASS_COSTS
from edgerun.runtime.scheduling import idle_thread
from edgerun.runtime.speculation import pool
from edgerun.runtime.speculation.pass_cost import PassCost

PROMPT = "the other"
OPTIONS = GenerateOptions(max_tokens=40, speculation=Speculation.parse("history"))


@pytest.fixture
def bundle(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Path:
    """The tiny model, with a cache of its own that says that wide passes cost nothing, so that drafting pays."""
    monkeypatch.setattr(idle_thread, "_IDLE_S", 0.01)
    monkeypatch.setattr(pool, "_INDEX_REST", 0)
    config = SessionConfig(choose_device("cpu"), 1)
    PASS_COSTS.save(model_key(open_bundle(tiny_bundle), config), PassCost({256: {1: 0.01, 16: 0.01}}))
    return tiny_bundle


async def read(engine: Engine) -> Reply:
    return Reply.of([chunk async for chunk in engine.astream(PROMPT, OPTIONS)])


WAYS: tuple[Callable[[Engine], Reply], ...] = (
    lambda engine: engine.generate(PROMPT, OPTIONS),
    lambda engine: Reply.of(engine.stream(PROMPT, OPTIONS)),
    lambda engine: engine.session().send(PROMPT, OPTIONS),
    lambda engine: asyncio.run(engine.agenerate(PROMPT, OPTIONS)),
    lambda engine: asyncio.run(read(engine)),
)


def wait_for_index(engine: Engine) -> None:
    """Wait until everything that was answered is indexed."""
    store = engine.model.drafters._store
    limit = time.monotonic() + 120
    while store.unindexed_tokens():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_what_was_answered_is_drafted_from_in_this_process_and_the_next(bundle: Path) -> None:
    with edgerun.load(bundle, device="cpu", threads=1, cache=True, history=False) as engine:
        plain = engine.generate(PROMPT, OPTIONS.changed({"speculation": Speculation.OFF})).text
    with edgerun.load(bundle, device="cpu", threads=1, history=True) as engine:
        first = engine.generate(PROMPT, OPTIONS)
        assert "history" not in first.stats.by_source
        wait_for_index(engine)
        replies = [answer(engine) for answer in WAYS]
    with edgerun.load(bundle, device="cpu", threads=1, history=True) as engine:
        replies.append(engine.generate(PROMPT, OPTIONS))
    assert all(reply.stats.by_source["history"].accepted > 0 for reply in replies)
    assert {first.text, *(reply.text for reply in replies)} == {plain}


def test_engines_over_one_history_draft_from_each_other(bundle: Path) -> None:
    with (
        edgerun.load(bundle, device="cpu", threads=1, history=True) as one,
        edgerun.load(bundle, device="cpu", threads=1, history=True) as other,
    ):
        first = one.generate(PROMPT, OPTIONS)
        other.generate("the", OPTIONS)
        wait_for_index(other)
        again = other.generate(PROMPT, OPTIONS)
    assert again.stats.by_source["history"].accepted > 0
    assert again.text == first.text


def test_the_command_line_drafts_from_what_it_answered_before(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(bundle), "-p", PROMPT, "-n", "40", "--threads", "1", "--json", "--spec", "history", "--history"]
    replies = []
    for _ in range(2):
        assert main(command) == 0
        replies.append(json.loads(capsys.readouterr().out))
    assert replies[0]["speculation"]["by_source"] == {}
    assert replies[1]["speculation"]["by_source"]["history"]["accepted"] > 0
    assert replies[0]["text"] == replies[1]["text"]


def test_without_history_nothing_is_stored(bundle: Path, tmp_path: Path) -> None:
    with edgerun.load(bundle, device="cpu", threads=1) as engine:
        generate_without = engine.generate(PROMPT, max_tokens=10)
    assert generate_without.text
    assert not (tmp_path / "cache" / "history").exists()
