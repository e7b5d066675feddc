"""`edge-run bench` as a whole: real models, from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun.edge.bench.prompt_sets import Conversation, Exchange
from edgerun.edge.bench.ratios import PLAIN
from edgerun.edge.bench.runner import Asking, Contender, Findings, Plan, TurnRange, measure
from edgerun.edge.cli.main import main
from edgerun.errors import ContextError, InputError
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.replay import OracleMode

AUTO = Contender("auto", Speculation.AUTO)
CEILING = Contender("foreseen", Speculation.AUTO, oracle_mode=OracleMode.RIGHT)
SAID = "the other day the other day the other day "


def bench(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    """Run it; returns the JSON line and all that came before."""
    assert main(["bench", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    tables, _, last = out.rstrip("\n").rpartition("\n")
    return json.loads(last), tables


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["bench", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def prompts(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def recording(folder: Path, *answers: str) -> Path:
    path = folder / "recording.jsonl"
    turns = [{"prompt": "say it", "response": answer} for answer in answers]
    path.write_text(json.dumps({"category": "repeating", "turns": turns}) + "\n")
    return path


def test_prompts_are_measured_and_their_texts_compared(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"category": name, "turns": ["the", "again"]} for name in ("a", "b", "b")]
    options = (tiny_bundle, "--prompts", prompts(tmp_path, *rows), "-n", 24, "--limit", 1, "--spec", "auto")
    found, tables = bench(capsys, *options, "--spec", "suffix")
    assert list(found["modes"]) == ["auto", "suffix"]
    assert list(found["modes"]["auto"]["categories"]) == ["a", "b"]
    assert found["conversations"] == 2
    for mode in found["modes"].values():
        assert mode["differing"] == 0
        assert mode["accepted"] <= mode["drafted"]
        assert mode["drafted"] == sum(count["drafted"] for count in mode["by_source"].values())
    assert "geometric mean" in tables
    assert "texts are plain decoding's" in tables
    assert main(["bench", *map(str, options), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["benchmark"] == "speculation"


def test_a_replay_says_so_and_accepts_what_repeats(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path, SAID, SAID)  # 28 tokens each
    found, tables = bench(capsys, tiny_bundle, "--replay", path, "--turns", "2", "-n", 40)
    assert "Replay: the tokens are those of a recording" in tables
    assert found["replay"] is True
    assert list(found["modes"]["auto"]["by_turn"]) == ["2"]
    assert found["modes"]["auto"]["categories"]["repeating"]["tokens"] == 27


def measured(bundle: Path, conversations: list[Conversation], plan: Plan, *contenders: Contender) -> Findings:
    ticks: list[tuple[int, int]] = []
    with edgerun.load(bundle) as engine:
        found = measure(engine, conversations, contenders, plan, lambda done, todo: ticks.append((done, todo)))
    assert [done for done, _ in ticks] == list(range(len(ticks)))
    assert all(todo == ticks[-1][0] for _, todo in ticks)
    return found


def test_what_is_emitted_is_what_was_accepted_and_one_a_pass(tiny_bundle: Path) -> None:
    conversations = [Conversation("repeating", (Exchange(SAID, SAID * 2),))]
    found = measured(tiny_bundle, conversations, Plan(50, replay=True), AUTO, CEILING)
    (trial,) = found.trials
    assert set(trial.runs) == {PLAIN, "auto", "foreseen"}
    for run in trial.runs.values():
        assert run.tokens == 49 == run.passes + run.candidates.accepted
    assert trial.runs[PLAIN].candidates.drafted == 0
    ceiling = trial.runs["foreseen"].candidates
    assert ceiling.accepted == ceiling.drafted
    assert found.cut == 0


def test_later_turns_hold_the_recorded_or_else_plain_decodings_answers(tiny_bundle: Path) -> None:
    conversations = [Conversation("a", (Exchange("say it", SAID), Exchange("again", SAID)))]
    found = measured(tiny_bundle, conversations, Plan(16), AUTO)
    assert [trial.turn for trial in found.trials] == [1, 2]
    assert not any(trial.differing for trial in found.trials)
    with edgerun.load(tiny_bundle) as engine:
        first = engine.generate("say it", max_tokens=16, temperature=0).text
        said = [("user", "say it"), ("assistant", first), ("user", "again")]
        expected = engine.model.encode_chat([{"role": role, "content": content} for role, content in said])
        assert found.trials[1].context == len(expected)
        asked = Asking(engine, Plan(16, replay=True)).ask(conversations[0].exchanges[:1], conversations[0].exchanges[1])
        said[1] = ("assistant", SAID)
        assert asked.prompt == engine.model.encode_chat([{"role": role, "content": content} for role, content in said])
        assert asked.answer == engine.tokenizer.encode(SAID, add_special_tokens=False)[:16]


def test_prompts_are_cut_to_fit_the_oldest_turns_first(tiny_bundle: Path) -> None:
    before = [Exchange("a" * 100, "b" * 100), Exchange("c", "d")]
    with edgerun.load(tiny_bundle) as engine:
        asking = Asking(engine, Plan(64))
        whole = asking.ask(before[1:], Exchange("e"))
        assert not whole.cut
        shortened = asking.ask(before, Exchange("e"))
        assert shortened.cut
        assert shortened.prompt == whole.prompt
        question = asking.ask(before, Exchange("the other " * 200))
        assert question.cut
        assert engine.context // 2 < len(question.prompt) <= engine.context - 64
        raw = Asking(engine, Plan(64, raw=True)).ask(before[1:], Exchange("e"))
        assert raw.prompt == engine.tokenizer.encode("c\n\nd\n\ne", add_special_tokens=True)
    with edgerun.load(tiny_bundle, context=2) as engine, pytest.raises(ContextError, match="holds no prompt"):
        Asking(engine, Plan(64)).ask((), Exchange("the other day"))


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [("all", (1, 2, 9), ()), ("2", (2,), (1, 3)), ("1-2", (1, 2), (3,)), ("2-", (2, 9), (1,))],
)
def test_turn_ranges(text: str, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    turns = TurnRange.parse(text)
    assert all(turn in turns for turn in inside)
    assert not any(turn in turns for turn in outside)


@pytest.mark.parametrize("text", ["", "0", "-", "-2", "2-1", "1-2-3", "two", "²", "1.5", "999999999999"])
def test_bad_turn_ranges(text: str) -> None:
    with pytest.raises(InputError, match="it must be all, a number such as 2"):
        TurnRange.parse(text)


def test_bad_usage_is_one_line(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prompts(tmp_path, {"turns": ["the"]})
    replay = recording(tmp_path, SAID)
    both = refused(capsys, tiny_bundle, "--prompts", path, "--replay", replay)
    assert "both --prompts and --replay are given" in both
    assert "no conversation of prompts.jsonl has such a turn" in refused(
        capsys, tiny_bundle, "--prompts", path, "--turns", "2"
    )
    assert "it must be all" in refused(capsys, tiny_bundle, "--turns", "two")
    assert "'magic' is unknown" in refused(capsys, tiny_bundle, "--spec", "magic")
    assert "end its name in .html or .png" in refused(capsys, tiny_bundle, "--report", tmp_path / "report.pdf")
    assert "cannot be read" in refused(capsys, tiny_bundle, "--prompts", tmp_path / "nothing")
    assert "does not exist" in refused(capsys, tmp_path / "nothing", "--prompts", path)
    assert "greater than or equal to 2" in refused(capsys, tiny_bundle, "-n", 1)
    short = recording(tmp_path, "a")
    assert "no answer had a second token" in refused(capsys, tiny_bundle, "--replay", short)


def test_a_report_is_written(tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="needs the bench extra")
    path = tmp_path / "report.html"
    bench(capsys, tiny_bundle, "--replay", recording(tmp_path, SAID), "--report", path)
    assert "<svg" in path.read_text(encoding="utf-8")


def test_without_matplotlib_a_report_is_refused_in_one_line_and_the_rest_works(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("edgerun.edge.bench.report", "edgerun.edge.bench.plots"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    replay = recording(tmp_path, SAID)
    assert "a report needs the package matplotlib" in refused(capsys, tiny_bundle, "--report", tmp_path / "a.html")
    bench(capsys, tiny_bundle, "--replay", replay)


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert "Example: edge-run bench" in capsys.readouterr().out
