"""Vision towers in float64, read from the definition and slow: what exported graphs are compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from support.vision_models import FAMILIES

Floats = npt.NDArray[np.float64]


def reference_features(
    family: str, config: Mapping[str, Any], weights: Mapping[str, npt.NDArray[Any]], pixels: npt.NDArray[Any]
) -> Floats:
    """The features float64 `[tokens, hidden]` of one square image `[3, side, side]`."""
    vision, tower = config["vision_config"], FAMILIES[family]["tower"]
    patch, epsilon = vision["patch_size"], 1e-6
    side = vision["image_size"] // patch

    def linear(name: str, value: Floats) -> Floats:
        product: Floats = value @ weights[f"{name}.weight"].astype(np.float64).T
        return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product

    def norm(name: str, value: Floats) -> Floats:
        centred = value - value.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(centred.var(-1, keepdims=True) + epsilon)
        return np.asarray(scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"], np.float64)

    cut = pixels.astype(np.float64).reshape(3, side, patch, side, patch).transpose(1, 3, 0, 2, 4)
    kernel = weights[f"{tower}.embeddings.patch_embedding.weight"].reshape(vision["hidden_size"], -1)
    states = cut.reshape(side * side, -1) @ kernel.T + weights[f"{tower}.embeddings.patch_embedding.bias"]
    states = states + weights[f"{tower}.embeddings.position_embedding.weight"]
    for layer in range(vision["num_hidden_layers"]):
        name = f"{tower}.encoder.layers.{layer}"
        normed = norm(f"{name}.layer_norm1", states)
        heads = vision["num_attention_heads"]
        query, key, value = (
            linear(f"{name}.self_attn.{part}_proj", normed).reshape(side * side, heads, -1).transpose(1, 0, 2)
            for part in ("q", "k", "v")
        )
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1])
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True) @ value).transpose(1, 0, 2).reshape(side * side, -1)
        states = states + linear(f"{name}.self_attn.out_proj", mixed)
        inner = linear(f"{name}.mlp.fc1", norm(f"{name}.layer_norm2", states))
        gelu = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        states = states + linear(f"{name}.mlp.fc2", gelu)
    states = norm(f"{tower}.post_layernorm", states)
    if family == "gemma3":
        return _gemma3(config, weights, states, side)
    scale = config["scale_factor"]
    tokens = [
        np.concatenate([states[(row * scale + down) * side + column * scale + right] for down in range(scale)
                        for right in range(scale)])
        for row in range(side // scale)
        for column in range(side // scale)
    ]  # fmt: skip
    return linear("model.connector.modality_projection.proj", np.stack(tokens))


def _gemma3(config: Mapping[str, Any], weights: Mapping[str, npt.NDArray[Any]], states: Floats, side: int) -> Floats:
    squares = int(config["mm_tokens_per_image"] ** 0.5)
    size = side // squares
    pooled = states.reshape(squares, size, squares, size, -1).mean((1, 3)).reshape(squares * squares, -1)
    normed = pooled / np.sqrt((pooled**2).mean(-1, keepdims=True) + 1e-6)
    projector = "multi_modal_projector"
    normed = normed * (1 + weights[f"{projector}.mm_soft_emb_norm.weight"].astype(np.float64))
    return np.asarray(normed @ weights[f"{projector}.mm_input_projection_weight"], np.float64)
