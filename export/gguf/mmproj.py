"""Vision towers in GGUF files of their own (mmproj), as llama.cpp's converter writes them for Idefics3 and SmolVLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...errors import CheckpointError
from ...models.gguf_header import AGAIN, GgufHeader, read_gguf_header

PROJECTOR: Final = "idefics3"
IMAGE_TOKEN: Final = "<image>"  # noqa: S105 -- not a password
_TOWER: Final = "model.vision_model"
_OUTER: Final = {
    "v.patch_embd": f"{_TOWER}.embeddings.patch_embedding",
    "v.position_embd": f"{_TOWER}.embeddings.position_embedding",
    "v.post_ln": f"{_TOWER}.post_layernorm",
    "mm.model.fc": "model.connector.modality_projection.proj",
}
_OF_LAYER: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_LAYER: Final = re.compile(r"v\.blk\.(0|[1-9]\d{0,3})\.(\w+)")


def find_mmproj(model: Path) -> GgufHeader | None:
    """The vision tower beside a GGUF model: the only file in its folder with mmproj in its name; None for none.

    Raises:
        CheckpointError: there are several, or it is damaged or of another family.
    """
    found = sorted(each for each in model.parent.glob("*.gguf") if "mmproj" in each.name.lower() and each != model)
    if not found:
        return None
    if len(found) > 1:
        names = ", ".join(each.name for each in found[:4])
        raise CheckpointError(f"{model.parent} has several vision towers: {names}", "keep one of them beside the model")
    header = read_gguf_header(found[0])
    kind = header.text("clip.projector_type") or header.text("clip.vision.projector_type")
    if kind != PROJECTOR:
        what = f"the vision tower has a projector of the kind {str(kind)[:40]!r}"
        hint = f"supported is {PROJECTOR}: export the model's Hugging Face checkpoint, or move the file away"
        raise header.wrong(what, hint)
    return header


def checkpoint_name(name: str) -> str | None:
    """The name of a tensor in a Hugging Face checkpoint; None for one that is not part of a tower."""
    module, _, kind = name.rpartition(".")
    layer = _LAYER.fullmatch(module)
    if layer is not None and layer[2] in _OF_LAYER:
        return f"{_TOWER}.encoder.layers.{layer[1]}.{_OF_LAYER[layer[2]]}.{kind}"
    return f"{_OUTER[module]}.{kind}" if module in _OUTER else None


def seeing_config(header: GgufHeader, text: Mapping[str, Any], image_token: int | None) -> dict[str, Any]:
    """The config.json of a model with that tower and a language model.

    Raises:
        CheckpointError: the file lacks a setting, or the vocabulary has no image token.
    """
    if image_token is None:
        raise header.wrong(f"the language model has no token {IMAGE_TOKEN}", "the files belong to different models")
    counts = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "image_size": "image_size",
        "patch_size": "patch_size",
    }
    vision: dict[str, Any] = {name: header.required_count(f"clip.vision.{key}") for name, key in counts.items()}
    vision["layer_norm_eps"] = header.required(header.positive, "clip.vision.attention.layer_norm_epsilon")
    return {
        "model_type": "smolvlm",
        "text_config": dict(text),
        "vision_config": vision,
        "scale_factor": header.required_count("clip.vision.projector.scale_factor"),
        "image_token_id": image_token,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def processor_settings(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessor_config.json of such a model; errors as for `seeing_config`."""
    side = config["vision_config"]["image_size"]
    squares = side // config["vision_config"]["patch_size"] // config["scale_factor"]
    channels = {name: header.required(header.numbers, f"clip.vision.{name}") for name in ("image_mean", "image_std")}
    longest = header.count("clip.vision.preproc_image_size", 1) or side
    return {
        "max_image_size": {"longest_edge": side},
        "size": {"longest_edge": longest},
        "do_image_splitting": longest > side,
        "image_seq_len": squares**2,
        **channels,
    }


def unknown_tensor(header: GgufHeader, name: str) -> CheckpointError:
    """The error for a tensor that is not part of a tower."""
    return header.wrong(f"{name[:60]!r} is not part of a vision tower of the kind {PROJECTOR}", AGAIN)
