"""The plans among which an export can choose before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun import InputError
from edgerun.export import ExportRecipe, FrontierPlan, export_model, measure_frontier
from edgerun.models.bundle import open_bundle
from support.tiny_models import write_bundle, write_checkpoint


def mixed(folder: Path, plan: Path | None = None) -> ExportRecipe:
    budget = "4bpw" if plan is None else None
    return ExportRecipe("mixed", budget=budget, plan=plan, calibration_tokens=1200, work=folder / "work")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("frontier"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def plans(source: Path, work: Path) -> tuple[FrontierPlan, ...]:
    return measure_frontier(source, mixed(work))


def test_larger_plans_are_closer_to_the_original(plans: tuple[FrontierPlan, ...]) -> None:
    assert len(plans) >= 3
    assert [plan.bytes_read for plan in plans] == sorted({plan.bytes_read for plan in plans})
    assert [plan.kl for plan in plans] == sorted({plan.kl for plan in plans}, reverse=True)
    bits = [plan.bits_per_weight for plan in plans]
    assert 2 < bits[0] < 4
    assert 8 < bits[-1] <= 10.5


def test_an_export_follows_a_plan_with_what_was_measured(
    plans: tuple[FrontierPlan, ...], source: Path, work: Path
) -> None:
    chosen = plans[len(plans) // 2]
    file = work / "plan.toml"
    file.write_text(chosen.plan, encoding="utf-8")
    stages: list[str] = []
    result = export_model(source, work / "out", mixed(work, file), lambda stage, _: stages.append(stage))
    # The text and the statistics were there.
    assert "text" not in stages
    assert "collecting statistics" not in stages
    assert result.report.chosen.bytes_read == chosen.bytes_read
    manifest = open_bundle(result.bundle).manifest
    assert f'"{manifest.weights["layers.0.down"]}' in chosen.plan


def test_only_checkpoints_have_plans(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path)
    with pytest.raises(InputError, match="mixed weights need a checkpoint of a family that edge-run exports itself"):
        measure_frontier(bundle, mixed(tmp_path))
