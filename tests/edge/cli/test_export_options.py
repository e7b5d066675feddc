"""What is typed after `edge-run export` that contradicts itself: one line each, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgerun.edge.cli.export_options import MethodChoice
from edgerun.edge.cli.main import main
from edgerun.export import Method
from edgerun.export.allocation.format_candidates import chosen_linears
from edgerun.export.checkpoint.config import read_config
from edgerun.models.bundle import open_bundle
from support.tiny_models import write_checkpoint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "3.5bpw"], "--budget says nothing without mixed weights; add --weights mixed"),
        (["--repair"], "--repair says nothing without mixed weights"),
        (["--weights", "mixed"], "mixed weights need either a budget or a plan, not both; add --budget 3.5bpw"),
        (["--weights", "mixed", "--budget", "3 bits"], "'3 bits' is no budget"),
        (["--weights", "mixed", "--budget", "3bpw", "--block", "64"], "with mixed weights, --block says nothing"),
        (
            ["--weights", "mixed", "--budget", "3bpw", "--block", "64", "--draft", "draft"],
            "mixed weights, --block says nothing",
        ),
        (["--weights", "mixed", "--budget", "3bpw", "--head", "int8"], "with mixed weights, --head says nothing"),
        (["--weights", "int4", "--plan", "plan.toml"], "--plan and --weights int4 contradict each other"),
        (["--weights", "mixed", "--budget", "3bpw", "--plan", "plan.toml"], "need either a budget or a plan, not both"),
        (["--head", "mixed"], "only --weights can be mixed"),
        (["--draft-vocab", "100"], "no draft is named; add --draft CHECKPOINT, or --draft-layers auto"),
        (["--draft-layers", "auto", "--draft-weights", "int4"], "a draft of the target's layers has the target's"),
        (["--draft-layers", "auto", "--draft", "draft"], "--draft and --draft-layers each make a draft"),
        (["--draft-layers", "auto", "--draft-vocab", "many"], "--draft-vocab 'many' is no number of tokens"),
        (["--draft-layers", "auto", "--draft-vocab", "0"], "--draft-vocab '0' is no number of tokens"),
        (["--layout", "genai", "--method", "gptq"], "need edge-run's own layout; leave --layout out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_contradictions(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    assert main(["export", str(checkpoint), str(tmp_path / "bundle"), *options]) == 2
    error = capsys.readouterr().err
    assert said in error.replace("\n", " ")
    assert "Traceback" not in error
    assert not (tmp_path / "bundle").exists()


def test_a_draft_beside_mixed_weights_has_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    draft = write_checkpoint(tmp_path / "draft", seed=1, num_hidden_layers=1)
    plan, text = tmp_path / "plan.toml", tmp_path / "text.txt"
    linears = (f'"{linear.name}" = "int8/32"\n' for linear in chosen_linears(read_config(checkpoint)))
    plan.write_text("[units]\n" + "".join(linears))
    text.write_text(" ".join(np.random.default_rng(0).choice(["the", "sea", "and", "sand"], 1200)))
    observed = ["--plan", str(plan), "--calibration", str(text), "--calibration-tokens", "1100"]
    small = ["--draft", str(draft), "--draft-weights", "int8", "--block", "64"]
    assert main(["export", str(checkpoint), str(tmp_path / "bundle"), *observed, *small]) == 0, capsys.readouterr().err
    for folder, block in ((tmp_path / "bundle", 32), (tmp_path / "bundle" / "draft", 64)):
        manifest = open_bundle(folder).manifest
        assert manifest is not None
        assert {form.block for form in manifest.weights.values()} == {block}
    assert "--block 64" in manifest.command


def test_methods_are_a_rounding_and_a_folding() -> None:
    meant = {choice.value: (choice.rounding, choice.folded) for choice in MethodChoice}
    assert meant == {
        "rtn": (Method.RTN, False),
        "k-quant": (Method.K_QUANT, False),
        "hqq": (Method.HQQ, False),
        "gptq": (Method.GPTQ, False),
        "awq": (Method.RTN, True),
        "awq+k-quant": (Method.K_QUANT, True),
        "awq+gptq": (Method.GPTQ, True),
    }
