"""Models that see, in the layouts of other exporters, against transformers.

Pixel values are those of our own image processors, which other tests compare. Tokens of an image in exports of Gemma 3
attend to earlier ones alone, so transformers gets no token types there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the images extra")
pytest.importorskip("onnx", reason="needs the export extra")
pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5", reason="needs the outputs of release 5")


import torch

import edgerun
from edgerun.runtime.images.decoding import decode_image
from support.vision_exports import loaded, write_genai, write_qwen2_vl, write_transformers_js
from support.vision_models import random_image, write_vision_checkpoint
from support.vision_oracle import SIZES, check_answer, check_features, inputs_of, processor_of

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "qwen2_vl", "qwen2_5_vl"])
def test_transformers_js(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint", "qwen2_5_vl" if family == "qwen2_vl" else family)
    source = write_qwen2_vl(tmp_path / "qwen2_vl", source) if family == "qwen2_vl" else source
    check(write_transformers_js(tmp_path / "model", source, family), source, family, monkeypatch)
    assert caplog.text.count("attend to earlier ones alone") == (family == "gemma3")


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "lfm2_vl"])
def test_genai(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime_genai", reason="needs GenAI's model builder")
    source = write_vision_checkpoint(tmp_path / "checkpoint", family)
    check(write_genai(tmp_path / "model", source, family), source, family, monkeypatch)


def test_tokens_of_images_are_not_merged(tmp_path: Path) -> None:
    """Their graphs take no weights of tokens in attention."""
    source = write_vision_checkpoint(tmp_path / "checkpoint", "smolvlm")
    model = write_transformers_js(tmp_path / "model", source, "smolvlm")
    with pytest.raises(edgerun.InputError, match="lossy_image_tokens is for exports of edge-run"):
        edgerun.load(model, threads=1, lossy_image_tokens=0.5)


class RowsOfPatches:
    """The image processor of LFM2-VL, whose own needs torchvision, made of ours.

    Args:
        processor: ours, which another test compares with it.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        """Patches of all tiles, padded."""
        given = [self._processor.inputs(tile) for image in images for tile in self._processor.process(image).tiles]
        counts = [len(each["pixel_values"]) for each in given]
        values = torch.zeros(len(given), max(counts), given[0]["pixel_values"].shape[1])
        shapes = [each["patch_positions"].max(axis=0) + 1 for each in given]
        for row, each in zip(values, given, strict=True):
            order = np.lexsort(each["patch_positions"].T[::-1])
            patches = each["pixel_values"][order].reshape(len(order), 3, -1).swapaxes(1, 2).reshape(len(order), -1)
            row[: len(order)] = torch.from_numpy(patches)
        mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        return {
            "pixel_values": values,
            "pixel_attention_mask": mask.long(),
            "spatial_shapes": torch.from_numpy(np.array(shapes)),
        }


def check(folder: Path, source: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features, logits and tokens of a model as it is."""
    model = loaded(source)
    with edgerun.load(folder, threads=1, cache=False) as engine:
        vision = engine.model.vision
        assert vision is not None
        is_lfm2 = family == "lfm2_vl"
        processor = (
            RowsOfPatches(vision.processor)
            if is_lfm2
            else processor_of(source, family.replace("qwen2_vl", "qwen2_5_vl"), monkeypatch)
        )
        for number, size in enumerate(SIZES):
            data = random_image(number, size)
            check_features(vision, data, model, inputs_of(processor, [decode_image(data)]))
        for sizes in (SIZES[:1], SIZES[1:4]):
            check_answer(engine, model, processor, sizes, causal=True)
