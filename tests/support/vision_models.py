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

VOCAB: Final = 362
"""Tokens of the models, the last ones of which are `IMAGE_TOKENS`."""
IMAGE_TOKENS: Final = (
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
)
_PARTS: Final = (
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
)
_QWEN_IMAGES: Final = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 24 * 24,
    "max_pixels": 56 * 56,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "resample": 3,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.6, 0.4],
}
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
    "qwen2_5_vl": {
        "text": "qwen2",
        "text_type": "qwen2_5_vl_text",
        "settings": {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}},
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
        "image_token": "<|image_pad|>",
        "names": {},
        "tower": "visual",
        "vision": {
            "depth": 3,
            "hidden_size": 64,
            "num_heads": 4,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
            "out_hidden_size": 64,
        },
        "tokens": {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
        "images": _QWEN_IMAGES,
        "processor": {"processor_class": "Qwen2_5_VLProcessor"},
    },
    "qwen3_vl": {
        "text": "qwen3",
        "text_type": "qwen3_vl_text",
        "settings": {
            "num_hidden_layers": 3,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
        },
        "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
        "image_token": "<|image_pad|>",
        "names": {"model.": "model.language_model."},
        "tower": "model.visual",
        "vision": {
            "depth": 3,
            "hidden_size": 64,
            "num_heads": 4,
            "patch_size": 4,
            "num_position_embeddings": 49,
            "deepstack_visual_indexes": [0, 1],
            "out_hidden_size": 64,
        },
        "tokens": {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"},
        "images": _QWEN_IMAGES,
        "processor": {"processor_class": "Qwen3VLProcessor"},
    },
    "lfm2_vl": {
        "text": "lfm2",
        "placeholder": "<image>",
        "image_token": "<image>",
        "names": {"model.": "model.language_model."},
        "tower": "model.vision_tower.vision_model",
        "vision": {"model_type": "siglip2_vision_model", "patch_size": 4, "num_patches": 25, "vision_use_head": False},
        "config": {"downsample_factor": 2, "projector_hidden_size": 80},
        "images": {
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 4,
            "downsample_factor": 2,
            "min_image_tokens": 6,
            "max_image_tokens": 24,
            "tile_size": 24,
            "max_tiles": 4,
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.6, 0.4],
        },
        "processor": {"processor_class": "Lfm2VlProcessor"},
    },
}
"""How each family differs: `names` are prefixes of tensors of the text model, and those that files have instead."""


def vision_config(family: str) -> dict[str, Any]:
    """config.json of a tiny model."""
    settings = FAMILIES[family]
    text = tiny_config(settings["text"], vocab_size=VOCAB, **settings.get("settings", {}))
    text["model_type"] = settings.get("text_type", settings["text"])
    vision = {
        "hidden_size": 48,
        "intermediate_size": 72,
        **({} if "depth" in settings["vision"] else {"num_hidden_layers": 2, "num_attention_heads": 4}),
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
    tokens = {name: image_token_id(text) for name, text in settings.get("tokens", {}).items()}
    return {**config, **tokens, **settings.get("config", {})}


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
    for name, value in tiny_weights({**config["text_config"], "model_type": settings["text"]}, seed).items():
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
    if family.startswith("qwen"):
        return qwen_weights(vision, tower, np.random.default_rng(seed + 1))
    hidden, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    output, tensors = config["text_config"]["hidden_size"], {}

    def linear(name: str, rows: int, columns: int, *, biased: bool = True) -> None:
        tensors[f"{name}.weight"] = random.standard_normal((rows, columns)) * 1.5 / math.sqrt(columns)
        if biased:
            tensors[f"{name}.bias"] = random.standard_normal(rows) * 0.3

    def norm(name: str, width: int = hidden) -> None:
        tensors[f"{name}.weight"] = 1 + 0.2 * random.standard_normal(width)
        tensors[f"{name}.bias"] = 0.2 * random.standard_normal(width)

    patches = vision.get("num_patches") or (vision["image_size"] // patch) ** 2
    linear(f"{tower}.embeddings.patch_embedding", hidden, 3 * patch * patch)
    kernel = f"{tower}.embeddings.patch_embedding.weight"
    if family != "lfm2_vl":
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
        case "lfm2_vl":
            norm("model.multi_modal_projector.layer_norm", 4 * hidden)
            linear("model.multi_modal_projector.linear_1", config["projector_hidden_size"], 4 * hidden)
            linear("model.multi_modal_projector.linear_2", output, config["projector_hidden_size"])
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


def qwen_weights(
    vision: Mapping[str, Any], tower: str, random: np.random.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights of a tower of Qwen-VL."""
    hidden, wide, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    gated, merged, tensors = vision["hidden_act"] == "silu", 4 * vision["hidden_size"], {}

    def linear(name: str, rows: int, columns: int, *, biased: bool = True) -> None:
        tensors[f"{tower}.{name}.weight"] = random.standard_normal((rows, columns)) * 1.5 / math.sqrt(columns)
        if biased:
            tensors[f"{tower}.{name}.bias"] = random.standard_normal(rows) * 0.3

    def norm(name: str, width: int = hidden) -> None:
        tensors[f"{tower}.{name}.weight"] = 1 + 0.2 * random.standard_normal(width)
        if not gated:
            tensors[f"{tower}.{name}.bias"] = 0.2 * random.standard_normal(width)

    def merger(name: str, parts: tuple[str, str, str], norm_width: int = hidden) -> None:
        norm(f"{name}.{parts[0]}", norm_width)
        linear(f"{name}.{parts[1]}", merged, merged)
        linear(f"{name}.{parts[2]}", vision["out_hidden_size"], merged)

    linear("patch_embed.proj", hidden, 6 * patch * patch, biased=not gated)
    kernel = f"{tower}.patch_embed.proj.weight"
    tensors[kernel] = tensors[kernel].reshape(hidden, 3, 2, patch, patch)
    names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj") if gated else ("mlp.linear_fc1", "mlp.linear_fc2")
    for layer in range(vision["depth"]):
        norm(f"blocks.{layer}.norm1")
        norm(f"blocks.{layer}.norm2")
        linear(f"blocks.{layer}.attn.qkv", 3 * hidden, hidden)
        linear(f"blocks.{layer}.attn.proj", hidden, hidden)
        for name in names[:-1]:
            linear(f"blocks.{layer}.{name}", wide, hidden)
        linear(f"blocks.{layer}.{names[-1]}", hidden, wide)
    if gated:
        merger("merger", ("ln_q", "mlp.0", "mlp.2"))
    else:
        tensors[f"{tower}.pos_embed.weight"] = random.standard_normal((vision["num_position_embeddings"], hidden)) * 0.5
        merger("merger", ("norm", "linear_fc1", "linear_fc2"))
        for number in range(len(vision["deepstack_visual_indexes"])):
            merger(f"deepstack_merger_list.{number}", ("norm", "linear_fc1", "linear_fc2"), merged)
    return {name: value.astype(np.float32) for name, value in tensors.items()}


def seeing_bundle(folder: Path, family: str = "smolvlm") -> Path:
    """Export a tiny random model that sees, in float32; returns its bundle."""
    from edgerun.export import FP32, ExportRecipe, export_checkpoint

    source = write_vision_checkpoint(folder / "checkpoint", family)
    return export_checkpoint(source, folder / "bundle", ExportRecipe(FP32)).bundle
