"""Describes the machine that a measurement was taken on, for reports."""

from __future__ import annotations

import os
import platform
import sys

from ...version import __version__
from ..devices.chip import chip_name, running_architecture
from ..graph.ort import RUNTIME_VERSION


def describe_machine() -> dict[str, str]:
    """Return names and versions that speed depends on."""
    return {
        "processor": chip_name() or running_architecture(),
        "logical cores": str(os.cpu_count() or "unknown"),
        "system": _system(),
        "onnxruntime": RUNTIME_VERSION,
        "edge-run": __version__,
    }


def _system() -> str:
    """Return name and version of the operating system."""
    if sys.platform == "win32":
        # The platform module asks a service of Windows that may hang.
        version = sys.getwindowsversion()
        system = f"Windows-{version.major}.{version.minor}.{version.build}"
    else:
        system = platform.platform(terse=True)
    return system
