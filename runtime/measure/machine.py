"""Describes the machine that a measurement was taken on, for reports."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ...version import __version__
from ..graph.ort import RUNTIME_VERSION


def describe_machine() -> dict[str, str]:
    """Return names and versions that speed depends on."""
    return {
        "processor": _processor_name(),
        "logical cores": str(os.cpu_count() or "unknown"),
        "system": platform.platform(terse=True),
        "onnxruntime": RUNTIME_VERSION,
        "edge-run": __version__,
    }


def _processor_name() -> str:
    """Return the processor's model name, or its architecture where the system does not report the name."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
