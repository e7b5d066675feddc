"""`edge-run verify`: its summary, JSON and exit codes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from edgerun.edge.cli.main import main
from edgerun.edge.cli.verify import exactness_summary
from edgerun.models.json_file import record_from_json
from edgerun.runtime.measure.exactness import ComparisonCounts, ExactnessReport, WidthNoise
from edgerun.runtime.result import DraftCounts
from support.commands import Capture, Patch, json_of, output_of
from support.tiny_models import write_bundle

NOISE = WidthNoise({1: 0.0, 2: 0.1}, trees=0.1, perturbed=0.1, leak=0.0, spread=4.0, positions=96)
EXACT = dataclasses.replace(NOISE, chains={1: 0.0, 2: 0.0}, trees=0.0)
SAME = ComparisonCounts(texts=10, identical=10, near_ties=0, drafts=DraftCounts(5, 3))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("the other on the other\nand in the end\nof the sea", encoding="utf-8")
    return file


pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(
    ("report", "summary"),
    [
        (ExactnessReport(EXACT, SAME, SAME, SAME), "bit-identical"),
        (ExactnessReport(NOISE, SAME, SAME, SAME), "identical up to ties below 0.2 (0 of 30 texts differ)"),
        (
            ExactnessReport(NOISE, dataclasses.replace(SAME, identical=8, near_ties=2), SAME, SAME),
            "identical up to ties below 0.2 (2 of 30 texts differ, each at a tie)",
        ),
        (
            ExactnessReport(NOISE, dataclasses.replace(SAME, identical=8, near_ties=1), SAME, SAME),
            "FAILED: 1 of 30 texts differ where no tie is below 0.2",
        ),
        (
            ExactnessReport(dataclasses.replace(NOISE, leak=1.0), SAME, SAME, SAME),
            "FAILED: passes over several tokens compute something else than passes over one token",
        ),
        (
            ExactnessReport(NOISE),
            "identical up to ties below 0.2, measured on one text; edge-run verify compares more",
        ),
    ],
)
def test_the_summary_of_a_report(report: ExactnessReport, summary: str) -> None:
    assert exactness_summary(report) == summary


def test_a_model_passes_and_its_report_is_stored_and_shown(
    tiny_bundle: Path, prompts: Path, cache: Path, capsys: Capture
) -> None:
    assert "not checked yet; edge-run verify checks it" in output_of(capsys, "inspect", tiny_bundle)
    assert main(["verify", str(tiny_bundle), "--prompts", str(prompts), "-n", "16", "--limit", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "6 of 6 texts identical" in out
    assert "12 of 12 texts identical" in out
    assert out.splitlines()[-1].startswith("identical up to ties below")
    assert len(list((cache / "exactness").iterdir())) == 1
    shown = json_of(capsys, "inspect", tiny_bundle, "--json")["exactness"]
    assert shown["summary"] == out.splitlines()[-1]
    assert shown["passed"] is True


def test_json_is_one_object(tmp_path: Path, prompts: Path, capsys: Capture) -> None:
    from edgerun.export import INT8

    bundle = write_bundle(tmp_path, "qwen3", weights=INT8)
    found = json_of(capsys, "verify", bundle, "--prompts", prompts, "-n", "16", "--json")
    assert found["exact"]["identical"] == found["exact"]["texts"] == 9
    assert found["greedy"]["identical"] + found["greedy"]["near_ties"] == 9
    assert found["counterexample"] is None
    assert found["epsilon"] > 0
    assert record_from_json(ExactnessReport, found).passed


def test_a_failure_shows_a_counterexample_and_has_exit_code_1(
    tiny_bundle: Path, prompts: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    from edgerun.runtime.speculation import speculator

    verify_tree = speculator.verify_tree

    def wrong_next_token(*arguments: Any) -> Any:
        result = verify_tree(*arguments)
        return result._replace(next_token=(result.next_token + 1) % 300)

    monkeypatch.setattr(speculator, "verify_tree", wrong_next_token)
    assert main(["verify", str(tiny_bundle), "--prompts", str(prompts), "-n", "16"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "FAILED: 30 of 39 texts differ where no tie is below" in out
    assert 'for the prompt "the other on the other"' in out
    assert "drafts by oracle: token" in out


@pytest.mark.parametrize(("kv", "least_kl", "most_kl", "agreement"), [("int8", 0, 0.02, 0.9), ("int4", 0.02, 1, 0.4)])
def test_with_a_quantized_cache_it_measures_the_loss_of_quality(
    tmp_path: Path, prompts: Path, capsys: Capture, kv: str, least_kl: float, most_kl: float, agreement: float
) -> None:
    bundle = write_bundle(tmp_path)
    arguments = ["verify", str(bundle), "--prompts", str(prompts), "-n", "12", "--limit", "1", "--kv", kv]
    found = json_of(capsys, *arguments, "--json")
    cache = found[f"{kv}_cache"]
    assert least_kl < cache["mean_kl"] < most_kl
    assert cache["top1_agreement"] > agreement
    assert cache["positions"] >= cache["longest"] > 12
    assert found["greedy"]["texts"] > 0
    # A report of one cache format says nothing about the other.
    assert len(list((tmp_path / "cache" / "exactness").iterdir())) == 1
    assert f"{kv} cache" not in output_of(capsys, *arguments[:-2])
    assert len(list((tmp_path / "cache" / "exactness").iterdir())) == 2
