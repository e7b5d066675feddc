"""Tiny random draft heads in the published formats, for the tiny models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgerun.export.drafts.feature_heads import EAGLE_ARCHITECTURES
from edgerun.export.drafts.medusa_draft import MEDUSA_HEADS, MEDUSA_LAYERS, MEDUSA_PREFIX, medusa_block, medusa_output

from .tiny_models import tiny_config, tiny_weights, write_checkpoint, write_json, write_weights

Tensors = dict[str, npt.NDArray[Any]]


def eagle_config(target: Mapping[str, Any], **overrides: Any) -> dict[str, Any]:
    """config.json of an EAGLE-3 head for a target; an override of None removes the setting."""
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    config = {
        "architectures": [EAGLE_ARCHITECTURES[0]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "intermediate_size": 80,
        "draft_vocab_size": 200,
        **{name: target[name] for name in names},
        **overrides,
    }
    return {name: value for name, value in config.items() if value is not None}


def eagle_tensors(
    hidden: int, target_hidden: int, query: int, key_value: int, intermediate: int, draft_vocab: int
) -> dict[str, tuple[int, ...]]:
    """Published names and shapes of the float tensors of an EAGLE-3 head; its embedding and its integers are optional.

    `query` and `key_value` are the channels of all their heads together.
    """
    layers = {
        "self_attn.q_proj": (query, 2 * hidden),
        "self_attn.k_proj": (key_value, 2 * hidden),
        "self_attn.v_proj": (key_value, 2 * hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        "fc.weight": (hidden, 3 * target_hidden),
        **{f"midlayer.{name}.weight": (hidden,) for name in norms},
        **{f"midlayer.{name}.weight": shape for name, shape in layers.items()},
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }


def eagle_weights(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Random weights of a head with the target's embedding, and its map to the target's tokens."""
    random = np.random.default_rng(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    shapes = eagle_tensors(
        hidden,
        config.get("target_hidden_size", hidden),
        heads * dim,
        config["num_key_value_heads"] * dim,
        config["intermediate_size"],
        config["draft_vocab_size"],
    )
    tensors: Tensors = {}
    for name, shape in shapes.items():
        scale = 1.5 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.2
        tensors[name] = (random.standard_normal(shape) * scale + (len(shape) == 1)).astype(np.float32)
    ids = np.sort(random.permutation(config["vocab_size"])[: config["draft_vocab_size"]])
    tensors["d2t"] = (ids - np.arange(ids.size)).astype(np.int64)
    tensors["t2d"] = np.isin(np.arange(config["vocab_size"]), ids)
    return tensors


def write_eagle_head(folder: Path, target: Mapping[str, Any] | None = None, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random EAGLE-3 head for a target with that config.json (the tiny llama when None); return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = eagle_config(tiny_config() if target is None else target, **overrides)
    write_json(folder / "config.json", config)
    write_weights(folder, eagle_weights(config, seed))
    return folder


def write_medusa_heads(
    folder: Path, target: Mapping[str, Any] | None = None, *, heads: int = 3, blocks: int = 1, seed: int = 0
) -> Path:
    """Write random Medusa heads for a target with that config.json (the tiny llama when None); return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config, random = tiny_config() if target is None else target, np.random.default_rng(seed)
    hidden = config["hidden_size"]
    tensors: Tensors = {}
    for head in range(heads):
        for block in range(blocks):
            module = MEDUSA_PREFIX + medusa_block(head, block)
            tensors[f"{module}.weight"] = (random.standard_normal((hidden, hidden)) / 8).astype(np.float32)
            tensors[f"{module}.bias"] = random.standard_normal(hidden).astype(np.float32)
        output = random.standard_normal((config["vocab_size"], hidden)) * 0.4
        tensors[f"{MEDUSA_PREFIX}{medusa_output(head, blocks)}.weight"] = output.astype(np.float32)
    write_json(folder / "config.json", {MEDUSA_HEADS: heads, MEDUSA_LAYERS: blocks})
    write_weights(folder, tensors)
    return folder


def mtp_weights(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Random weights of the multi-token-prediction module of a tiny Qwen3.5 or Qwen3-Next."""
    random = np.random.default_rng(seed)
    hidden = config["hidden_size"]
    layer = {**config, "num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
    name = "model.layers.0."
    tensors: Tensors = {
        f"mtp.layers.0.{key.removeprefix(name)}": value
        for key, value in tiny_weights(layer, seed + 1).items()
        if key.startswith(name)
    }
    tensors["mtp.fc.weight"] = (random.standard_normal((hidden, 2 * hidden)) / math.sqrt(hidden)).astype(np.float32)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{norm}.weight"] = (0.2 * random.standard_normal(hidden)).astype(np.float32)
    return tensors


def write_mtp_checkpoint(
    folder: Path, *, family: str = "qwen3_5_text", seed: int = 0, without: str | None = None, **overrides: Any
) -> Path:
    """Write a random Qwen3.5 with a multi-token-prediction module, of which the tensor `without` is missing."""
    write_checkpoint(folder, family, seed=seed, **{"mtp_num_hidden_layers": 1, **overrides})
    config = tiny_config(family, **{"mtp_num_hidden_layers": 1, **overrides})
    tensors = {**tiny_weights(config, seed), **mtp_weights(config, seed)}
    write_weights(folder, {name: value for name, value in tensors.items() if name != without})
    return folder
