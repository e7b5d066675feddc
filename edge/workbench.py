"""What an export asks of the runtime, on this machine."""

from __future__ import annotations

from ..export.workbench import Workbench
from .bench.machine import machine
from .judge import DraftJudge
from .node_stopwatch import BundleNodeStopwatch
from .self_text import read_texts, write_texts
from .stopwatch import BundleStopwatch


def bench_of_this_machine() -> Workbench:
    """Everything with onnxruntime on this machine's processor."""
    return Workbench(write_texts, read_texts, BundleStopwatch(), BundleNodeStopwatch(), DraftJudge(), machine())
