"""transformers' own processors, features and answers of models that see; needs torch and Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import edgerun
from edgerun import GenerateOptions, Speculation
from edgerun.runtime.images.decoding import decode_image
from support.vision_models import FAMILIES, random_image

SIZES = [(70, 50), (32, 32), (20, 90), (300, 40), (7, 7), (64, 64)]
TOLERANCE = 2e-4
TYPES_OF_TOKENS = {
    "gemma3": "token_type_ids",
    "qwen2_5_vl": "mm_token_type_ids",
    "qwen2_vl": "mm_token_type_ids",
    "qwen3_vl": "mm_token_type_ids",
}
"""Inputs of transformers that say which tokens are an image's."""


def processor_of(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The image processor of transformers that resizes by Pillow."""
    name = FAMILIES[family]["images"]["image_processor_type"]
    if family == "lfm2_vl":
        pytest.importorskip("torchvision")
        from transformers.image_processing_backends import TorchvisionBackend

        monkeypatch.setattr(TorchvisionBackend, "resize", resized_by_pillow)
    kind = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return kind.from_pretrained(folder)


def resized_by_pillow(self: Any, images: Any, size: Any, **options: Any) -> Any:
    del self, options
    resized = [
        np.array(Image.fromarray(each.permute(1, 2, 0).numpy()).resize((size.width, size.height), Image.BILINEAR))
        for each in images
    ]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2)


def inputs_of(processor: Any, images: list[Image.Image]) -> Mapping[str, Any]:
    inputs = processor(images=images, return_tensors="pt")
    return {name: value for name, value in inputs.items() if name not in ("rows", "cols", "num_crops")}


def check_pixels(vision: Any, data: bytes, inputs: Mapping[str, Any]) -> None:
    tiles = vision.processor.process(decode_image(data)).tiles
    given = [vision.processor.inputs(each) for each in tiles]
    found, expected = np.concatenate([each["pixel_values"] for each in given]), inputs["pixel_values"].numpy()
    if "spatial_shapes" in inputs:  # padded, row by row, and channels last
        rows = [(places := each["patch_positions"])[:, 0] * (places[:, 1].max() + 1) + places[:, 1] for each in given]
        expected = np.concatenate([each[order] for each, order in zip(expected, rows, strict=True)])
        expected = expected.reshape(len(expected), -1, 3).swapaxes(1, 2)
    np.testing.assert_allclose(found, expected.reshape(found.shape), atol=1e-6)


def check_features(vision: Any, data: bytes, model: Any, inputs: Mapping[str, Any]) -> None:
    seen = vision.see(data)
    with torch.no_grad():
        outputs = model.model.get_image_features(**inputs)
    found = seen.features(0, seen.tokens)
    for features, expected in zip(found, [outputs.pooler_output, *outputs.get("deepstack_features", [])], strict=True):
        joined = torch.cat(list(expected)) if isinstance(expected, (list, tuple)) else expected
        np.testing.assert_allclose(features, joined.reshape(seen.tokens, -1).numpy(), atol=TOLERANCE)


def check_answer(
    engine: edgerun.Engine, model: Any, processor: Any, sizes: list[tuple[int, int]], *, causal: bool = False
) -> None:
    """Logits of the prompt, and 100 greedy tokens, with and without drafts.

    With `causal`, tokens of an image do not attend to later ones, whatever the family does.
    """
    encoded = [random_image(number, size) for number, size in enumerate(sizes, 30)]
    parts = [{"type": "image", "image": each} for each in encoded]
    asked = [{"role": "user", "content": [{"type": "text", "text": "of "}, *parts, {"type": "text", "text": " sea"}]}]
    ids = engine.chat_prompt(asked, GenerateOptions()).ids
    inputs = dict(inputs_of(processor, [Image.open(BytesIO(each)) for each in encoded]))
    name = TYPES_OF_TOKENS.get(model.config.model_type)
    if name is not None and not (causal and name == "token_type_ids"):
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
