"""Models that see in the layouts of other exporters: transformers.js (onnx-community) and ONNX Runtime GenAI.

Towers and embeddings are traced here, with the names, types and shapes of inputs and outputs that these tools have; so
is the decoder of transformers.js, and GenAI's is made by its own model builder. It needs torch and transformers 5.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import Tensor, nn

from support.tiny_models import write_json

_TEXT_FILES: Final = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_IMAGE_FILES: Final = ("config.json", "preprocessor_config.json", "processor_config.json")
_MIN: Final = torch.finfo(torch.float32).min


class Tower(nn.Module):
    """The vision tower and the projector: square tiles in, `[N, tokens, hidden]` out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model.model.get_image_features(pixel_values=pixel_values).pooler_output


class MaskedTower(Tower):
    """The tower of Idefics3, `[1, N, 3, H, W]` in. Tiles have no padding, so the mask changes nothing."""

    def forward(self, pixel_values: Tensor, pixel_attention_mask: Tensor) -> Tensor:
        inner, kept = self.model.model, pixel_attention_mask.flatten(0, 1)[:, None].to(pixel_values.dtype)
        tiles = pixel_values.flatten(0, 1) * kept
        tower = inner.vision_model
        patches = tower.embeddings.patch_embedding(tiles).flatten(2).transpose(1, 2)
        states = tower.encoder(inputs_embeds=patches + tower.embeddings.position_embedding.weight).last_hidden_state
        return inner.connector(tower.post_layernorm(states))


class QwenTower(Tower):
    """The tower of Qwen2-VL or Qwen2.5-VL for one image, with windows as a mask: rows of patches, and the grid, in."""

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        tower = self.model.model.visual
        rows, columns = image_grid_thw[0, 1], image_grid_thw[0, 2]
        merge, count = tower.spatial_merge_size, pixel_values.shape[0]
        index, per_row = torch.arange(count), columns // merge
        square, inside = index // merge**2, index % merge**2
        row, column = square // per_row * merge + inside // merge, square % per_row * merge + inside % merge
        dim = getattr(tower.config, "embed_dim", tower.config.hidden_size) // tower.config.num_heads
        rates = 1 / 10000 ** (torch.arange(0, dim // 2, 2).float() / (dim // 2))
        angles = torch.cat([row[:, None] * rates, column[:, None] * rates], dim=1)
        cosines, sines = (torch.cat([each, each], dim=1)[:, None] for each in (angles.cos(), angles.sin()))
        full = getattr(tower.config, "fullatt_block_indexes", range(len(tower.blocks)))
        side = getattr(tower.config, "window_size", 112) // tower.config.patch_size // merge * merge
        window = row // side * (columns // side + 1) + column // side + 0 * rows
        hidden = tower.patch_embed(pixel_values)
        for number, block in enumerate(tower.blocks):
            parts = block.attn.qkv(block.norm1(hidden)).reshape(count, 3, tower.config.num_heads, dim)
            turned = [
                part * cosines + torch.cat([-part[..., dim // 2 :], part[..., : dim // 2]], dim=-1) * sines
                for part in (parts[:, 0], parts[:, 1])
            ]
            scores = torch.einsum("ihd,jhd->hij", *turned) * dim**-0.5
            if number not in full:
                scores = scores + torch.where(window[:, None] == window, 0.0, _MIN)
            mixed = torch.einsum("hij,jhd->ihd", scores.softmax(dim=-1), parts[:, 2])
            hidden = hidden + block.attn.proj(mixed.reshape(count, -1))
            hidden = hidden + block.mlp(block.norm2(hidden))
        return tower.merger(hidden)


class Lfm2Tower(Tower):
    """The tower of LFM2-VL for one image without padding: patches row by row, and numbers of rows and columns, in."""

    def forward(self, pixel_values: Tensor, pixel_attention_mask: Tensor, spatial_shapes: Tensor) -> Tensor:
        inner = self.model.model
        tower, side = inner.vision_tower, int(inner.vision_tower.config.num_patches**0.5)
        tower = getattr(tower, "vision_model", tower)
        table = tower.embeddings.position_embedding.weight.reshape(side, side, -1)
        shares = []
        for count in (spatial_shapes[0, 0], spatial_shapes[0, 1]):
            centers = (torch.arange(count) + 0.5) * side / count - 0.5
            support = torch.clamp(side / count, min=1.0)
            weights = torch.relu(1 - (centers[:, None] - torch.arange(side)).abs() / support)
            shares.append(weights / weights.sum(dim=1, keepdim=True))
        places = torch.einsum("hi,wj,ijd->hwd", *shares, table).flatten(0, 1)
        patches = tower.embeddings.patch_embedding(pixel_values * pixel_attention_mask[..., None])
        states = tower.post_layernorm(tower.encoder(inputs_embeds=patches + places).last_hidden_state)
        rows, columns = spatial_shapes[0, 0], spatial_shapes[0, 1]
        grid = states.reshape(1, rows, columns, states.shape[-1])
        return inner.multi_modal_projector(grid).flatten(0, 2)


class Embedding(nn.Module):
    """Embeddings of tokens."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.table = model.get_input_embeddings()
        self.image_token = model.config.image_token_id

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


class JoinedEmbedding(Embedding):
    """Embeddings of tokens, with features of images in the places of image tokens, as GenAI has them."""

    def forward(self, input_ids: Tensor, image_features: Tensor) -> Tensor:
        is_image = input_ids == self.image_token
        return self.table(input_ids.masked_fill(is_image, 0)).masked_scatter(is_image[..., None], image_features)


class Decoder(nn.Module):
    """The language model, with the new tokens' own causal mask."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        inner = model.model
        self.text = inner.text_model if hasattr(inner, "text_model") else inner.language_model
        self.head = model.lm_head
        self.cache_name = (
            "cache" if "cache" in inspect.signature(type(self.text).forward).parameters else "past_key_values"
        )

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor) -> Any:
        cache = transformers.DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        slots = torch.arange(attention_mask.shape[1])
        new = slots[attention_mask.shape[1] - inputs_embeds.shape[1] :, None]
        seen = (slots <= new) & (attention_mask > 0)
        mask: Any = torch.where(seen, 0.0, _MIN)[None, None]
        config = self.text.config
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            near = torch.where(seen & (slots > new - config.sliding_window), 0.0, _MIN)[None, None]
            mask = {"full_attention": mask, "sliding_attention": near}
        states = self.text(
            inputs_embeds=inputs_embeds,
            attention_mask=mask,
            position_ids=position_ids,
            use_cache=True,
            **{self.cache_name: cache},
        ).last_hidden_state
        return self.head(states), *(each for layer in cache.layers for each in (layer.keys, layer.values))


TOWERS: Final[dict[str, Callable[[Any], Tower]]] = {
    "smolvlm": MaskedTower,
    "gemma3": Tower,
    "qwen2_vl": QwenTower,
    "qwen2_5_vl": QwenTower,
    "lfm2_vl": Lfm2Tower,
}
TOWER_INPUTS: Final = {
    "smolvlm": ("pixel_values", "pixel_attention_mask"),
    "gemma3": ("pixel_values",),
    "qwen2_5_vl": ("pixel_values", "image_grid_thw"),
    "lfm2_vl": ("pixel_values", "pixel_attention_mask", "spatial_shapes"),
}


def loaded(checkpoint: Path) -> Any:
    """The model of a checkpoint, with attention that can be traced."""
    kind = transformers.AutoModelForImageTextToText
    return kind.from_pretrained(checkpoint, attn_implementation="eager", dtype=torch.float32).eval()


def write_transformers_js(folder: Path, checkpoint: Path, family: str) -> Path:
    """Write a model in the layout of onnx-community: three graphs below onnx/ and the files of the checkpoint."""
    model, graphs = loaded(checkpoint), folder / "onnx"
    graphs.mkdir(parents=True)
    write_tower(graphs / "vision_encoder.onnx", model, family)
    _trace(Embedding(model), {"input_ids": torch.tensor([[1, 2, 3]])}, "inputs_embeds", graphs / "embed_tokens.onnx")
    write_decoder(graphs / "decoder_model_merged.onnx", model)
    _copy(checkpoint, folder, *_TEXT_FILES, *_IMAGE_FILES)
    return folder


def write_decoder(path: Path, model: Any) -> None:
    """Write the language model."""
    text = model.config.text_config
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    past = {
        f"past_key_values.{layer}.{kind}": torch.randn(1, text.num_key_value_heads, 4, size)
        for layer in range(text.num_hidden_layers)
        for kind in ("key", "value")
    }
    axes = (3, 1, 3) if model.config.model_type.startswith("qwen") else (1, 3)
    inputs = {
        "inputs_embeds": torch.randn(1, 3, text.hidden_size),
        "attention_mask": torch.ones(1, 7, dtype=torch.int64),
        "position_ids": torch.arange(4, 7).expand(axes),
        **past,
    }
    _trace(Decoder(model), inputs, ["logits", *(name.replace("past_key_values", "present") for name in past)], path)


def write_genai(folder: Path, checkpoint: Path, family: str) -> Path:
    """Write a model in the layout of ONNX Runtime GenAI.

    Its model builder makes text.onnx and genai_config.json, but not of Gemma 3 with transformers 5. In the folder of
    Qwen2.5-VL lies no file of the checkpoint but the tokenizer's.
    """
    model = loaded(checkpoint)
    if family == "gemma3":
        folder.mkdir()
        write_decoder(folder / "text.onnx", model)
        decoder = {"filename": "text.onnx", "hidden_size": model.config.text_config.hidden_size}
        write_json(folder / "genai_config.json", {"model": {"decoder": decoder, "context_length": 512}})
        _copy(checkpoint, folder, *_TEXT_FILES)
    else:
        _build_decoder(folder, checkpoint, model)
    write_tower(folder / "vision.onnx", model, family)
    ids = torch.tensor([[1, model.config.image_token_id, 3]])
    inputs = {"input_ids": ids, "image_features": torch.randn(1, model.config.text_config.hidden_size)}
    _trace(JoinedEmbedding(model), inputs, "inputs_embeds", folder / "embedding.onnx")
    path = folder / "genai_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model"] |= {
        "type": family,
        "image_token_id": model.config.image_token_id,
        "embedding": {"filename": "embedding.onnx", "inputs": {name: name for name in inputs}},
        "vision": {"filename": "vision.onnx", "inputs": {name: name for name in TOWER_INPUTS[family]}},
    }
    write_json(path, config)
    if family == "qwen2_5_vl":
        images = json.loads((checkpoint / "preprocessor_config.json").read_text(encoding="utf-8"))
        write_json(folder / "processor_config.json", genai_processor(images))
    else:
        _copy(checkpoint, folder, *_IMAGE_FILES)
    return folder


def _build_decoder(folder: Path, checkpoint: Path, model: Any) -> None:
    """Write text.onnx, genai_config.json and the tokenizer by GenAI's model builder."""
    from onnxruntime_genai.models.builder import create_model, parse_extra_options

    saved = folder.with_name("saved")
    model.save_pretrained(saved)  # with the names of classes, which tell the builder what it is
    _copy(checkpoint, saved, *_TEXT_FILES)
    paths, options = ("", str(saved), str(folder)), ("fp32", "cpu", str(folder.with_name("cache")))
    create_model(
        *paths, *options, **parse_extra_options(*paths, *options, ["exclude_embeds=true", "filename=text.onnx"])
    )


def _copy(source: Path, target: Path, *names: str) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def genai_processor(images: dict[str, Any]) -> dict[str, Any]:
    """processor_config.json for Qwen2.5-VL as GenAI's examples have it: operations of onnxruntime-extensions."""
    patches = {name: images[name] for name in ("patch_size", "merge_size")}
    limits = {name: images[name] for name in ("min_pixels", "max_pixels")}
    operations = [
        ("decode_image", "DecodeImage", {"color_space": "RGB"}),
        ("convert_to_rgb", "ConvertRGB", None),
        ("resize", "Resize", {"width": 540, "height": 360, "smart_resize": 1, **limits, **patches}),
        ("rescale", "Rescale", {"rescale_factor": 1 / 255}),
        ("normalize", "Normalize", {"mean": images["image_mean"], "std": images["image_std"], "qwen2_5_vl": 1}),
        ("patch_image", "PatchImage", {**patches, "temporal_patch_size": images["temporal_patch_size"]}),
    ]
    listed = [
        {"operation": {"name": name, "type": kind, **({} if attributes is None else {"attrs": attributes})}}
        for name, kind, attributes in operations
    ]
    return {"processor": {"name": "qwen2_5_image_processor", "transforms": listed}}


def write_qwen2_vl(folder: Path, checkpoint: Path) -> Path:
    """Write a random model of Qwen2-VL with the tokenizer and the images of a checkpoint of Qwen2.5-VL."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    text = config["text_config"] | {"model_type": "qwen2_vl_text"}
    settings = config | {"model_type": "qwen2_vl", "text_config": text, "vision_config": vision}
    torch.manual_seed(3)
    kind = transformers.AutoModelForImageTextToText
    model = kind.from_config(transformers.AutoConfig.for_model(**settings))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * (0.1 if weight.dim() > 1 else 0.2))
    model.save_pretrained(folder)
    _copy(checkpoint, folder, *_TEXT_FILES, "preprocessor_config.json", "processor_config.json")
    return folder


def write_tower(path: Path, model: Any, family: str) -> None:
    """Write the vision tower of a model."""
    side = getattr(model.config.vision_config, "image_size", 32)
    inputs = {"pixel_values": torch.randn(2, 3, side, side)}
    if family == "smolvlm":
        inputs = {
            "pixel_values": torch.randn(1, 2, 3, side, side),
            "pixel_attention_mask": torch.ones(1, 2, side, side) > 0,
        }
    elif family.startswith("qwen2"):
        grid = "grid_thw" if family == "qwen2_vl" else "image_grid_thw"
        patches, size = torch.tensor([[1, 4, 6]]), 3 * 2 * model.config.vision_config.patch_size**2
        inputs = {"pixel_values": torch.randn(24, size), grid: patches}
    elif family == "lfm2_vl":
        inputs = {
            "pixel_values": torch.randn(1, 24, 3 * model.config.vision_config.patch_size**2),
            "pixel_attention_mask": torch.ones(1, 24, dtype=torch.int64),
            "spatial_shapes": torch.tensor([[4, 6]]),
        }
    _trace(TOWERS[family](model), inputs, "image_features", path)


def _trace(module: nn.Module, inputs: dict[str, Tensor], outputs: str | list[str], path: Path) -> None:
    """Export a module whose dimensions of a first example may vary: batch, tokens and patches."""
    names = [outputs] if isinstance(outputs, str) else outputs
    pixels = (0,) if "pixel_attention_mask" not in inputs else (0, 1)
    varying = {"pixel_values": pixels, "pixel_attention_mask": (0, 1), "image_features": (0,), "input_ids": (1,)}
    varying |= {"inputs_embeds": (1,), "attention_mask": (1,)}
    varying |= {"position_ids": (inputs["position_ids"].dim() - 1,)} if "position_ids" in inputs else {}
    axes = {name: {axis: f"{name}.{axis}" for axis in varying.get(name, ())} for name in [*inputs, *names]}
    axes |= {name: {2: "past"} for name in inputs if name.startswith("past")}
    axes |= {name: {2: "total"} for name in names if name.startswith("present")} | {"logits": {1: "tokens"}}
    with torch.no_grad():
        torch.onnx.export(
            module,
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=names,
            dynamic_axes=axes,
            opset_version=17,
            dynamo=False,
        )
