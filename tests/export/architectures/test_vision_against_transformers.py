"""Models that see against transformers itself, where it is installed with Pillow (the oracle extra).

Pixel values, features, logits and greedy tokens. torchvision is not needed: processors are those that use Pillow.
"""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the images extra")

from PIL import Image

import edgerun
from edgerun import GenerateOptions, Speculation
from edgerun.export import FP32, ExportRecipe, export_checkpoint
from edgerun.runtime.images.decoding import decode_image
from support.vision_models import FAMILIES, random_image, write_vision_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5", reason="needs the outputs of release 5")

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = [(70, 50), (32, 32), (20, 90), (300, 40), (7, 7), (64, 64)]
TOLERANCE = 2e-4
TYPES_OF_TOKENS = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids", "qwen3_vl": "mm_token_type_ids"}
"""Inputs of transformers that say which tokens are an image's."""


def processor_of(folder: Path, family: str) -> Any:
    """The image processor of transformers that uses Pillow."""
    name = FAMILIES[family]["images"]["image_processor_type"]
    kind = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return kind.from_pretrained(folder)


def inputs_of(processor: Any, images: list[Image.Image]) -> Mapping[str, Any]:
    inputs = processor(images=images, return_tensors="pt")
    return {name: value for name, value in inputs.items() if name not in ("rows", "cols", "num_crops")}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_see(tmp_path: Path, family: str) -> None:
    source = write_vision_checkpoint(tmp_path / "checkpoint", family)
    bundle = export_checkpoint(source, tmp_path / "bundle", ExportRecipe(FP32)).bundle
    processor = processor_of(source, family)
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


def check_pixels(vision: Any, data: bytes, inputs: Mapping[str, Any]) -> None:
    tiles = vision.processor.process(decode_image(data)).tiles
    found = np.concatenate([vision.processor.inputs(each)["pixel_values"] for each in tiles])
    np.testing.assert_allclose(found, inputs["pixel_values"].numpy().reshape(found.shape), atol=1e-6)


def check_features(vision: Any, data: bytes, model: Any, inputs: Mapping[str, Any]) -> None:
    seen = vision.see(data)
    with torch.no_grad():
        outputs = model.model.get_image_features(**inputs)
    found = seen.features(0, seen.tokens)
    for features, expected in zip(found, [outputs.pooler_output, *outputs.get("deepstack_features", [])], strict=True):
        joined = torch.cat(list(expected)) if isinstance(expected, (list, tuple)) else expected
        np.testing.assert_allclose(features, joined.reshape(seen.tokens, -1).numpy(), atol=TOLERANCE)


def check_answer(engine: edgerun.Engine, model: Any, processor: Any, sizes: list[tuple[int, int]]) -> None:
    """Logits of the prompt, and 100 greedy tokens, with and without drafts."""
    encoded = [random_image(number, size) for number, size in enumerate(sizes, 30)]
    parts = [{"type": "image", "image": each} for each in encoded]
    asked = [{"role": "user", "content": [{"type": "text", "text": "of "}, *parts, {"type": "text", "text": " sea"}]}]
    ids = engine.chat_prompt(asked, GenerateOptions()).ids
    inputs = dict(inputs_of(processor, [Image.open(BytesIO(each)) for each in encoded]))
    if (name := TYPES_OF_TOKENS.get(model.config.model_type)) is not None:
        inputs[name] = torch.tensor([[int(each == model.config.image_token_id) for each in ids]])
    tokens = torch.tensor([ids])
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits[0, -1]
        written = model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=100,
            do_sample=False,
            eos_token_id=None,
            **inputs,
        )
    answers = []
    for speculation in (Speculation.OFF, Speculation.AUTO):
        options: dict[str, Any] = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "logprobs": 20}
        answers.append(engine.generate(asked, **options, speculation=speculation).logprobs)
    for answer in answers:
        assert [each.token_id for each in answer] == written[0, len(ids) :].tolist()
    logprobs = torch.log_softmax(expected, 0)
    for other in answers[0][0].top:
        assert abs(other.logprob - logprobs[other.token_id].item()) < TOLERANCE
