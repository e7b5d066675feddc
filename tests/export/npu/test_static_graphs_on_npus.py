"""Static graphs on Qualcomm's simulator and on OpenVINO: wholly taken, and as exact as on the CPU."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgerun.export import INT4, ExportRecipe, WeightFormat, export_checkpoint
from support.devices import require_python, require_qnn, run_edge_run
from support.shared_data import data_path
from support.static_passes import RecordedPasses
from support.tiny_models import write_bundle

WIDTHS, CAPACITY = (1, 4, 40), 48
LOGIT_TOLERANCE = 0.04
"""Relative to the standard deviation of the logits; 0.02 was seen."""
SLOT_TOLERANCE = 0.01
"""Relative to the largest key or value of a tensor; 0.004 was seen."""
FAMILIES = ("gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3")
OPENVINO = {
    "name": "OpenVINOExecutionProvider",
    # On CPUs with instructions for int8 products, OpenVINO quantizes activations to int8 in blocks unless told not to.
    "options": {"device_type": "CPU", "load_config": json.dumps({"CPU": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}})},
}


def qnn() -> dict[str, Any]:
    """The simulator of Qualcomm's HTP, for `RecordedPasses.repeat`."""
    import onnxruntime_qnn

    return {
        "name": onnxruntime_qnn.get_ep_name(),
        "library": onnxruntime_qnn.get_library_path(),
        "options": {
            "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
            "soc_model": "60",
            "htp_arch": "73",
            "enable_htp_fp16_precision": "1",
        },
    }


def recipe_of(weights: WeightFormat = INT4) -> ExportRecipe:
    return ExportRecipe(weights, device="npu", widths=WIDTHS, contexts=(CAPACITY,))


def recorded_families(folder: Path, families: Iterable[str]) -> RecordedPasses:
    passes = RecordedPasses()
    for family in families:
        bundle = write_bundle(folder / family, family, weights=recipe_of())
        passes.record(bundle, CAPACITY, np.random.default_rng(2).integers(5, 300, 31).tolist())
    return passes


def require_agreement(passes: RecordedPasses, folder: Path, provider: Mapping[str, Any], **options: Any) -> None:
    """Repeat passes on a provider: it takes every node, and agrees with the CPU."""
    repeated = passes.repeat(folder, provider, **options)
    assert list(repeated.nodes) == [provider["name"]]
    assert repeated.worst_logit < LOGIT_TOLERANCE
    assert repeated.worst_slot < SLOT_TOLERANCE
    assert all(margin <= 0.1 for _, _, margin in repeated.next_ids)
    different = sum(ours != theirs for ours, theirs, _ in repeated.next_ids)
    assert different <= len(repeated.next_ids) // 20


def test_qnn_takes_whole_graphs_and_agrees_with_the_cpu(tmp_path: Path) -> None:
    require_qnn()
    passes = recorded_families(tmp_path, ("qwen3",))
    # 172 channels between gate and down do not fill blocks of 32, so they are padded.
    source = data_path("weights/stories260K-hf")
    tokens = [1, 403, 407, 261, 378, 429, 445, 432, 417, 266, *range(300, 321)]
    passes.record(export_checkpoint(source, tmp_path / "bundle", recipe_of()).bundle, CAPACITY, tokens)
    require_agreement(passes, tmp_path, qnn())


@pytest.mark.parametrize(
    ("activations", "weights", "most_kl", "logit_tolerance"),
    [("int8", "int8", 0.05, 0.6), ("int16", "int8", 0.003, 0.04), ("int16", "int4", 0.3, 0.04)],
)
def test_qnn_takes_graphs_with_integer_linears(
    tmp_path: Path, activations: str, weights: str, most_kl: float, logit_tolerance: float
) -> None:
    """From the command line: every node is the NPU's, and the export says how far the graphs are from the model."""
    require_qnn()
    bundle, source = tmp_path / "bundle", data_path("weights/stories260K-hf")
    options = ["--activations", activations, "--weights", weights, "--widths", "1,4,40", "--contexts", "48,512"]
    finished = run_edge_run("export", source, bundle, "--device", "npu", *options, environment={})
    assert finished.returncode == 0, finished.stderr
    assert (said := re.search(r"graphs for NPUs: mean KL (\S+), top-1 agreement", finished.stdout)) is not None
    assert 0 < float(said[1]) < most_kl
    passes = RecordedPasses()
    passes.record(bundle, CAPACITY, [1, 403, 407, 261, 378, 429, 445, 432, 417, 266, *range(300, 321)])
    repeated = passes.repeat(tmp_path, qnn())
    assert list(repeated.nodes) == [qnn()["name"]]
    assert repeated.worst_logit < logit_tolerance


@pytest.mark.nightly
def test_qnn_agrees_for_every_family(tmp_path: Path) -> None:
    require_qnn()
    require_agreement(recorded_families(tmp_path, FAMILIES), tmp_path, qnn())


@pytest.mark.nightly
def test_qnn_agrees_for_every_weight_format(tmp_path: Path) -> None:
    require_qnn()
    passes = RecordedPasses()
    formats = [WeightFormat(32), WeightFormat(2, 32), WeightFormat(8, 128), WeightFormat(4, 64, zero_points=True)]
    for weights in formats:
        folder = tmp_path / str(weights).replace("/", "-")
        bundle = write_bundle(folder, weights=recipe_of(weights), tie_word_embeddings=weights.bits != 8)
        passes.record(bundle, CAPACITY, np.random.default_rng(3).integers(5, 300, 31).tolist())
    require_agreement(passes, tmp_path, qnn())


def test_openvino_takes_whole_graphs_and_agrees_with_the_cpu(tmp_path: Path) -> None:
    interpreter = require_python("EDGERUN_OPENVINO_PYTHON")
    require_agreement(recorded_families(tmp_path, FAMILIES), tmp_path, OPENVINO, interpreter=interpreter)
