"""Optional data for tests: real tokenizers, prompts and a trained checkpoint, where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data_path(name: str) -> Path:
    """A path under the data folder (`EDGERUN_DATA`, else ../shared/data); skips the test when it is not there."""
    default = Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(os.environ.get("EDGERUN_DATA", default)) / name
    if not path.exists():
        pytest.skip(f"{name} is not at hand")
    return path
