"""What an export asks of the runtime, on this machine."""

from __future__ import annotations

from ..export.workbench import Workbench
from ..runtime.measure.bundle_timing import BundleStopwatch
from ..runtime.measure.draft_benefit import DraftJudge
from ..runtime.measure.machine import machine
from ..runtime.measure.node_timing import BundleNodeStopwatch
from ..runtime.measure.self_text import read_texts, write_texts


def bench_of_this_machine() -> Workbench:
    """Everything with onnxruntime on this machine's processor."""
    return Workbench(write_texts, read_texts, BundleStopwatch(), BundleNodeStopwatch(), DraftJudge(), machine())
