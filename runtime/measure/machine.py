"""What a measurement was taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ...version import __version__
from ..graph.ort import RUNTIME_VERSION


def machine() -> dict[str, str]:
    """Names and versions that speeds depend on."""
    return {
        "processor": processor(),
        "logical cores": str(os.cpu_count() or "unknown"),
        "system": platform.platform(terse=True),
        "onnxruntime": RUNTIME_VERSION,
        "edge-run": __version__,
    }


def load() -> float | None:
    """Programs that wanted a core in the last minute, on average; None where the system does not tell."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def processor() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
