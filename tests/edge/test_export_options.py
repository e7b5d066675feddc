"""What is typed after `edge-run export` that contradicts itself: one line each, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgerun.edge.cli import main
from edgerun.edge.export_options import MethodChoice
from edgerun.export import Method
from tiny import write_checkpoint


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "3.5bpw"], "--budget says nothing without mixed weights; add --weights mixed"),
        (["--repair"], "--repair says nothing without mixed weights"),
        (["--weights", "mixed"], "mixed weights need a budget or a plan, and not both; add --budget 3.5bpw"),
        (["--weights", "mixed", "--budget", "3 bits"], "'3 bits' is no budget"),
        (["--weights", "mixed", "--budget", "3bpw", "--block", "64"], "with mixed weights, --block says nothing"),
        (["--weights", "mixed", "--budget", "3bpw", "--head", "int8"], "with mixed weights, --head says nothing"),
        (["--weights", "int4", "--plan", "plan.toml"], "--plan and --weights int4 contradict each other"),
        (["--weights", "mixed", "--budget", "3bpw", "--plan", "plan.toml"], "need a budget or a plan, and not both"),
        (["--head", "mixed"], "only --weights can be mixed"),
        (["--draft-vocab", "100"], "no draft is named; add --draft CHECKPOINT, or --draft-layers auto"),
        (["--draft-layers", "auto", "--draft-weights", "int4"], "a draft of the target's layers has the target's"),
        (["--draft-layers", "auto", "--draft", "draft"], "--draft and --draft-layers each make a draft"),
        (["--draft-layers", "auto", "--draft-vocab", "many"], "--draft-vocab 'many' is no number of tokens"),
        (["--draft-layers", "auto", "--draft-vocab", "0"], "--draft-vocab '0' is no number of tokens"),
        (["--layout", "genai", "--method", "gptq"], "are for edge-run's own layout; leave --layout out"),
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
