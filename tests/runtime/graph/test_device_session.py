"""Passes and caches on a GPU: WebGPU, over a Vulkan driver in software, and CUDA where it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.devices import require_gpu, run_json_script
from support.shared_data import data_path

SUPPORT = Path(__file__).resolve().parents[2] / "support"
BEST = 64
"""Number of the best logits that the graph ranks."""
LIMITS = {"webgpu": (1e-4, 1e-3), "cuda": (0.05, 0.1)}
"""Differences of slots and of logits from the CPU's, in float32 and in float16."""


def check_rounds(bundle: Path, rounds: int, gpu: str = "webgpu") -> None:
    found = run_json_script(SUPPORT / "device_rounds.py", bundle, rounds, gpu, environment=require_gpu(gpu))
    assert found["rounds"] == rounds
    assert found["moves"] > rounds / 10
    assert found["on_cpu"] == {}
    most_of_slots, most_of_logits = LIMITS[gpu]
    assert found["slots"] < most_of_slots
    assert found["logits"] < most_of_logits
    assert found["capacities"][:3] == [16, 32, 64]
    assert found["best_equal"]
    assert found["best"] == BEST
    # Ids of 8 bytes and logits of 4, instead of the whole vocabulary.
    assert found["few_bytes"] == BEST * 12


@pytest.mark.parametrize("gpu", LIMITS)
def test_trees_leave_the_cache_of_sequential_decoding(tiny_bundle: Path, gpu: str) -> None:
    check_rounds(tiny_bundle, 50, gpu)


@pytest.mark.nightly
def test_many_trees_leave_the_cache_of_sequential_decoding(tmp_path: Path) -> None:
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    check_rounds(tiny.write_bundle(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2), 1000)


@pytest.mark.nightly
def test_trees_of_a_quantized_model_leave_the_cache_of_sequential_decoding(tmp_path: Path) -> None:
    export = pytest.importorskip("edgerun.export", reason="needs the export extra")
    source = data_path("weights/stories260K-hf")
    check_rounds(export.export_checkpoint(source, tmp_path / "bundle", export.ExportRecipe(export.INT4)).bundle, 50)
