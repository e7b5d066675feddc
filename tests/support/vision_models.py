"""Tiny random models that see: checkpoints as transformers reads them, without transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken

from support.tiny_models import CHAT_TEMPLATE, tiny_config, tiny_tokenizer, tiny_weights, write_checkpoint, write_json
from support.tiny_models import write_weights as write_tensors

VOCAB: Final = 340
"""Tokens of the models, the last ones of which are `IMAGE_TOKENS`."""
IMAGE_TOKENS: Final = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
)
_PARTS: Final = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "smolvlm": {
        "text": "llama",
        "placeholder": "<image>",
        "image_token": "<image>",
        "names": {"model.": "model.text_model."},
        "tower": "model.vision_model",
        "vision": {"image_size": 32, "patch_size": 4, "num_attention_heads": 4},
        "config": {"scale_factor": 4},
        "images": {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "do_image_splitting": True,
            "resample": 1,
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.6, 0.4],
        },
        "processor": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    },
    "gemma3": {
        "text": "gemma3_text",
        "settings": {"sliding_window": 20, "tie_word_embeddings": False},
        "placeholder": "<start_of_image>",
        "image_token": "<image_soft_token>",
        "names": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        "tower": "vision_tower.vision_model",
        "vision": {"image_size": 32, "patch_size": 4},
        "config": {"mm_tokens_per_image": 16},
        "images": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
            "resample": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "processor": {"processor_class": "Gemma3Processor", "image_seq_length": 16},
    },
}
"""How each family differs: `names` are prefixes of tensors of the text model, and those that files have instead."""


def vision_config(family: str) -> dict[str, Any]:
    """config.json of a tiny model."""
    settings = FAMILIES[family]
    text = tiny_config(settings["text"], vocab_size=VOCAB, **settings.get("settings", {}))
    vision = {
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_act": "gelu_pytorch_tanh",
        **settings["vision"],
    }
    config = {
        "architectures": [f"{text['architectures'][0]}"],
        "model_type": family,
        "text_config": text,
        "vision_config": vision,
        "image_token_id": image_token_id(settings["image_token"]),
        "tie_word_embeddings": text["tie_word_embeddings"],
        "eos_token_id": 0,
    }
    return {**config, **settings["config"]}


def random_image(seed: int = 0, size: tuple[int, int] = (70, 50), kind: str = "PNG") -> bytes:
    """An encoded image of random pixels in blocks of 5."""
    from PIL import Image

    width, height = size
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 5), -(-width // 5), 3), np.uint8)
    pixels = blocks.repeat(5, axis=0).repeat(5, axis=1)[:height, :width]
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def image_token_id(text: str) -> int:
    """Id of one of `IMAGE_TOKENS`."""
    return VOCAB - len(IMAGE_TOKENS) + IMAGE_TOKENS.index(text)


def write_vision_checkpoint(folder: Path, family: str = "smolvlm", seed: int = 0) -> Path:
    """Write a random checkpoint of a model that sees, and return its folder."""
    settings, config = FAMILIES[family], vision_config(family)
    template = CHAT_TEMPLATE.replace("{{ m['content'] }}", _PARTS.replace("IMAGE", settings["placeholder"]))
    write_checkpoint(folder, settings["text"], vocab_size=VOCAB)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    write_json(folder / "config.json", config)
    tensors = {}
    for name, value in tiny_weights(config["text_config"], seed).items():
        standard = next((each for each in settings["names"] if name.startswith(each)), "")
        tensors[settings["names"].get(standard, "") + name.removeprefix(standard)] = value
    tensors |= vision_weights(family, config, seed)
    write_tensors(folder, tensors, 1)
    tokenizer = tiny_tokenizer(VOCAB - len(IMAGE_TOKENS))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in IMAGE_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(folder / "preprocessor_config.json", settings["images"])
    write_json(folder / "processor_config.json", settings["processor"])
    return folder


def vision_weights(family: str, config: Mapping[str, Any], seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights of the tower and the projector, by their names in the files."""
    random = np.random.default_rng(seed + 1)
    vision, tower = config["vision_config"], FAMILIES[family]["tower"]
    hidden, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    output, tensors = config["text_config"]["hidden_size"], {}

    def linear(name: str, rows: int, columns: int, *, biased: bool = True) -> None:
        tensors[f"{name}.weight"] = random.standard_normal((rows, columns)) * 1.5 / math.sqrt(columns)
        if biased:
            tensors[f"{name}.bias"] = random.standard_normal(rows) * 0.3

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * random.standard_normal(hidden)
        tensors[f"{name}.bias"] = 0.2 * random.standard_normal(hidden)

    patches = (vision["image_size"] // patch) ** 2
    linear(f"{tower}.embeddings.patch_embedding", hidden, 3 * patch * patch)
    kernel = f"{tower}.embeddings.patch_embedding.weight"
    tensors[kernel] = tensors[kernel].reshape(hidden, 3, patch, patch)
    tensors[f"{tower}.embeddings.position_embedding.weight"] = random.standard_normal((patches, hidden)) * 0.5
    for layer in range(vision["num_hidden_layers"]):
        name = f"{tower}.encoder.layers.{layer}"
        norm(f"{name}.layer_norm1")
        norm(f"{name}.layer_norm2")
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linear(f"{name}.self_attn.{part}", hidden, hidden)
        linear(f"{name}.mlp.fc1", wide, hidden)
        linear(f"{name}.mlp.fc2", hidden, wide)
    norm(f"{tower}.post_layernorm")
    match family:
        case "gemma3":
            projector = "multi_modal_projector"
            tensors[f"{projector}.mm_soft_emb_norm.weight"] = 0.2 * random.standard_normal(hidden)
            matrix = random.standard_normal((hidden, output)) / math.sqrt(hidden)
            tensors[f"{projector}.mm_input_projection_weight"] = matrix
        case "smolvlm":
            linear(
                "model.connector.modality_projection.proj", output, hidden * config["scale_factor"] ** 2, biased=False
            )
    return {name: value.astype(np.float32) for name, value in tensors.items()}
