"""Wrong, huge, recursive and explosive formats are served, or refused in one line: nothing ends the process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="needs the extra structured")

import edgerun
from edgerun import BusyError, EdgeError, Engine, GenerateOptions, InputError, ResponseFormat
from edgerun.runtime.structure import grammar
from support.hostile_formats import HOSTILE, response_format_of

PATIENCE_S = 120.0
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


def test_too_many_alternatives_are_refused_before_they_are_compiled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "grammar_text", lambda _: pytest.fail("the grammar was compiled"))
    for name in ("200,000 alternatives", "a long sequence", "a sequence of long texts", "a list of long constants"):
        with pytest.raises(InputError, match=" parts in "):
            engine.generate("the", FEW, response_format=response_format_of(*HOSTILE[name][:2]))


def test_the_kind_of_a_grammar_is_found_in_one_pass_over_its_text() -> None:
    """In a process of its own: with a search that starts again at every line it would not end."""
    code = """
from edgerun.runtime.structure.response_format import is_gbnf
for text in ("\\n" * 4_000_000, "\\n \\n" * 1_000_000, "start[\\n" * 500_000, "start" + " " * 4_000_000):
    assert not is_gbnf(text)
    assert is_gbnf(f"{text}\\nroot ::= 'a'")
    assert not is_gbnf(f"{text}\\n start [a]\\t: 'a' # ::=")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def large(name: str) -> ResponseFormat:
    return ResponseFormat.choice([f"{name} {number}" for number in range(2000)])


def test_large_formats_do_not_keep_others_waiting(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, grammar_text = threading.Event(), grammar.grammar_text

    def stuck(response_format: ResponseFormat) -> str:
        if len(response_format.text) > 10_000:
            assert go_on.wait(PATIENCE_S)
        return grammar_text(response_format)

    monkeypatch.setattr(grammar, "_COMPILE_S", 0.05)
    monkeypatch.setattr(grammar, "_PLACE_S", 0.05)
    monkeypatch.setattr(grammar, "grammar_text", stuck)
    for name in ("first", "second"):
        with pytest.raises(InputError, match=r"takes longer than 0\.05 s to compile"):
            engine.generate("the", FEW, response_format=large(name))
    with pytest.raises(BusyError, match="other response formats are still being compiled"):
        engine.generate("the", FEW, response_format=large("third"))
    monkeypatch.setattr(grammar, "_COMPILE_S", PATIENCE_S)
    assert engine.generate("the", FEW, response_format=ResponseFormat.regex("abcd")).text == "abcd"
    go_on.set()
    # What was compiled too late is there when it is asked for again.
    monkeypatch.setattr(grammar, "grammar_text", lambda _: pytest.fail("it was compiled twice"))
    assert engine.generate("the", FEW, response_format=large("first")).text.startswith("first ")


def test_a_format_is_compiled_once_for_all_who_wait_for_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, grammar_text = [], grammar.grammar_text
    start, begun = threading.Barrier(4), threading.Event()

    def slow(response_format: ResponseFormat) -> str:
        compiled.append(response_format)
        begun.set()
        time.sleep(0.2)
        return grammar_text(response_format)

    def ask() -> None:
        if start.wait(PATIENCE_S):
            assert begun.wait(PATIENCE_S)
        engine.generate("the", FEW, response_format=ResponseFormat.regex("once"))

    monkeypatch.setattr(grammar, "grammar_text", slow)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1


def test_kept_grammars_are_bounded_by_the_size_of_their_formats(tiny_bundle: Path) -> None:
    with edgerun.load(tiny_bundle, threads=1, cache=False) as engine:
        for number in range(12):
            engine.generate("the", FEW, response_format=large(f"number {number}"))
        kept = engine.model._formats._grammars._kept  # type: ignore[union-attr]
        assert 2 <= len(kept) <= 8
        assert sum(len(each.text) for each in kept) <= grammar._KEPT_CHARACTERS
        huge = ResponseFormat.choice([f"choice number {number}" for number in range(10_000)])
        engine.generate("the", FEW, response_format=huge)
        assert list(kept) == [huge]
