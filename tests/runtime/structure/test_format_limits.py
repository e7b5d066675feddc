"""Wrong, huge, recursive and explosive formats are served, or refused in one line: nothing ends the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")

import edgerun
from edgerun import EdgeError, Engine, GenerateOptions, InputError, ResponseFormat
from edgerun.runtime.structure import grammar
from support.hostile_formats import HOSTILE, response_format_of

FEW = GenerateOptions(raw=True, max_tokens=40, temperature=1.0, seed=2)


@pytest.fixture(scope="module")
def engine(tiny_bundle: Path) -> Iterator[Engine]:
    with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
        yield engine


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_formats_are_served_or_refused(engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "_COMPILE_S", 100.0)  # some take a second, and other programs may be running
    field, value, message = HOSTILE[name]
    if not message:
        assert engine.generate("the", FEW, response_format=response_format_of(field, value)).stats.completion_tokens
        return
    with pytest.raises(EdgeError) as caught:
        engine.generate("the", FEW, response_format=response_format_of(field, value))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_every_one_of_thousands_of_choices_is_possible(engine: Engine) -> None:
    choices = [f"{number:04}" for number in range(10_000)]
    for seed in range(3):
        reply = engine.generate("the", FEW, seed=seed, response_format=ResponseFormat.choice(choices))
        assert reply.text in choices


def test_formats_that_take_too_long_keep_two_threads_at_most(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, running = threading.Event(), threading.Semaphore(0)

    def stuck(_: ResponseFormat) -> str:
        running.release()
        assert go_on.wait(60)
        return "start: "

    monkeypatch.setattr(grammar, "_COMPILE_S", 0.05)
    monkeypatch.setattr(grammar, "grammar_text", stuck)
    for number in range(2):
        with pytest.raises(InputError, match=r"takes longer than 0\.05 s to compile"):
            engine.generate("the", FEW, response_format=ResponseFormat.regex(f"slow{number}"))
    with pytest.raises(InputError, match="other response formats are still being compiled"):
        engine.generate("the", FEW, response_format=ResponseFormat.regex("slow"))
    monkeypatch.undo()
    go_on.set()
    assert engine.generate("the", FEW, response_format=ResponseFormat.regex("abc")).text == "abc"
    assert running.acquire(blocking=False)
    assert running.acquire(blocking=False)
    assert not running.acquire(blocking=False)
