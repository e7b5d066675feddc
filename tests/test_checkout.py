"""A checkout on any system has the bytes that were committed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from edgerun.models.bundle import open_bundle

ROOT = Path(__file__).parent.parent
BUNDLED = Path("models", "bundled", "shell-helper")


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs git and a clone")
def test_a_clone_with_autocrlf_leaves_the_bundled_model_valid(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    command = ["git", "-c", "core.autocrlf=true", "clone", "--quiet", "--shared", ROOT, clone]
    subprocess.run(command, check=True, capture_output=True)
    for folder in (clone / BUNDLED, clone / BUNDLED / "draft"):
        assert open_bundle(folder).manifest is not None
    texts = [clone / ".ci" / "run", clone / "edge" / "bench" / "prompts.jsonl"]
    assert not any(b"\r" in path.read_bytes() for path in texts)
