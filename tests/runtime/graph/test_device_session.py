"""Passes and caches on a device: WebGPU, over a Vulkan driver in software."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.devices import require_webgpu, run_json_script
from support.shared_data import data_path

SUPPORT = Path(__file__).resolve().parents[2] / "support"
BEST = 64
"""Number of the best logits that the graph ranks."""


def check_rounds(bundle: Path, rounds: int) -> None:
    found = run_json_script(SUPPORT / "device_rounds.py", bundle, rounds)
    assert found["rounds"] == rounds
    assert found["moves"] > rounds / 10
    assert found["on_cpu"] == {}
    assert found["slots"] < 1e-4
    assert found["logits"] < 1e-3
    assert found["capacities"][:3] == [16, 32, 64]
    assert found["best_equal"]
    assert found["best"] == BEST
    # Ids of 8 bytes and logits of 4, instead of the whole vocabulary.
    assert found["few_bytes"] == BEST * 12


def test_trees_leave_the_cache_of_sequential_decoding(tiny_bundle: Path) -> None:
    require_webgpu()
    check_rounds(tiny_bundle, 50)


@pytest.mark.nightly
def test_many_trees_leave_the_cache_of_sequential_decoding(tmp_path: Path) -> None:
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    require_webgpu()
    check_rounds(tiny.write_bundle(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2), 1000)


@pytest.mark.nightly
def test_trees_of_a_quantized_model_leave_the_cache_of_sequential_decoding(tmp_path: Path) -> None:
    export = pytest.importorskip("edgerun.export", reason="needs the export extra")
    require_webgpu()
    source = data_path("weights/stories260K-hf")
    request = export.ExportRequest(source, tmp_path / "bundle", export.ExportRecipe(export.INT4))
    check_rounds(export.export_checkpoint(request).bundle, 50)
