"""Ratios and intervals of `edge-run bench`, and its report."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edgerun.edge.bench.bench_result import BenchConditions, BenchResult
from edgerun.edge.bench.ratios import (
    PLAIN,
    Estimate,
    MeasuredTurn,
    compare_modes,
    rate_ratio,
    round_ms,
    spread_of_plain,
)
from edgerun.edge.cli.bench import show
from edgerun.runtime.result import DraftCounts, Stats


def answer(tokens: int, seconds: float, passes: int | None = None, drafted: int = 0) -> Stats:
    """Statistics of an answer of `tokens` tokens after the first; every pass gives one token besides accepted ones."""
    passes = tokens if passes is None else passes
    accepted = tokens - passes
    counts = DraftCounts(max(drafted, accepted), accepted)
    return Stats(
        completion_tokens=tokens + 1,
        decode_passes=passes,
        first_token_s=0.5,
        total_s=0.5 + seconds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        by_source={"suffix": counts} if counts.drafted else {},
        by_depth=(counts,) if counts.drafted else (),
        target_s=0.9 * seconds,
    )


def turn(
    category: str, conversation: int, plain_s: float, seconds: float, tokens: int = 10, **more: object
) -> MeasuredTurn:
    stats = {PLAIN: answer(tokens, plain_s), "auto": answer(tokens, seconds, passes=tokens // 2, drafted=tokens)}
    return MeasuredTurn(category, conversation, 1, stats, **more)  # type: ignore[arg-type]


def result(turns: list[MeasuredTurn], *, replay: bool = False, **more: object) -> BenchResult:
    name = "a <b>model</b>"
    conditions = BenchConditions(name, None, "CPU", None, 256, "prompts.jsonl", replay, 64, "all", 0.0, len(turns))
    plain = Stats.total(each.stats[PLAIN] for each in turns)
    return BenchResult(conditions, compare_modes(turns), plain, **more)  # type: ignore[arg-type]


def shown(found: BenchResult) -> str:
    console = Console(record=True, width=120, file=io.StringIO())
    show(console, found)
    return console.export_text()


def test_a_category_is_the_ratio_of_its_sums_and_the_mean_is_geometric() -> None:
    turns = [turn("a", 0, 1.0, 0.5), turn("a", 1, 3.0, 1.5), turn("b", 2, 8.0, 1.0, tokens=40)]
    (mode,) = compare_modes(turns)
    assert [each.name for each in mode.categories] == ["a", "b"]
    assert mode.categories[0].ratio.value == pytest.approx(2.0)
    assert mode.categories[1].ratio.value == pytest.approx(8.0)
    assert mode.mean.value == pytest.approx(4.0)
    assert mode.categories[0].plain.decode_tokens_per_second == pytest.approx(5.0)
    assert rate_ratio(answer(30, 1.0), answer(10, 1.0)) == pytest.approx(3.0)
    assert mode.stats.answers == 3
    short = MeasuredTurn("a", 5, 1, {PLAIN: answer(0, 0.0), "auto": answer(0, 0.0)})
    assert compare_modes([short]) == []
    (mode,) = compare_modes([short, turn("a", 0, 1.0, 0.5)])
    assert mode.stats.answers == 1


def test_the_interval_depends_on_how_much_conversations_differ() -> None:
    def mean(*numbered: tuple[int, float]) -> Estimate:
        return compare_modes([turn("a", number, 1.0, seconds) for number, seconds in numbered])[0].mean

    alike = mean(*((number, 0.5) for number in range(8)))
    assert alike.interval == pytest.approx((alike.value, alike.value))
    mixed = mean(*((number, 0.25 + 0.25 * (number % 3)) for number in range(8)))
    assert mixed.interval[0] < mixed.value < mixed.interval[1]
    together = mean(*((number // 3, 0.2 + 0.3 * (number % 3)) for number in range(9)))
    assert together.interval == pytest.approx((together.value, together.value)), "turns stay with their conversation"
    assert mean((0, 0.2), (1, 0.5)).interval is None, "two conversations do not tell how much they differ"
    turns = [turn("a", number, 1.0, 0.3 + 0.1 * number) for number in range(5)]
    assert compare_modes(turns) == compare_modes(turns), "the same measurement gives the same interval"


ANSWERS = st.builds(
    lambda passes, accepted, more, seconds: answer(passes + accepted, seconds, passes, accepted + more),
    st.integers(1, 50),
    st.integers(0, 50),
    st.integers(0, 50),
    st.floats(0.01, 10),
)


@given(st.lists(ANSWERS, min_size=1, max_size=6))
def test_totals_satisfy_the_identities_of_their_parts(answers: list[Stats]) -> None:
    total = Stats.total(answers)
    assert total.answers == len(answers)
    assert total.decode_tokens == total.decode_passes + total.accepted
    assert total.accepted <= total.drafted
    nothing = DraftCounts()
    assert sum(total.by_source.values(), nothing) == total.draft_counts == sum(total.by_depth, nothing)
    assert total.tokens_per_pass == pytest.approx(1 + total.accepted / total.decode_passes)
    assert total.decode_s == pytest.approx(math.fsum(each.decode_s for each in answers))
    times = round_ms(total)
    assert times["draft"] + times["target"] + times["host"] == pytest.approx(times["total"])
    assert times["total"] * total.decode_passes == pytest.approx(1e3 * total.decode_s)


def test_json_has_results_and_conditions() -> None:
    found = result([turn("a", 0, 1.0, 0.5, differing=frozenset({"auto"}))], shortened=2)
    mapping = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert mapping["replay"] is False
    assert mapping["shortened_prompts"] == 2
    assert mapping["plain"]["tokens_per_second"] == 10
    mode = mapping["modes"]["auto"]
    assert (mode["geometric_mean"], mode["differing"], mode["answers"]) == (2.0, 1, 1)
    assert mode["by_source"] == {"suffix": {"drafted": 10, "accepted": 5}}
    assert mode["categories"]["a"]["tokens_per_pass"] == 2.0
    assert set(mode["round_ms"]) == {"draft", "target", "host", "total"}
    assert mode == found.modes[0].to_json()


def test_the_terminal_shows_whether_texts_differ_or_are_recorded() -> None:
    turns = [turn("a", 0, 1.0, 0.5), turn("a", 1, 1.0, 0.5, differing=frozenset({"auto"}))]
    text = shown(result(turns))
    assert "auto: 1 of 2 texts equal those of plain decoding." in text
    assert "Replay" not in text
    assert "Other programs" not in text
    text = shown(result(turns, replay=True, others=1.6, busy=True))
    assert "Replay: the tokens are those of a recording. Every pass over the weights counts at its full cost" in text
    assert "of 2 texts" not in text
    assert "Other programs used the processor" in text


ENOUGH = [turn("a", number, 10.0, 5.0 + 0.1 * number, tokens=50) for number in range(6)]


def without_drafts(one: MeasuredTurn) -> MeasuredTurn:
    return dataclasses.replace(one, stats={PLAIN: one.stats[PLAIN], "auto": answer(50, 8.0)})


@pytest.mark.parametrize(
    ("turns", "load", "reason"),
    [
        ([without_drafts(one) for one in ENOUGH], {}, "no draft token was verified"),
        ([turn("a", n, 1.0, 0.5) for n in range(6)], {}, "the answers had only 60 tokens after their first"),
        ([*ENOUGH, turn("b", 7, 1.0, 0.5)], {}, "a category has fewer than 3 conversations"),
        (ENOUGH, {"others": 1.62, "busy": True}, "meanwhile (they used 1.6 processors on average). Close them"),
        (ENOUGH, {"plain_spread": 2.5}, "the faster ones ran at 2.5 times the speed of the slower ones"),
    ],
    ids=["drafted", "tokens", "conversations", "busy", "spread"],
)
def test_there_is_no_ratio_at_the_top_without_enough_data_or_on_a_busy_machine(
    turns: list[MeasuredTurn], load: dict[str, object], reason: str
) -> None:
    found = result(turns, **load)
    (line,) = found.headlines
    assert line.startswith("auto: no ratio, because ")
    assert reason in line
    described = found.to_json()["headlines"]["auto"]
    assert (described["ratio"], described["interval"]) == (None, None)
    assert reason in described["reason"]
    assert "geometric mean" in shown(found), "the table stays"
    assert " times as fast" not in shown(found)


def test_with_enough_data_the_ratio_is_at_the_top_with_its_interval() -> None:
    found = result(ENOUGH, others=0.1)
    (mode,) = found.modes
    low, high = mode.mean.interval
    (line,) = found.headlines
    assert line.startswith(
        f"auto: {mode.mean.value:.2f} times as fast as plain decoding (95 % interval {low:.2f} to {high:.2f}), "
    )
    assert line in shown(found).splitlines()[1]
    described = found.to_json()["headlines"]["auto"]
    assert described["ratio"] == pytest.approx(mode.mean.value, rel=1e-4)
    assert described["reason"] is None


def test_the_spread_of_plain_decoding_is_that_of_its_quartiles() -> None:
    assert spread_of_plain(ENOUGH) == 1
    assert spread_of_plain(ENOUGH[:5]) == 1
    slow = [turn("a", number, 40.0, 5.0, tokens=50) for number in range(6)]
    assert spread_of_plain([*ENOUGH, *slow]) == pytest.approx(4.0)
    assert spread_of_plain([*ENOUGH, *[turn("a", 9, 0.1, 0.1, tokens=4)] * 20]) == 1, "short answers tell nothing"


def test_a_note_says_that_modes_learned_from_each_other() -> None:
    def learned(name: str) -> Stats:
        counts = DraftCounts(10, 5)
        return dataclasses.replace(answer(10, 0.5, passes=5, drafted=10), by_source={name: counts})

    def notes(*names: str) -> str:
        stats = {PLAIN: answer(10, 1.0), **{f"{number}": learned(name) for number, name in enumerate(names)}}
        return " ".join(result([MeasuredTurn("a", 0, 1, stats)]).notes)

    assert "measure one mode a run" in notes("recycle", "recycle")
    assert "measure one mode a run" not in notes("recycle", "suffix")
