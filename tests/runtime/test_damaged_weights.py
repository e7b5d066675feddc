"""Weights that are NaN, in a bundle without digests: an error for every way of decoding, and no empty answer."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import EdgeError, Speculation
from edgerun.edge.cli.main import main


@pytest.fixture
def damaged(tiny_bundle: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_bundle, folder)
    (folder / "edge.json").unlink()
    weights = folder / "model.onnx.data"
    values = np.fromfile(weights, np.float32)
    values[np.isfinite(values)] = np.nan
    weights.write_bytes(values.tobytes())
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 1.0, "top_k": 5, "seed": 1},
        {"speculation": Speculation.OFF},
        {"exact": True},
    ],
)
def test_no_answer_comes_of_weights_that_are_nan(damaged: Path, options: dict[str, object]) -> None:
    with edgerun.load(damaged) as engine:
        for _ in range(2):
            with pytest.raises(EdgeError, match="the model computes NaN logits; its weights are damaged"):
                engine.generate("the", raw=True, **options)


@pytest.mark.parametrize("command", [["-p", "the"], ["-p", "the", "--json"], ["-p", "the", "--spec", "off", "-t", "1"]])
def test_the_command_fails_on_weights_that_are_nan(
    damaged: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([str(damaged), *command]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "the model computes NaN logits" in err
