"""The result of an export on the terminal."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx", reason="needs the export extra")

from edgerun.edge.terminal.output import SafeConsole
from edgerun.edge.terminal.report_summary import show_report
from edgerun.export.report.figures import ModelReport
from support.export_reports import whole_report


def shown(report: ModelReport, width: int = 100) -> list[str]:
    console = SafeConsole()
    console.width = width
    with console.capture() as captured:
        show_report(console, report)
    return captured.get().splitlines()


def test_plans_are_sorted_by_size_without_intermediate_ones() -> None:
    report = whole_report(6)
    lines = shown(report)
    names = [plan.name for plan in sorted(report.plans, key=lambda plan: plan.bytes_read)]
    shown_names = [
        line.split("│")[1].strip() for line in lines if line.count("│") == 6 and "layer" not in line.split("│")[1]
    ]
    expected = [name for name in names if name != "search step" and not name.startswith("head")]
    assert [name for name in shown_names if name in expected] == expected
    assert "search step" not in shown_names
    assert sum(line.startswith("│ layer") for line in lines) == 6


def test_each_figure_has_a_line() -> None:
    lines = shown(whole_report(2), width=150)
    assert (
        "quality on 2048 held-out tokens of text sampled from the model itself: mean KL 0.0812, "
        "top-1 agreement 91.2%, perplexity 9.130 (float32: 8.765)"
    ) in lines
    assert "KL is 50% less than uniform plans of its size" in lines
    assert sum("mean KL" in line or "perplexity" in line for line in lines) == 1, "one line of quality"
    assert "speed-up with the draft: 1.69x (2.34 tokens per pass)" in lines
    assert "tokens per second: 113.6 (plain decoding; 116.3 predicted)" in lines
    assert lines[-1] == "2 linears have a low-rank correction of rank 16."
