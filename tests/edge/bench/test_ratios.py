"""The arithmetic of `edge-run bench`, and its report."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from edgerun.edge.bench.bench_result import Conditions, Result
from edgerun.edge.bench.ratios import PLAIN, Count, Estimate, Run, Trial, accounts, as_mapping, geometric_mean, ratio
from edgerun.edge.bench.report_name import check_report_name
from edgerun.edge.bench.table import show
from edgerun.errors import InputError


def run(tokens: int, seconds: float, passes: int | None = None, drafted: int = 0) -> Run:
    """A run whose every guess beyond the rejected ones was taken."""
    passes = tokens if passes is None else passes
    taken = tokens - passes
    candidates = Count(max(drafted, taken), taken)
    depths = (candidates,) if candidates.drafted else ()
    sources = {"suffix": candidates} if candidates.drafted else {}
    return Run(tokens, seconds, passes, candidates, sources, depths, target_s=0.9 * seconds, prompt_s=0.5)


def trial(category: str, conversation: int, plain_s: float, seconds: float, tokens: int = 10, **more: object) -> Trial:
    runs = {PLAIN: run(tokens, plain_s), "auto": run(tokens, seconds, passes=tokens // 2, drafted=tokens)}
    return Trial(category, conversation, 1, runs, **more)  # type: ignore[arg-type]


def result(trials: list[Trial], *, replay: bool = False, **more: object) -> Result:
    name = "a <b>model</b>"
    conditions = Conditions(name, None, "CPU", None, 256, "prompts.jsonl", replay, 64, "all", 0.0, len(trials))
    plain = Run.total(each.runs[PLAIN] for each in trials)
    return Result(conditions, accounts(trials), plain, [8.0, 8.2, 9.9, 11.0], 100, **more)  # type: ignore[arg-type]


def test_a_category_is_the_ratio_of_its_sums_and_the_mean_is_geometric() -> None:
    trials = [trial("a", 0, 1.0, 0.5), trial("a", 1, 3.0, 1.5), trial("b", 2, 8.0, 1.0, tokens=40)]
    (account,) = accounts(trials)
    assert [each.name for each in account.categories] == ["a", "b"]
    assert account.categories[0].ratio.value == pytest.approx(2.0)
    assert account.categories[1].ratio.value == pytest.approx(8.0)
    assert account.mean.value == pytest.approx(4.0)
    assert account.categories[0].plain.rate == pytest.approx(5.0)
    assert account.by_turn == {1: pytest.approx(4.0)}
    assert account.answers == 3


def test_an_answer_of_one_token_says_nothing_about_speed() -> None:
    short = Trial("a", 5, 1, {PLAIN: run(0, 0.0), "auto": run(0, 0.0)})
    assert accounts([short]) == []
    (account,) = accounts([short, trial("a", 0, 1.0, 0.5)])
    assert account.answers == 1


def test_different_numbers_of_tokens_are_compared_by_rate() -> None:
    assert ratio(run(30, 1.0), run(10, 1.0)) == pytest.approx(3.0)


def test_the_interval_is_wide_where_conversations_differ_and_a_point_where_they_do_not() -> None:
    def mean(*numbered: tuple[int, float]) -> Estimate:
        return accounts([trial("a", number, 1.0, seconds) for number, seconds in numbered])[0].mean

    alike = mean(*((number, 0.5) for number in range(8)))
    assert alike.interval == pytest.approx((alike.value, alike.value))
    mixed = mean(*((number, 0.25 + 0.25 * (number % 3)) for number in range(8)))
    assert mixed.interval is not None
    assert mixed.interval[0] < mixed.value < mixed.interval[1]
    together = mean(*((number // 3, 0.2 + 0.3 * (number % 3)) for number in range(9)))
    assert together.interval == pytest.approx((together.value, together.value)), "turns stay with their conversation"
    assert mean((0, 0.2), (1, 0.5)).interval is None, "two conversations do not tell how much they differ"


def test_the_same_measurement_gives_the_same_interval() -> None:
    trials = [trial("a", number, 1.0, 0.3 + 0.1 * number) for number in range(5)]
    assert accounts(trials) == accounts(trials)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_the_geometric_mean_lies_within_and_turns_over_with_its_values(values: list[float]) -> None:
    mean = geometric_mean(values)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)
    assert mean * geometric_mean([1 / value for value in values]) == pytest.approx(1)


RUNS = st.builds(
    lambda passes, taken, more, seconds: run(passes + taken, seconds, passes, taken + more),
    st.integers(1, 50),
    st.integers(0, 50),
    st.integers(0, 50),
    st.floats(0.01, 10),
)


@given(st.lists(RUNS, min_size=1, max_size=6))
def test_sums_keep_the_identities(runs: list[Run]) -> None:
    total = Run.total(runs)
    assert total.tokens == total.passes + total.candidates.accepted
    assert total.candidates.accepted <= total.candidates.drafted
    assert sum(total.by_source.values(), Count()) == total.candidates == sum(total.by_depth, Count())
    assert total.tokens_per_pass == pytest.approx(1 + total.candidates.accepted / total.passes)
    assert total.seconds == pytest.approx(math.fsum(each.seconds for each in runs))
    assert total.draft_s + total.target_s + total.between_s == pytest.approx(total.seconds)


def test_json_is_plain_and_says_what_it_holds_for() -> None:
    found = result([trial("a", 0, 1.0, 0.5, differing=frozenset({"auto"}))], cut=2)
    mapping = json.loads(json.dumps(found.as_mapping(), allow_nan=False))
    assert mapping["replay"] is False
    assert mapping["cut_prompts"] == 2
    assert mapping["plain"]["tokens_per_second"] == 10
    mode = mapping["modes"]["auto"]
    assert (mode["geometric_mean"], mode["differing"], mode["answers"]) == (2.0, 1, 1)
    assert mode["by_source"] == {"suffix": {"drafted": 10, "accepted": 5}}
    assert mode["categories"]["a"]["tokens_per_pass"] == 2.0
    assert set(mode["round_ms"]) == {"draft", "target", "host", "host_drafting", "all"}
    assert mode == as_mapping(found.accounts[0])


def test_the_terminal_shows_whether_texts_are_the_same_or_that_they_are_recorded() -> None:
    def shown(found: Result) -> str:
        console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
        with console.file:
            show(console, found)
        return console.export_text()

    trials = [trial("a", 0, 1.0, 0.5), trial("a", 1, 1.0, 0.5, differing=frozenset({"auto"}))]
    text = shown(result(trials))
    assert "auto: 1 of 2 texts are plain decoding's." in text
    assert "Replay" not in text
    assert "busy" not in text
    text = shown(result(trials, replay=True, load=3.5))
    assert "Replay: the tokens are those of a recording. Every pass over the weights was run at its full cost" in text
    assert "of 2 texts" not in text
    assert "busy" in text


def test_modes_that_learned_from_each_other_are_not_compared_in_silence() -> None:
    def learned(name: str) -> Run:
        return Run(10, 0.5, 5, Count(10, 5), {name: Count(10, 5)}, (Count(10, 5),), target_s=0.4)

    def notes(*names: str) -> str:
        runs = {PLAIN: run(10, 1.0), **{f"{number}": learned(name) for number, name in enumerate(names)}}
        return " ".join(result([Trial("a", 0, 1, runs)]).notes)

    assert "Measure one mode a run" in notes("recycle", "recycle")
    assert "Measure one mode a run" not in notes("recycle", "suffix")


class Elements(HTMLParser):
    """What a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        self.ids += [value or "" for name, value in attrs if name == "id"]


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    report = pytest.importorskip("edgerun.edge.bench.report", reason="needs matplotlib")
    path = tmp_path / "report.html"
    path.write_text("an older one")
    report.write_report(path, result([trial("a & b", 0, 1.0, 0.5), trial("c", 1, 1.0, 2.0)], replay=True))
    assert list(tmp_path.iterdir()) == [path]
    text = path.read_text(encoding="utf-8")
    page = Elements()
    page.feed(text)
    assert page.tags.count("svg") == 4
    assert not {"script", "link", "iframe", "img"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert "a &lt;b&gt;model&lt;/b&gt;" in text
    assert "<b>model" not in text
    assert "Replay: the tokens are those of a recording" in text
    assert not re.search(r"#01011[0-9]|#01010[0-9]|#020202", text.split("</style>")[1]), "placeholders are variables"
    assert "prefers-color-scheme: dark" in text


def test_the_report_may_be_a_picture(tmp_path: Path) -> None:
    report = pytest.importorskip("edgerun.edge.bench.report", reason="needs matplotlib")
    path = tmp_path / "report.PNG"
    report.write_report(path, result([trial("a", 0, 1.0, 0.5)]))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_report_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"end its name in \.html or \.png"):
        check_report_name(tmp_path / "report.pdf")
    with pytest.raises(InputError, match="name a file in a folder that exists"):
        check_report_name(tmp_path / "no" / "report.html")
