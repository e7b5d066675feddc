"""Exports that write a report: page, JSON, manifest and terminal output agree."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from edgerun.export.calibration import work_folder
from edgerun.models.atomic import discard_folder
from support.commands import Capture, Patch, output_of

tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("reported") / "source")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def mapped_work(monkeypatch: Patch) -> list[str]:
    """Files of a work folder that are mapped into memory when it is removed, which Windows would refuse."""
    found: list[str] = []

    def discard(folder: Path) -> bool:
        maps = Path("/proc/self/maps")
        lines = maps.read_text(encoding="utf-8").splitlines() if maps.exists() else []
        found.extend(line for line in lines if f"{folder}{os.sep}" in line)
        return discard_folder(folder)

    monkeypatch.setattr(work_folder, "discard_folder", discard)
    return found


def test_a_calibrated_export_has_a_report(
    checkpoint: Path, tmp_path: Path, capsys: Capture, mapped_work: list[str]
) -> None:
    out = tmp_path / "out"
    options = ("--weights", "int4", "--block", "64", "--method", "awq+gptq", "--calibration-tokens", "1100")
    shown = output_of(capsys, "export", checkpoint, out, *options)
    assert mapped_work == []
    assert list((tmp_path / "cache" / "exports").iterdir()) == []
    report, manifest = (json.loads((out / name).read_text(encoding="utf-8")) for name in ("report.json", "edge.json"))
    assert report["shipped"] | {"tokens": 0} == pytest.approx(manifest["quality"] | {"tokens": 0}, rel=1e-5)
    assert report["calibration"] == manifest["calibration"]
    assert report["calibration"]["awq"] is True
    assert report["command"] == manifest["command"]
    assert [linear["name"] for linear in report["linears"]] == [
        name for name in manifest["weights"] if name != "embedding"
    ]
    assert all(linear["kl_alone"] > 0 for linear in report["linears"])
    assert {linear["weight_format"]["method"] for linear in report["linears"]} == {"gptq"}
    chosen, nearest = report["plans"]
    assert (chosen["kind"], nearest["kind"], nearest["name"]) == ("chosen", "nearest", "int4/64 rtn")
    assert chosen["bytes_read"] == nearest["bytes_read"] == sum(linear["bytes_read"] for linear in report["linears"])
    assert report["kl_against_nearest"] == pytest.approx(chosen["kl"] / nearest["kl"], rel=1e-4)
    assert sorted(map(int, report["speed"]["measured"])) == [1, 2, 4, 8]
    assert report["seconds"] > 0
    assert {"processor", "onnxruntime"} <= report["machine"].keys()
    assert (out / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert shown.count("mean KL") == 2
    assert shown.count("With --kv int8 the mean KL from a float cache is") == 1
    assert (
        f"held-out tokens of text sampled from the model itself: mean KL {report['shipped']['mean_kl']:#.3g}," in shown
    )
    assert "than round-to-nearest" in shown


@pytest.mark.nightly
def test_report_option_and_replacing_a_bundle_with_a_report(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    for weights, bits, most_kl in (("int8", 10.0, 0.1), ("int4", 6.0, 1.0)):
        output_of(capsys, "export", checkpoint, out, "--weights", weights, "--report", "--calibration-tokens", "1100")
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        assert report["bits_per_weight_read"] == pytest.approx(bits)
        assert report["shipped"]["mean_kl"] < most_kl
    output_of(capsys, "export", checkpoint, out, "--weights", "int4")
    assert not (out / "report.json").exists()
    assert output_of(capsys, out, "-p", "the", "-n", "3")
