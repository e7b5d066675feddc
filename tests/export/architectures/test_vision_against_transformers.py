"""Models that see against transformers itself, where it is installed with Pillow (the oracle extra).

Pixel values, features, logits and greedy tokens. Processors are those that use Pillow; LFM2-VL has none, so its one is
torchvision's with images resized by Pillow.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs the images extra")
pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5", reason="needs the outputs of release 5")

import torch
import transformers
from PIL import Image

import edgerun
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from support.vision_models import FAMILIES, random_image, write_vision_checkpoint
from support.vision_oracle import SIZES, check_answer, check_features, check_pixels, inputs_of, processor_of

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")


def test_pillow_resizes_as_torchvision_within_one_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    source = write_vision_checkpoint(tmp_path, "lfm2_vl")
    kind = transformers.Lfm2VlImageProcessor
    for number, size in enumerate(SIZES):
        image = Image.open(BytesIO(random_image(number, size)))
        own = inputs_of(kind.from_pretrained(source), [image])["pixel_values"]
        with monkeypatch.context() as patched:
            other = inputs_of(processor_of(source, "lfm2_vl", patched), [image])["pixel_values"]
        assert (own - other).abs().max() < 1.01 / 255 / 0.4


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_see(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint", family)
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    processor = processor_of(source, family, monkeypatch)
    model = transformers.AutoModelForImageTextToText.from_pretrained(source).eval()
    with edgerun.load(bundle, threads=1, cache=False) as engine:
        vision = engine.model.vision
        assert vision is not None
        for number, size in enumerate(SIZES):
            data = random_image(number, size)
            inputs = inputs_of(processor, [Image.open(BytesIO(data))])
            check_pixels(vision, data, inputs)
            check_features(vision, data, model, inputs)
        for sizes in (SIZES[:1], SIZES[1:4]):
            check_answer(engine, model, processor, sizes)
