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
    """The features float64 `[tokens, hidden]` of one square image `[3, side, side]`, or of any image for LFM2-VL."""
    vision, tower = config["vision_config"], FAMILIES[family]["tower"]
    patch = vision["patch_size"]
    rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
    cut = pixels.astype(np.float64).reshape(3, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
    if family == "lfm2_vl":
        cut = cut.transpose(0, 1, 3, 4, 2)
    kernel = weights[f"{tower}.embeddings.patch_embedding.weight"].reshape(vision["hidden_size"], -1)
    states = cut.reshape(rows * columns, -1) @ kernel.T + weights[f"{tower}.embeddings.patch_embedding.bias"]
    table = weights[f"{tower}.embeddings.position_embedding.weight"].astype(np.float64)
    states = states + (_resized_positions(table, rows, columns) if family == "lfm2_vl" else table)
    states = _siglip(weights, tower, vision["num_hidden_layers"], vision["num_attention_heads"], states)
    match family:
        case "gemma3":
            return _gemma3(config, weights, states, rows)
        case "lfm2_vl":
            module, scale = "model.multi_modal_projector", config["downsample_factor"]
            merged = _norm(weights, f"{module}.layer_norm", _squares(states, rows, columns, scale))
            inner = _linear(weights, f"{module}.linear_1", merged)
            error = np.vectorize(math.erf)(inner / math.sqrt(2))
            return _linear(weights, f"{module}.linear_2", 0.5 * inner * (1 + error))
    tokens = _squares(states, rows, columns, config["scale_factor"])
    return _linear(weights, "model.connector.modality_projection.proj", tokens)


def _linear(weights: Mapping[str, npt.NDArray[Any]], name: str, value: Floats) -> Floats:
    product: Floats = value @ weights[f"{name}.weight"].astype(np.float64).T
    return product + weights[f"{name}.bias"] if f"{name}.bias" in weights else product


def _norm(weights: Mapping[str, npt.NDArray[Any]], name: str, value: Floats) -> Floats:
    centred = value - value.mean(-1, keepdims=True)
    scaled = centred / np.sqrt(centred.var(-1, keepdims=True) + (1e-6 if "vision" in name else 1e-5))
    return np.asarray(scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"], np.float64)


def _siglip(weights: Mapping[str, npt.NDArray[Any]], tower: str, layers: int, heads: int, states: Floats) -> Floats:
    """The states of the patches after all layers and the last norm."""
    for layer in range(layers):
        name = f"{tower}.encoder.layers.{layer}"
        normed = _norm(weights, f"{name}.layer_norm1", states)
        query, key, value = (
            _linear(weights, f"{name}.self_attn.{part}_proj", normed).reshape(len(states), heads, -1).transpose(1, 0, 2)
            for part in ("q", "k", "v")
        )
        scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1])
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True) @ value).transpose(1, 0, 2).reshape(len(states), -1)
        states = states + _linear(weights, f"{name}.self_attn.out_proj", mixed)
        inner = _linear(weights, f"{name}.mlp.fc1", _norm(weights, f"{name}.layer_norm2", states))
        gelu = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        states = states + _linear(weights, f"{name}.mlp.fc2", gelu)
    return _norm(weights, f"{tower}.post_layernorm", states)


def _squares(states: Floats, rows: int, columns: int, scale: int) -> Floats:
    """The channels of squares of patches side by side."""
    tokens = [
        np.concatenate([states[(row * scale + down) * columns + column * scale + right] for down in range(scale)
                        for right in range(scale)])
        for row in range(rows // scale)
        for column in range(columns // scale)
    ]  # fmt: skip
    return np.stack(tokens)


def _resized_positions(table: Floats, rows: int, columns: int) -> Floats:
    """Position embeddings of a square in another size, as `torch.nn.functional.interpolate` with antialias."""
    side = math.isqrt(len(table))

    def shares(count: int) -> Floats:
        scale, found = side / count, np.zeros((count, side))
        for place in range(count):
            center = (place + 0.5) * scale
            for source in range(side):
                found[place, source] = max(0, 1 - abs(source + 0.5 - center) / max(scale, 1))
            found[place] /= found[place].sum()
        return found

    resized = np.einsum("ry,cx,yxh->rch", shares(rows), shares(columns), table.reshape(side, side, -1))
    return np.asarray(resized.reshape(rows * columns, -1), np.float64)


def _gemma3(config: Mapping[str, Any], weights: Mapping[str, npt.NDArray[Any]], states: Floats, side: int) -> Floats:
    squares = int(config["mm_tokens_per_image"] ** 0.5)
    size = side // squares
    pooled = states.reshape(squares, size, squares, size, -1).mean((1, 3)).reshape(squares * squares, -1)
    normed = pooled / np.sqrt((pooled**2).mean(-1, keepdims=True) + 1e-6)
    projector = "multi_modal_projector"
    normed = normed * (1 + weights[f"{projector}.mm_soft_emb_norm.weight"].astype(np.float64))
    return np.asarray(normed @ weights[f"{projector}.mm_input_projection_weight"], np.float64)


def reference_native_features(
    family: str, config: Mapping[str, Any], weights: Mapping[str, npt.NDArray[Any]], pixels: npt.NDArray[Any]
) -> Floats:
    """The features float64 `[1 + layers, tokens, hidden]` of an image `[3, height, width]` by a tower of Qwen-VL."""
    vision, tower = config["vision_config"], FAMILIES[family]["tower"]
    patch, hidden, heads = vision["patch_size"], vision["hidden_size"], vision["num_heads"]
    rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
    row, column = np.indices((rows, columns)).reshape(2, -1)
    gated = vision["hidden_act"] == "silu"

    def linear(name: str, value: Floats) -> Floats:
        product: Floats = value @ weights[f"{tower}.{name}.weight"].astype(np.float64).T
        return product + weights.get(f"{tower}.{name}.bias", 0)

    def norm(name: str, value: Floats) -> Floats:
        centred = value if gated else value - value.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        return np.asarray(scaled * weights[f"{tower}.{name}.weight"] + weights.get(f"{tower}.{name}.bias", 0))

    def merged(module: str, parts: tuple[str, str, str], value: Floats, *, normed_last: bool = False) -> Floats:
        value = value if normed_last else norm(f"{module}.{parts[0]}", value)
        squares = value.reshape(rows // 2, 2, columns // 2, 2, -1).swapaxes(1, 2).reshape(rows * columns // 4, -1)
        squares = norm(f"{module}.{parts[0]}", squares) if normed_last else squares
        inner = linear(f"{module}.{parts[1]}", squares)
        error = np.vectorize(math.erf)(inner / math.sqrt(2))
        return linear(f"{module}.{parts[2]}", 0.5 * inner * (1 + error))

    cut = pixels.astype(np.float64).reshape(3, rows, patch, columns, patch).transpose(1, 3, 0, 2, 4)
    cut = cut.reshape(rows * columns, 3, 1, patch * patch).repeat(2, axis=2).reshape(rows * columns, -1)
    kernel = weights[f"{tower}.patch_embed.proj.weight"].reshape(hidden, -1)
    states = cut @ kernel.T + weights.get(f"{tower}.patch_embed.proj.bias", 0)
    if not gated:
        side = int(vision["num_position_embeddings"] ** 0.5)
        table = weights[f"{tower}.pos_embed.weight"].astype(np.float64).reshape(side, side, hidden)
        for index in range(rows * columns):
            down, right = row[index] * (side - 1) / (rows - 1), column[index] * (side - 1) / (columns - 1)
            for y in range(side):
                for x in range(side):
                    states[index] += max(0, 1 - abs(down - y)) * max(0, 1 - abs(right - x)) * table[y, x]
    quarter = hidden // heads // 4
    frequencies = 10000.0 ** (-np.arange(quarter) / quarter)
    angles = np.concatenate([row[:, None] * frequencies, column[:, None] * frequencies], axis=1)[:, None]
    window = vision.get("window_size", 0) // patch
    names = ("ln_q", "mlp.0", "mlp.2") if gated else ("norm", "linear_fc1", "linear_fc2")
    deep = []
    for layer in range(vision["depth"]):
        block = f"blocks.{layer}"
        packed = linear(f"{block}.attn.qkv", norm(f"{block}.norm1", states)).reshape(rows * columns, 3, heads, -1)
        first, second = np.split(packed[:, :2], 2, axis=-1)
        cosines, sines = np.cos(angles)[:, None], np.sin(angles)[:, None]
        turned = np.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
        scores = np.einsum("ihc,jhc->hij", turned[:, 0], turned[:, 1]) / math.sqrt(hidden // heads)
        if window and layer not in vision["fullatt_block_indexes"]:
            number = row // window * columns + column // window
            scores = np.where(number[:, None] == number, scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhc->ihc", shares / shares.sum(-1, keepdims=True), packed[:, 2])
        states = states + linear(f"{block}.attn.proj", mixed.reshape(rows * columns, hidden))
        normed = norm(f"{block}.norm2", states)
        if gated:
            gate = linear(f"{block}.mlp.gate_proj", normed)
            inner = gate / (1 + np.exp(-gate)) * linear(f"{block}.mlp.up_proj", normed)
            states = states + linear(f"{block}.mlp.down_proj", inner)
        else:
            inner = linear(f"{block}.mlp.linear_fc1", normed)
            inner = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
            states = states + linear(f"{block}.mlp.linear_fc2", inner)
        if layer in vision.get("deepstack_visual_indexes", ()):
            number = vision["deepstack_visual_indexes"].index(layer)
            deep.append(merged(f"deepstack_merger_list.{number}", names, states, normed_last=True))
    return np.stack([merged("merger", names, states), *deep])
