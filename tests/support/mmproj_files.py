"""Vision towers as GGUF files, made from checkpoints like llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from support.gguf_files import add_metadata, write_gguf
from support.tiny_models import write_json
from support.vision_models import FAMILIES

_SIGLIP: Final = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
}
_QWEN: Final = {"patch_embed.proj": "v.patch_embd", "pos_embed": "v.position_embd"}
_MODULES: Final = {
    "smolvlm": _SIGLIP | {"model.connector.modality_projection.proj": "mm.model.fc"},
    "gemma3": _SIGLIP | {"multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm"},
    "qwen2_5_vl": _QWEN | {"merger.ln_q": "v.post_ln", "merger.mlp.0": "mm.0", "merger.mlp.2": "mm.2"},
    "qwen3_vl": _QWEN | {"merger.norm": "v.post_ln", "merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2"},
    "lfm2_vl": _SIGLIP
    | {
        "model.multi_modal_projector.layer_norm": "mm.input_norm",
        "model.multi_modal_projector.linear_1": "mm.1",
        "model.multi_modal_projector.linear_2": "mm.2",
    },
}
_PARTS: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_PROJECTORS: Final = {
    "smolvlm": "idefics3",
    "gemma3": "gemma3",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "lfm2_vl": "lfm2",
}
Array = npt.NDArray[np.float32]


def write_seeing_gguf(
    folder: Path,
    checkpoint: Path,
    kind: str = "F32",
    without: Collection[str] = (),
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write model.gguf and mmproj-model.gguf of a checkpoint, the latter without some keys and tensors, and with
    `changes` of other keys; returns the former."""
    folder.mkdir()
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    weights = load_file(checkpoint / "model.safetensors")
    family = config["model_type"]
    images = json.loads((checkpoint / "preprocessor_config.json").read_text(encoding="utf-8"))
    settings = {key: value for key, value in metadata(config, images).items() if key not in without} | {**changes}
    parts = {
        stored: part
        for name, value in weights.items()
        for stored, part in tensors(config, name, np.asarray(value, np.float32))
        if stored not in without
    }
    write_mmproj(folder / "mmproj-model.gguf", settings, parts, kind)
    text = folder / "text"
    text.mkdir()
    write_json(text / "config.json", config["text_config"] | {"eos_token_id": 0})
    names = {own: standard for standard, own in FAMILIES[family]["names"].items()} or {"model.": "model."}
    own = {
        standard + name.removeprefix(prefix): value
        for name, value in weights.items()
        for prefix, standard in ({"lm_head.": "lm_head."} | names).items()
        if name.startswith(prefix)
    }
    save_file(own, text / "model.safetensors")
    (text / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    template = (checkpoint / "chat_template.jinja").read_text(encoding="utf-8")
    return write_gguf(folder / "model.gguf", text, also={"tokenizer.chat_template": template})


def write_mmproj(path: Path, settings: dict[str, Any], parts: dict[str, Array], kind: str) -> None:
    """Write a tower, whose matrices have that type."""
    writer = gguf.GGUFWriter(path, "clip")
    add_metadata(writer, settings)
    for name, part in parts.items():
        fitting = "F16" if kind == "Q8_0" and part.shape[-1] % 32 else kind
        number = GGMLQuantizationType[fitting if part.ndim == 2 and "embd" not in name else "F32"]
        data = gguf.quants.quantize(part, number)
        writer.add_tensor(name, data, raw_dtype=None if number.name in ("F32", "F16") else number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata(config: dict[str, Any], images: dict[str, Any]) -> dict[str, Any]:
    """The settings of a tower."""
    vision, family = config["vision_config"], config["model_type"]
    side = int(vision.get("num_position_embeddings", 0) ** 0.5) * vision["patch_size"]
    values: dict[str, Any] = {
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": vision.get("depth") or vision["num_hidden_layers"],
        "attention.head_count": vision.get("num_heads") or vision["num_attention_heads"],
        "image_size": vision.get("image_size") or side or 560,
        "patch_size": vision["patch_size"],
        "projection_dim": config["text_config"]["hidden_size"],
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": images["image_mean"],
        "image_std": images["image_std"],
    }
    match family:
        case "smolvlm":
            values["projector.scale_factor"] = config["scale_factor"]
            values["preproc_image_size"] = images["size"]["longest_edge"]
        case "gemma3":
            squares = int(config["mm_tokens_per_image"] ** 0.5)
            values["projector.scale_factor"] = vision["image_size"] // vision["patch_size"] // squares
        case "qwen2_5_vl":
            values["n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
            values["window_size"] = vision["window_size"]
        case "qwen3_vl":
            chosen = vision["deepstack_visual_indexes"]
            values["is_deepstack_layers"] = [layer in chosen for layer in range(vision["depth"])]
            values["spatial_merge_size"] = 2
        case "lfm2_vl":
            values["projector.scale_factor"] = config["downsample_factor"]
    values |= {f"image_{name}": images[name] for name in ("min_pixels", "max_pixels") if name in images}
    return {
        "general.type": "mmproj",
        "clip.projector_type": _PROJECTORS[family],
        "clip.has_vision_encoder": True,
        **{f"clip.vision.{name}": value for name, value in values.items()},
    }


def tensors(config: dict[str, Any], name: str, value: Array) -> Iterator[tuple[str, Array]]:
    """What the file has of a tensor: names of llama.cpp, and parts; nothing of the language model."""
    family, vision = config["model_type"], config["vision_config"]
    if name == "multi_modal_projector.mm_input_projection_weight":
        yield "mm.input_projection.weight", value
        return
    module, _, kind = name.rpartition(".")
    module = module.removeprefix(f"{FAMILIES[family]['tower']}.")
    layer = re.fullmatch(r"(?:encoder\.layers|blocks)\.(\d+)\.(.+)", module)
    deep = re.fullmatch(r"deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)", module)
    if layer is not None and layer[2] == "attn.qkv" and family == "qwen2_5_vl":
        for part, rows in zip("qkv", np.split(value, 3), strict=True):
            yield f"v.blk.{layer[1]}.attn_{part}.{kind}", rows
    elif layer is not None:
        yield f"v.blk.{layer[1]}.{_PARTS[layer[2]]}.{kind}", value
    elif deep is not None:
        yield f"v.deepstack.{vision['deepstack_visual_indexes'][int(deep[1])]}.{deep[2]}.{kind}", value
    elif value.ndim == 5:
        yield "v.patch_embd.weight", value[:, :, 0]
        yield "v.patch_embd.weight.1", value[:, :, 1]
    elif module in _MODULES[family]:
        if family == "lfm2_vl" and name.endswith("patch_embedding.weight"):
            side = vision["patch_size"]
            value = value.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        yield f"{_MODULES[family][module]}.{kind}", value + 1 if "soft_emb_norm" in name else value
