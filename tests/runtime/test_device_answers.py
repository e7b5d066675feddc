"""Answers on a device: the CPU's text, its conversations, and threads side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.devices import require_webgpu, run_json_script
from support.shared_data import data_path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
BEST_BYTES = 64 * 12
"""Bytes of the ids and the logits of the best tokens of a position."""


def check_answers(found: dict[str, Any]) -> None:
    assert found["device"] == found["cpu"]
    assert found["drafted"] > 0
    assert max(found["reused"]) > 16
    conversations = found["conversations"]
    assert all(texts == conversations[0] for texts in conversations)
    assert found["side by side"] == [found["cpu"]["greedy"]] * 3


def check_text(found: dict[str, Any], tokens: int) -> None:
    assert found["on_cpu"] == {}
    assert found["plain_equal"] == found["drafted_equal"] == tokens
    assert found["plain"]["bytes"] == BEST_BYTES
    assert found["drafted"]["trees"] > 0


def test_answers_are_those_of_the_cpu(tiny_bundle: Path, tmp_path: Path) -> None:
    require_webgpu()
    check_answers(run_json_script(SUPPORT / "device_answers.py", tiny_bundle, tmp_path, 8))


@pytest.mark.nightly
def test_long_answers_are_those_of_the_cpu(tiny_bundle: Path, tmp_path: Path) -> None:
    """Also exact ones: the slots that wide passes wrote are computed again at near ties."""
    require_webgpu()
    check_answers(run_json_script(SUPPORT / "device_answers.py", tiny_bundle, tmp_path, 100))


@pytest.mark.nightly
def test_text_with_heads_of_64_channels_is_that_of_the_cpu(tmp_path: Path) -> None:
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    require_webgpu()
    bundle = tiny.write_bundle(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    check_text(run_json_script(SUPPORT / "device_text.py", bundle, 200), 200)


@pytest.mark.nightly
def test_text_of_a_quantized_model_is_that_of_the_cpu(tmp_path: Path) -> None:
    export = pytest.importorskip("edgerun.export", reason="needs the export extra")
    require_webgpu()
    source = data_path("weights/stories260K-hf")
    request = export.ExportRequest(source, tmp_path / "bundle", export.ExportRecipe(export.INT4))
    check_text(run_json_script(SUPPORT / "device_text.py", export.export_checkpoint(request).bundle, 200), 200)
