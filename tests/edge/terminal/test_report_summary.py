"""The result of an export on the terminal, and the quantization plan, whose equal neighbouring layers share a row."""

from __future__ import annotations

import dataclasses
import re
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnx", reason="needs the export extra")

from edgerun.edge.terminal.output import SafeConsole
from edgerun.edge.terminal.report_summary import layer_runs, plan_table, show_report
from edgerun.export.report.figures import ModelReport
from edgerun.models.manifest import Calibration, Manifest, Method, WeightFormat
from support.commands import Capture, json_of, output_of
from support.export_reports import whole_report


def shown(what: ModelReport | dict[str, WeightFormat], width: int = 200) -> str:
    """What is printed of a report, or of a plan."""
    console = SafeConsole()
    console.width = width
    with console.capture() as captured:
        if isinstance(what, dict):
            console.print(plan_table(what))
        else:
            show_report(console, what)
    return captured.get()


def test_plans_are_sorted_by_size_without_intermediate_ones() -> None:
    report = whole_report(6)
    lines = shown(report, 100).splitlines()
    names = [plan.name for plan in sorted(report.plans, key=lambda plan: plan.bytes_read)]
    shown_names = [
        line.split("│")[1].strip() for line in lines if line.count("│") == 6 and "layer" not in line.split("│")[1]
    ]
    expected = [name for name in names if name != "search step" and not name.startswith("head")]
    assert [name for name in shown_names if name in expected] == expected
    assert "search step" not in shown_names
    assert sum(line.startswith("│ layer") for line in lines) == 6


def test_each_figure_has_a_line() -> None:
    lines = shown(whole_report(2), 150).splitlines()
    assert (
        "quality on 2048 held-out tokens of text sampled from the model itself: mean KL 0.0812, "
        "top-1 agreement 91.2%, perplexity 9.130 (float32: 8.765)"
    ) in lines
    assert "KL is 50% less than uniform plans of its size" in lines
    assert sum("mean KL" in line or "perplexity" in line for line in lines) == 1, "one line of quality"
    assert "speed-up with the draft: 1.69x (2.34 tokens per pass)" in lines
    assert "tokens per second: 113.6 (plain decoding; 116.3 predicted)" in lines
    assert lines[-1] == "A note."


PARTS = ("qkv", "o", "gate_up", "down")
FORMATS = [WeightFormat(2, 64, method=Method.GPTQ), WeightFormat(4, 128, method=Method.GPTQ), WeightFormat(32)]
plans = st.lists(st.tuples(*[st.sampled_from(FORMATS)] * len(PARTS)), min_size=1, max_size=12)


def plan_of(layers: list[tuple[WeightFormat, ...]]) -> dict[str, WeightFormat]:
    linears = {
        f"layers.{at}.{part}": form for at, forms in enumerate(layers) for part, form in zip(PARTS, forms, strict=True)
    }
    return {"embedding": FORMATS[0], **linears, "head": FORMATS[1]}


@given(plans)
def test_layer_runs_expand_to_the_plan(layers: list[tuple[WeightFormat, ...]]) -> None:
    runs = layer_runs(plan_of(layers))
    expanded = [linears for first, last, linears in runs for _ in range(first, last + 1)]
    assert expanded == [dict(zip(PARTS, map(str, forms), strict=True)) for forms in layers]
    assert all(before[2] != after[2] for before, after in pairwise(runs))
    assert [first for first, _, _ in runs] == [0, *(last + 1 for _, last, _ in runs[:-1])]


def test_layers_are_in_numeric_order_and_differing_methods_are_named() -> None:
    plan = {f"layers.{at}.qkv": FORMATS[0] for at in range(11)}
    assert "layers 0 to 10" in shown(plan)
    assert "gptq" not in shown(plan)
    plan["layers.10.qkv"] = WeightFormat(4, 32, method=Method.RTN)
    assert "layers 0 to 9" in shown(plan)
    assert "int4/32 rtn" in shown(plan)
    del plan["layers.5.qkv"]
    assert re.findall(r"layers? \d+(?: to \d+)?", shown(plan)) == ["layers 0 to 4", "layers 6 to 9", "layer 10"]
    table = shown({"layers.0.o": FORMATS[0], "layers.1.qkv": FORMATS[1], "layers.0.odd": FORMATS[2]})
    assert table.index("qkv") < table.index(" o ") < table.index("odd")
    assert "-" in table


def test_inspect_prints_the_plan_and_the_calibration(tiny_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = shutil.copytree(tiny_bundle, tmp_path / "model")
    facts = json_of(capsys, "inspect", folder, "--json")
    assert (facts["calibration"], facts["quality"]) == (None, {})
    manifest = Manifest.from_json((folder / "edge.json").read_bytes())
    assert facts["quantization_plan"].keys() == manifest.weights.keys()
    planned = dataclasses.replace(
        manifest,
        weights={**manifest.weights, "layers.1.down": WeightFormat(2, 64, method=Method.GPTQ)},
        calibration=Calibration("written by the model", 900, 100, awq=True),
        quality={"mean_kl": 0.125},
    )
    (folder / "edge.json").write_text(planned.to_json(), encoding="utf-8")
    facts = json_of(capsys, "inspect", folder, "--json")
    down = {"format": "int2/64", "bits": 2, "block": 64, "method": "gptq"}
    assert facts["quantization_plan"]["layers.1.down"] == down
    assert facts["methods"]["gptq"] == 1
    assert facts["calibration"]["held_out_tokens"] == 100
    shown = " ".join(output_of(capsys, "inspect", folder).split())
    assert "written by the model: 900 tokens, 100 held out, AWQ scaling" in shown
    assert "mean KL 0.125" in shown
    assert "layer 1" in shown
