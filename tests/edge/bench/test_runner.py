"""`edge-run bench` with real models: from the command line, and its runner."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun.edge.bench.prompt_sets import Conversation, Exchange
from edgerun.edge.bench.ratios import PLAIN, MeasuredTurn
from edgerun.edge.bench.runner import (
    BenchSettings,
    DecodingMode,
    encode_turn,
    measure_modes,
    parse_turns,
)
from edgerun.edge.cli.main import main
from edgerun.errors import ContextError, InputError
from edgerun.runtime.options import GenerateOptions
from edgerun.runtime.speculation.choice import Speculation
from edgerun.runtime.speculation.replay import OracleMode
from support.commands import Capture, fails

AUTO = DecodingMode("auto", Speculation.AUTO)
ORACLE = DecodingMode("oracle", Speculation.AUTO, oracle_mode=OracleMode.RIGHT)
REPEATING = "the other day the other day the other day "


def bench(capsys: Capture, *arguments: object) -> str:
    """Run it; returns what it prints."""
    assert main(["bench", *map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def bench_json(capsys: Capture, *arguments: object) -> dict[str, Any]:
    """Run it with --json; returns the object, which must be all that it prints."""
    out = bench(capsys, *arguments, "--json")
    assert out.count("\n") == 1
    found: dict[str, Any] = json.loads(out)
    return found


def prompts(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def recording(folder: Path, *answers: str) -> Path:
    path = folder / "recording.jsonl"
    turns = [{"prompt": "say it", "response": answer} for answer in answers]
    path.write_text(json.dumps({"category": "repeating", "turns": turns}) + "\n", encoding="utf-8")
    return path


def test_prompts_are_measured_and_texts_compared(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    rows = [{"category": name, "turns": ["the", "again"]} for name in ("a", "b", "b")]
    options = (tiny_bundle, "--prompts", prompts(tmp_path, *rows), "-n", 24, "--limit", 1, "--spec", "auto")
    found = bench_json(capsys, *options, "--spec", "suffix")
    assert list(found["modes"]) == ["auto", "suffix"]
    assert list(found["modes"]["auto"]["categories"]) == ["a", "b"]
    assert found["conversations"] == 2
    for mode in found["modes"].values():
        assert mode["differing"] == 0
        assert mode["accepted"] <= mode["drafted"]
        assert mode["drafted"] == sum(count["drafted"] for count in mode["by_source"].values())
    assert found["benchmark"] == "speculation"
    shown = bench(capsys, *options)
    assert "geometric mean" in shown
    assert "texts equal those of plain decoding" in shown
    assert "{" not in shown, "JSON only with --json"


def test_a_replay_is_labelled_and_measures_the_recorded_tokens(
    tiny_bundle: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = recording(tmp_path, REPEATING, REPEATING)  # 28 tokens each
    options = (tiny_bundle, "--replay", path, "--turns", "2", "-n", 40)
    assert "Replay: the tokens are those of a recording" in bench(capsys, *options)
    found = bench_json(capsys, *options)
    assert found["replay"] is True
    assert found["modes"]["auto"]["categories"]["repeating"]["tokens"] == 27


def measured(
    bundle: Path, conversations: list[Conversation], settings: BenchSettings, *modes: DecodingMode
) -> list[MeasuredTurn]:
    fractions: list[float] = []
    with edgerun.load(bundle) as engine:
        numbered = dict(enumerate(conversations))
        found = measure_modes(engine, numbered, modes, settings, lambda _, fraction: fractions.append(fraction))
        turns = list(chain.from_iterable(found))
    assert fractions == [done / (len(fractions) - 1) for done in range(len(fractions))]
    return turns


def test_each_pass_emits_its_accepted_tokens_and_one_more(tiny_bundle: Path) -> None:
    conversations = [Conversation("repeating", (Exchange(REPEATING, REPEATING * 2),))]
    found = measured(tiny_bundle, conversations, BenchSettings(50, replay=True), AUTO, ORACLE)
    (turn,) = found
    assert set(turn.stats) == {PLAIN, "auto", "oracle"}
    for stats in turn.stats.values():
        assert stats.decode_tokens == 49 == stats.decode_passes + stats.accepted
    assert turn.stats[PLAIN].drafted == 0
    oracle = turn.stats["oracle"]
    assert oracle.accepted == oracle.drafted
    assert not turn.shortened


def test_later_turns_contain_the_recorded_answers_or_those_of_plain_decoding(tiny_bundle: Path) -> None:
    conversations = [Conversation("a", (Exchange("say it", REPEATING), Exchange("again", REPEATING)))]
    found = measured(tiny_bundle, conversations, BenchSettings(16), AUTO)
    assert [turn.turn for turn in found] == [1, 2]
    assert not any(turn.differing for turn in found)
    with edgerun.load(tiny_bundle) as engine:
        first = engine.generate("say it", max_tokens=16, temperature=0).text
        said = [("user", "say it"), ("assistant", first), ("user", "again")]
        expected = engine.encode_chat([{"role": role, "content": content} for role, content in said])
        assert found[1].stats[PLAIN].prompt_tokens == len(expected)
        before, last = conversations[0].exchanges
        tokens = encode_turn(engine, BenchSettings(16, replay=True), last, [before])
        said[1] = ("assistant", REPEATING)
        assert tokens.prompt == engine.encode_chat([{"role": role, "content": content} for role, content in said])
        assert tokens.answer == engine.tokenizer.encode(REPEATING, add_special_tokens=False)[:16]


def test_long_prompts_lose_their_oldest_turns_first(tiny_bundle: Path) -> None:
    before = [Exchange("a" * 100, "b" * 100), Exchange("c", "d")]
    settings = BenchSettings(64)
    with edgerun.load(tiny_bundle) as engine:
        whole = encode_turn(engine, settings, Exchange("e"), before[1:])
        assert not whole.shortened
        assert encode_turn(engine, settings, Exchange("e"), before) == whole._replace(shortened=True)
        question = encode_turn(engine, settings, Exchange("the other " * 200), before)
        assert question.shortened
        assert engine.context // 2 < len(question.prompt) <= engine.context - 64
        raw = encode_turn(engine, BenchSettings(64, options=GenerateOptions(raw=True)), Exchange("e"), before[1:])
        assert raw.prompt == engine.tokenizer.encode("c\n\nd\n\ne", add_special_tokens=True)
    with (
        edgerun.load(tiny_bundle, context=2) as engine,
        pytest.raises(ContextError, match="no prompt fits a context of 2 tokens"),
    ):
        encode_turn(engine, settings, Exchange("the other day"))


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [("all", (1, 2, 9), ()), ("2", (2,), (1, 3)), ("1-2", (1, 2), (3,)), ("2-", (2, 9), (1,))],
)
def test_turn_ranges(text: str, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    turns = parse_turns(text)
    assert all(turn in turns for turn in inside)
    assert not any(turn in turns for turn in outside)
    for bad in ("", "0", "-", "-2", "2-1", "1-2-3", "two", "²", "1.5", "999999999999"):
        with pytest.raises(InputError, match="give all, a number such as 2"):
            parse_turns(bad)


def test_bad_usage_is_a_one_line_error(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    path = prompts(tmp_path, {"turns": ["the"]})
    replay = recording(tmp_path, REPEATING)
    both = fails(capsys, "bench", tiny_bundle, "--prompts", path, "--replay", replay)
    assert "--prompts and --replay exclude each other" in both
    second = fails(capsys, "bench", tiny_bundle, "--prompts", path, "--turns", "2")
    assert "--turns 2 selects no turn of prompts.jsonl" in second
    assert "give all, a number" in fails(capsys, "bench", tiny_bundle, "--turns", "two")
    assert "there is no drafter 'magic'" in fails(capsys, "bench", tiny_bundle, "--spec", "magic")
    assert "cannot be read" in fails(capsys, "bench", tiny_bundle, "--prompts", tmp_path / "nothing")
    assert "does not exist" in fails(capsys, "bench", tmp_path / "nothing", "--prompts", path)
    assert "greater than or equal to 2" in fails(capsys, "bench", tiny_bundle, "-n", 1)
    short = recording(tmp_path, "a")
    assert "no answer had a second token" in fails(capsys, "bench", tiny_bundle, "--replay", short)


def test_clients_at_a_time_are_measured(tiny_bundle: Path, capsys: Capture) -> None:
    options = (tiny_bundle, "--prompt-tokens", 40, "-n", 6, "--clients", 2, 3)
    found = bench_json(capsys, *options)
    assert (found["benchmark"], found["prompt_tokens"], found["max_tokens"]) == ("clients", 40, 6)
    assert found["conversations"] == 36  # two requests of six clients in three turns
    rows = found["clients"]
    assert [row["clients"] for row in rows] == [1, 2, 3]
    assert rows[0]["ratio"] == 1
    for row in rows:
        assert row["tokens_per_second"] > 0
        assert 0 < row["first_token_ms"] <= row["first_token_p95_ms"]
        assert 0 < row["token_ms"] <= row["token_p95_ms"]
    shown = bench(capsys, *options)
    assert "Prompts of 40 tokens, answers of 6; --spec auto." in shown
    for changes, message in (
        (("--turns", "2"), "--clients and --turns exclude each other"),
        (("--spec", "off", "--spec", "auto"), "--clients takes one --spec"),
        (("-n", 100_000), "do not fit the context of"),
    ):
        assert message in fails(capsys, "bench", *options, *changes)
    assert "without --clients" in fails(capsys, "bench", *options[:3])
