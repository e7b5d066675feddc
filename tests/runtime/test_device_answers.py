"""Answers on a GPU: the CPU's text, its conversations, and threads side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.devices import require_gpu, run_edge_run, run_json_script
from support.shared_data import data_path
from support.vision_models import random_image, seeing_bundle

PROGRAMS = Path(__file__).resolve().parents[1] / "support" / "device_programs.py"
BEST_BYTES = 64 * 12
"""Bytes of the ids and the logits of the best tokens of a position."""
GPUS = ("webgpu", "cuda")


def check_answers(found: dict[str, Any], *, in_parts: bool = True) -> None:
    """Check what the program found; a short prefix is taken over only where passes are short (`in_parts`)."""
    assert found["device"] == found["cpu"]
    assert found["drafted"] > 0
    assert (max(found["reused"]) > 16) is in_parts
    conversations = found["conversations"]
    assert all(texts == conversations[0] for texts in conversations)
    assert found["side by side"] == [found["cpu"]["greedy"]] * 3


def check_text(found: dict[str, Any], tokens: int) -> None:
    assert found["on_cpu"] == {}
    assert found["plain_equal"] == found["drafted_equal"] == tokens
    assert found["plain"]["bytes"] == BEST_BYTES
    assert found["drafted"]["trees"] > 0


@pytest.mark.parametrize("gpu", GPUS)
def test_answers_are_those_of_the_cpu(tiny_bundle: Path, tmp_path: Path, gpu: str) -> None:
    environment = require_gpu(gpu)
    arguments = ("compare_answers", tiny_bundle, tmp_path, 8, gpu)
    found = run_json_script(PROGRAMS, *arguments, environment=environment)
    check_answers(found, in_parts=gpu == "webgpu")


@pytest.mark.parametrize("family", ["smolvlm", "qwen3_vl"])
def test_images_on_a_gpu_are_seen_as_on_the_cpu(tmp_path: Path, family: str) -> None:
    pytest.importorskip("edgerun.export", reason="needs the export extra")
    environment = require_gpu("webgpu")
    bundle = seeing_bundle(tmp_path, family)
    (tmp_path / "image.png").write_bytes(random_image())
    arguments = ("compare_images", bundle, tmp_path / "image.png", "webgpu")
    found = run_json_script(PROGRAMS, *arguments, environment=environment)
    assert found["device"] == pytest.approx(found["cpu"], abs=1e-4)


def test_a_family_whose_images_a_gpu_does_not_take(tmp_path: Path) -> None:
    pytest.importorskip("edgerun.export", reason="needs the export extra")
    environment = require_gpu("webgpu")
    bundle = seeing_bundle(tmp_path, "gemma3")
    (tmp_path / "image.png").write_bytes(random_image())
    command = ("-p", "what is it?", "--image", str(tmp_path / "image.png"), "--device", "webgpu")
    ended = run_edge_run(str(bundle), *command, environment=environment)
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith("run it on the CPU: --device cpu")


@pytest.mark.nightly
def test_long_answers_are_those_of_the_cpu(tiny_bundle: Path, tmp_path: Path) -> None:
    """Also exact ones: the slots that wide passes wrote are computed again at near ties."""
    environment = require_gpu("webgpu")
    arguments = ("compare_answers", tiny_bundle, tmp_path, 100, "webgpu")
    check_answers(run_json_script(PROGRAMS, *arguments, environment=environment))


@pytest.mark.nightly
def test_text_with_heads_of_64_channels_is_that_of_the_cpu(tmp_path: Path) -> None:
    tiny = pytest.importorskip("support.tiny_models", reason="needs the export extra")
    environment = require_gpu("webgpu")
    bundle = tiny.write_bundle(tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    check_text(run_json_script(PROGRAMS, "compare_text", bundle, 200, "webgpu", environment=environment), 200)


@pytest.mark.nightly
@pytest.mark.parametrize("gpu", GPUS)
def test_text_of_a_quantized_model_is_that_of_the_cpu(tmp_path: Path, gpu: str) -> None:
    export = pytest.importorskip("edgerun.export", reason="needs the export extra")
    environment = require_gpu(gpu)
    source = data_path("weights/stories260K-hf")
    bundle = export.export_checkpoint(source, tmp_path / "bundle", export.ExportRecipe(export.INT4)).bundle
    check_text(run_json_script(PROGRAMS, "compare_text", bundle, 200, gpu, environment=environment), 200)
