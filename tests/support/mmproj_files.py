"""Vision towers as GGUF files, made from checkpoints like llama.cpp's converter does for SmolVLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from support.gguf_files import write_gguf
from support.tiny_models import write_json

_MODULES: Final = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
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
}


def write_seeing_gguf(folder: Path, checkpoint: Path, kind: str = "F32") -> Path:
    """Write model.gguf and mmproj-model.gguf of a SmolVLM checkpoint; returns the former."""
    folder.mkdir()
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    weights = load_file(checkpoint / "model.safetensors")
    write_mmproj(folder / "mmproj-model.gguf", checkpoint, config, weights, kind)
    text = folder / "text"
    text.mkdir()
    write_json(text / "config.json", config["text_config"] | {"eos_token_id": 0})
    prefix = "model.text_model."
    own = {
        name.replace(prefix, "model."): each for name, each in weights.items() if name.startswith((prefix, "lm_head"))
    }
    save_file(own, text / "model.safetensors")
    (text / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    template = (checkpoint / "chat_template.jinja").read_text(encoding="utf-8")
    return write_gguf(folder / "model.gguf", text, also={"tokenizer.chat_template": template})


def write_mmproj(path: Path, checkpoint: Path, config: dict[str, Any], weights: dict[str, Any], kind: str) -> None:
    """Write the tower."""
    images = json.loads((checkpoint / "preprocessor_config.json").read_text(encoding="utf-8"))
    vision, writer = config["vision_config"], gguf.GGUFWriter(path, "clip")
    writer.add_string("general.type", "mmproj")
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    for name, key in (
        ("hidden_size", "embedding_length"),
        ("intermediate_size", "feed_forward_length"),
        ("num_hidden_layers", "block_count"),
        ("num_attention_heads", "attention.head_count"),
        ("image_size", "image_size"),
        ("patch_size", "patch_size"),
    ):
        writer.add_uint32(f"clip.vision.{key}", vision[name])
    writer.add_uint32("clip.vision.projection_dim", config["text_config"]["hidden_size"])
    writer.add_uint32("clip.vision.projector.scale_factor", config["scale_factor"])
    writer.add_uint32("clip.vision.preproc_image_size", images["size"]["longest_edge"])
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", images[name])
    for name, value in weights.items():
        if (stored := mmproj_name(name)) is None:
            continue
        fitting = "F16" if kind == "Q8_0" and value.shape[-1] % 32 else kind
        number = GGMLQuantizationType[fitting if value.ndim == 2 and "embeddings" not in name else "F32"]
        data = gguf.quants.quantize(np.asarray(value, np.float32), number)
        writer.add_tensor(stored, data, raw_dtype=None if number.name in ("F32", "F16") else number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mmproj_name(name: str) -> str | None:
    """llama.cpp's name of a tensor of the tower; None for others."""
    module, _, kind = name.rpartition(".")
    if module == "model.connector.modality_projection.proj":
        return f"mm.model.fc.{kind}"
    if not module.startswith("model.vision_model."):
        return None
    module = module.removeprefix("model.vision_model.")
    if module in _MODULES:
        return f"{_MODULES[module]}.{kind}"
    layer, part = module.removeprefix("encoder.layers.").split(".", 1)
    return f"v.blk.{layer}.{_PARTS[part]}.{kind}"
