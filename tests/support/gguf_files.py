"""GGUF files made from checkpoint folders like llama.cpp's converter does.

Uses the writer of the `gguf` package and shares no code with the reader under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import ml_dtypes  # noqa: F401 -- adds bfloat16 to NumPy
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file

NAMES: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FAMILY_NAMES: Final = {
    "gemma3_text": {
        "pre_feedforward_layernorm": "ffn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "lfm2": {
        "operator_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w2": "ffn_down",
        "feed_forward.w3": "ffn_up",
        "conv.conv": "shortconv.conv",
        "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj",
    },
}
ARCHITECTURES: Final = {"gemma3_text": "gemma3", "qwen2_5_vl_text": "qwen2vl", "qwen3_vl_text": "qwen3vl"}
"""general.architecture where it is not the model_type."""
Array = npt.NDArray[Any]


def write_gguf(
    path: Path,
    checkpoint: Path,
    kind: str | Mapping[str, str] = "F32",
    *,
    raw: Mapping[str, Array] | None = None,
    also: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
    tensors: Mapping[str, Array] | None = None,
    parts: int = 1,
) -> Path:
    """Convert a checkpoint folder to a GGUF file.

    Args:
        path: the file to write; for a split model, its name without -00001-of-0000N.
        checkpoint: folder in Hugging Face layout with one safetensors file.
        kind: tensor type of the matrices, or tensor types by GGUF name (others F32).
        raw: stored bytes by GGUF name, in llama.cpp's row order and the type given by `kind`.
        also: metadata to add or replace.
        without: keys and tensors to leave out.
        tensors: float32 tensors to add by GGUF name.
        parts: number of files.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    weights = {name: value.astype(np.float32) for name, value in load_file(checkpoint / "model.safetensors").items()}
    family = config["model_type"]
    named = {gguf_name(name, family): permuted(name, value, config) for name, value in weights.items()}
    named |= dict(tensors or {})
    metadata = model_metadata(config) | tokenizer_metadata(checkpoint) | dict(also or {})
    chosen = [name for name in named if name not in without]
    for number in range(parts):
        file = path if parts == 1 else path.with_name(f"{path.stem}-{number + 1:05}-of-{parts:05}.gguf")
        writer = gguf.GGUFWriter(file, ARCHITECTURES.get(family, family))
        if parts > 1:
            metadata |= {"split.count": np.uint16(parts), "split.no": np.uint16(number)}
        if number == 0:
            add_metadata(writer, {key: value for key, value in metadata.items() if key not in without})
            if "general.architecture" in without:
                del writer.kv_data[0]["general.architecture"]
        else:
            add_metadata(writer, {key: value for key, value in metadata.items() if key.startswith("split")})
        for name in chosen[number::parts]:
            add_tensor(writer, name, named[name], kind, raw or {})
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05}.gguf")


def add_tensor(
    writer: gguf.GGUFWriter, name: str, value: Array, kind: str | Mapping[str, str], raw: Mapping[str, Array]
) -> None:
    matrix_kind = kind if isinstance(kind, str) else kind.get(name, "F32")
    number = GGMLQuantizationType[matrix_kind if value.ndim == 2 else "F32"]
    stored = raw[name] if name in raw else gguf.quants.quantize(value, number)
    writer.add_tensor(name, stored, raw_dtype=None if number.name in ("F32", "F16") else number)


def gguf_name(name: str, family: str = "llama") -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    outer |= {"lm_head.weight": "output.weight", "model.embedding_norm.weight": "token_embd_norm.weight"}
    if name in outer:
        return outer[name]
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    return f"blk.{layer[1]}.{({**NAMES, **FAMILY_NAMES.get(family, {})})[layer[2]]}.{layer[3]}"


def permuted(name: str, value: Array, config: Mapping[str, Any]) -> Array:
    """Change a tensor like llama.cpp's converter: reorder the rows of Llama's query and key projections, add 1 to the
    weights of Gemma's norms, and leave out the only channel of a convolution's kernels."""
    if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
        return value + 1
    if name.endswith(".conv.conv.weight"):
        return value[:, 0]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    for projection, given in heads.items():
        if config["model_type"] == "llama" and f".{projection}." in name:
            count = given or config["num_attention_heads"]
            split = value.reshape(count, 2, len(value) // count // 2, *value.shape[1:])
            return np.ascontiguousarray(split.swapaxes(1, 2).reshape(value.shape))
    return value


def model_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    family, heads = config["model_type"], config["num_attention_heads"]
    name = ARCHITECTURES.get(family, family)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(config["rope_theta"]),
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps") or config["norm_eps"]),
    }
    if "mrope_section" in config.get("rope_scaling", {}):
        values["rope.dimension_sections"] = [np.int32(each) for each in (*config["rope_scaling"]["mrope_section"], 0)]
    if family == "gemma3_text":
        values["attention.sliding_window"] = config["sliding_window"]
        values["rope.freq_base_swa"] = float(config["rope_local_base_freq"])
    elif family == "lfm2":
        counts = [config["num_key_value_heads"] * (kind != "conv") for kind in config["layer_types"]]
        values |= {"attention.head_count_kv": [np.int32(each) for each in counts]}
        values["shortconv.l_cache"] = config["conv_L_cache"]
    return {f"{name}.{key}": value for key, value in values.items()}


def tokenizer_metadata(checkpoint: Path, pre: str = "gpt-2") -> dict[str, Any]:
    """Metadata of a tokenizer: SentencePiece if it falls back to bytes, else byte-level."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    settings_file = checkpoint / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text(encoding="utf-8")) if settings_file.is_file() else {}
    model, added = tokenizer["model"], {token["id"]: token for token in tokenizer["added_tokens"]}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"]]
    size = max([*model["vocab"].values(), *added]) + 1
    tokens, kinds = [f"[PAD{token}]" for token in range(size)], [5] * size
    for text, token in model["vocab"].items():
        tokens[token] = text
        kinds[token] = 6 if model["byte_fallback"] and re.fullmatch(r"<0x[0-9A-F]{2}>", text) else 1
    for token, entry in added.items():
        tokens[token], kinds[token] = entry["content"], 3 if entry["special"] else 4
    named = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {key: tokens.index(settings[name]) for key, name in named.items() if settings.get(name) in tokens}
    values: dict[str, Any] = {"tokens": tokens, "token_type": [np.int32(kind) for kind in kinds]}
    values |= {f"{name}_token_id": token for name, token in ids.items()}
    values["add_bos_token"] = "SpecialToken" in json.dumps(tokenizer["post_processor"])
    if model["byte_fallback"]:
        values |= {"model": "llama", "scores": piece_scores(tokens, model["vocab"], merges)}
    else:
        values |= {"model": "gpt2", "pre": pre, "merges": [" ".join(merge) for merge in merges]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    template = settings.get("chat_template")
    return metadata if template is None else {**metadata, "tokenizer.chat_template": template}


def piece_scores(tokens: list[str], vocabulary: Mapping[str, int], merges: list[list[str]]) -> list[float]:
    """Scores that rank the tokens in the order of the merges, as in SentencePiece."""
    scores = [0.0] * len(tokens)
    for rank, (left, right) in enumerate(merges):
        scores[vocabulary[left + right]] = scores[vocabulary[left + right]] or -1.0 - rank
    return scores


def add_metadata(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        add = {
            bool: writer.add_bool,
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
            np.uint16: writer.add_uint16,
        }[type(value)]
        if isinstance(value, list) and value and isinstance(value[0], np.generic):
            writer.add_key_value(key, [item.item() for item in value], gguf.GGUFValueType.ARRAY, sub_type(value[0]))
        elif key == "general.architecture":
            writer.kv_data[0][key].value = value
        else:
            add(key, value)


def sub_type(value: Any) -> gguf.GGUFValueType:
    return {np.int32: gguf.GGUFValueType.INT32, np.float32: gguf.GGUFValueType.FLOAT32}[type(value)]


def random_blocks(kind: str, rows: int, columns: int, size: float, seed: int = 0) -> Array:
    """Raw rows of a K-quant with random codes and scales; `size` is the weights' approximate standard deviation."""
    random = np.random.default_rng(seed)
    weights, length = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (rows * columns // weights, length), dtype=np.uint8)
    # A code from 0 up is multiplied by a scale of about 32, and a minimum of about 32 is subtracted; Q6_K's are signed.
    step, positions = {
        "Q4_K": (size / (32 * 5), (slice(0, 2), slice(2, 4))),
        "Q5_K": (size / (32 * 10), (slice(0, 2), slice(2, 4))),
        "Q6_K": (size / (74 * 18), (slice(208, 210),)),
    }[kind]
    for factor, position in zip((1, 7.5 if kind == "Q4_K" else 15.5), positions, strict=False):
        scales = (step * factor * random.uniform(0.5, 1.5, len(blocks))).astype("<f2")
        blocks[:, position] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)
