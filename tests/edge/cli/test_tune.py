"""`edge-run tune`: its output, the stored costs, bad options; and what `inspect` shows of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgerun.edge.cli.main import main
from edgerun.edge.cli.tune import describe_cost
from edgerun.runtime.devices import processor
from edgerun.runtime.devices.processor import Core
from edgerun.runtime.measure import pass_timing, system_load
from edgerun.runtime.measure.pass_timing import WIDTHS
from edgerun.runtime.measure.system_load import LoadMeter
from edgerun.runtime.speculation.pass_cost import PassCost
from support.commands import Capture, Patch, fails, json_of, output_of


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: Patch) -> None:
    monkeypatch.setattr(system_load, "_SECONDS_BUDGET", 0.0)


def test_json_is_one_object_and_inspect_shows_the_costs(tiny_bundle: Path, cache: Path, capsys: Capture) -> None:
    assert json_of(capsys, "inspect", tiny_bundle, "--json")["pass_costs"] is None
    assert main(["tune", str(tiny_bundle), "--json"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert err == ""
    facts = json.loads(out)
    assert " ".join(facts) == "model device devices threads file doubt contexts prompts ngram_bytes"
    assert (facts["model"], facts["device"]) == (str(tiny_bundle), "CPU")
    assert [Path(facts["file"])] == list((cache / "pass-cost").iterdir())
    (entry,) = facts["contexts"]
    assert entry["up_to_context"] == 512
    assert tuple(entry["tokens"]) == WIDTHS
    assert entry["ratio"][0] == 1
    assert json_of(capsys, "inspect", tiny_bundle, "--json")["pass_costs"] == facts["contexts"]


def test_the_table_lists_every_width(tiny_bundle: Path, cache: Path, capsys: Capture) -> None:
    assert "not measured yet; edge-run tune measures them" in output_of(capsys, "inspect", tiny_bundle)
    for _ in range(2):
        assert main(["tune", str(tiny_bundle), "--threads", "1", "--context", "64"]) == 0
        (file,) = (cache / "pass-cost").iterdir()
        assert "seconds" in json.loads(file.read_bytes())
        file.write_bytes(b"damaged")
        out, err = capsys.readouterr()
    assert err == ""
    assert "threads:" not in out, "--threads says how many"
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["tokens", "context", "up", "to", "512"]
    assert [line[0] for line in lines[1 : len(WIDTHS) + 1]] == [str(width) for width in WIDTHS]
    assert lines[1][-1] == "1.00x"
    assert out.splitlines()[len(WIDTHS) + 1].startswith("each further token")
    assert out.splitlines()[len(WIDTHS) + 2].startswith("break-even acceptance")
    # Costs measured with one thread say nothing about the default number of threads.
    assert "not measured yet" in output_of(capsys, "inspect", tiny_bundle)
    assert main(["tune", str(tiny_bundle)]) == 0
    capsys.readouterr()
    assert "context up to 512: milliseconds by tokens 1: " in output_of(capsys, "inspect", tiny_bundle)


@pytest.mark.parametrize("busy", [True, False])
def test_costs_of_a_busy_machine_are_shown_as_doubtful(
    tiny_bundle: Path, cache: Path, capsys: Capture, monkeypatch: Patch, busy: bool
) -> None:
    monkeypatch.setattr(LoadMeter, "is_busy", property(lambda _: busy))
    # What is implausible on a machine that is in fact busy would be doubtful, too.
    monkeypatch.setattr(pass_timing, "is_plausible", lambda _: True)
    # Every module sees two cores, whatever this machine has.
    monkeypatch.setattr(processor, "physical_cores", lambda: tuple(Core(frozenset({cpu})) for cpu in (0, 1)))
    monkeypatch.setattr(processor, "allowed_cpus", lambda: None)
    monkeypatch.setattr(processor, "cpu_quota", lambda: 2.0)
    shown = "doubtful: other programs used the processor while these costs were measured."
    assert main(["tune", str(tiny_bundle)]) == 0
    out, err = capsys.readouterr()
    assert (shown in out, err) == (busy, "")
    first = out.splitlines()[0]
    assert first.startswith("threads: 1: ")
    assert ("not stored, because other programs used the processor" if busy else " from now on, unless") in first
    assert ("doubtful: other programs used the" in output_of(capsys, "inspect", tiny_bundle)) is busy
    facts = json_of(capsys, "tune", tiny_bundle, "--json")
    assert facts["doubt"] == ("busy" if busy else None)
    assert set(facts["threads"]["milliseconds"]) == {"1", "2"}
    assert facts["threads"]["used"] in (1, 2)
    assert json_of(capsys, "inspect", tiny_bundle, "--json")["pass_costs_doubt"] == ("busy" if busy else None)


def test_an_unwritable_cache_folder_gives_a_warning(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "file"))
    assert main(["tune", str(tiny_bundle)]) == 0
    out, err = capsys.readouterr()
    assert "\ntokens" in f"\n{out}"
    assert err == "edge-run: warning: the cache folder cannot be written, so the result is not stored\n"


def test_bad_options_are_a_one_line_error(tiny_bundle: Path, capsys: Capture) -> None:
    assert "greater than or equal to 2" in fails(capsys, "tune", tiny_bundle, "--context", "1")
    assert "this model allows at most 256" in fails(capsys, "tune", tiny_bundle, "--context", "100000")
    assert "does not exist" in fails(capsys, "tune", "nothing")


def test_break_even_acceptance_is_where_the_rates_are_equal() -> None:
    one, two = 0.008, 0.0106
    (entry,) = describe_cost(PassCost({0: {1: one, 2: two, 5: 0.02}}))
    probability = entry["break_even_acceptance"]
    assert (1 + probability) / two == pytest.approx(1 / one, rel=1e-4)
    assert entry["extra_token_milliseconds"] == pytest.approx(3.0)
    (entry,) = describe_cost(PassCost({10**6: {1: 1.0}}))
    assert entry["up_to_context"] is None
    assert entry["break_even_acceptance"] == 1.0


@pytest.mark.parametrize("command", ["tune", "bench", "verify"])
def test_a_tokenizer_can_be_named(command: str, tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    said = fails(capsys, command, tiny_bundle, "--tokenizer", tmp_path)
    assert "holds no tokenizer.json; give a tokenizer.json, or a folder with one" in said
