"""Feed-forwards by experts of the reference decoder."""

from __future__ import annotations

import numpy as np

from ..checkpoint.source import RowRange
from .reference_operations import WeightSource, linear, softmax
from .reference_positions import Float64Array, Settings
from .reference_recurrent import silu


def has_experts(config: Settings, layer: int) -> bool:
    """Whether the feed-forward of a layer has experts."""
    kind = config["model_type"]
    if kind in ("gpt_oss", "qwen3_5_moe_text"):
        return True
    if kind == "granitemoehybrid":
        return bool(config.get("num_local_experts", 8))
    if kind not in ("qwen3_moe", "qwen3_next") or layer in (config.get("mlp_only_layers") or []):
        return False
    if 0 in (config.get("num_experts"), config.get("num_local_experts")):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def experts(weights: WeightSource, config: Settings, layer: str, normed: Float64Array) -> Float64Array:
    """Send each token through its experts of highest router probability, and through the shared one if there is one.

    Args:
        weights: the checkpoint's tensors.
        config: the settings of the language model.
        layer: the module of the layer.
        normed: the input, float64 [n, hidden].

    Returns:
        The outputs of the selected experts weighted by their probabilities, and that of the shared one,
        float64 [n, hidden].
    """
    kind = config["model_type"]
    routed = _routed(weights, config, layer, normed)
    if kind == "granitemoehybrid":
        gate, up = np.split(linear(weights, f"{layer}.shared_mlp.input_linear", normed, biased=False), 2, axis=-1)
        return routed + linear(weights, f"{layer}.shared_mlp.output_linear", silu(gate) * up, biased=False)
    if kind not in ("qwen3_5_moe_text", "qwen3_next"):
        return routed
    opened = 1 / (1 + np.exp(-linear(weights, f"{layer}.mlp.shared_expert_gate", normed, biased=False)))
    return routed + opened * _gated(weights, f"{layer}.mlp.shared_expert", normed)


def _routed(weights: WeightSource, config: Settings, layer: str, normed: Float64Array) -> Float64Array:
    kind = config["model_type"]
    name = f"{layer}.block_sparse_moe" if kind == "granitemoehybrid" else f"{layer}.mlp"
    router = {"gpt_oss": "router", "granitemoehybrid": "router.layer"}.get(kind, "gate")
    probs = softmax(linear(weights, f"{name}.{router}", normed, biased=kind == "gpt_oss"))
    selected = np.argsort(-probs, axis=-1)[:, : config["num_experts_per_tok"]]
    normalized = config.get("norm_topk_prob", kind == "qwen3_next") if kind in ("qwen3_moe", "qwen3_next") else True
    result = np.zeros_like(normed)
    for expert in np.unique(selected):
        tokens = np.flatnonzero((selected == expert).any(axis=-1))
        weight = probs[tokens, expert]
        if normalized:
            weight = weight / np.take_along_axis(probs[tokens], selected[tokens], axis=-1).sum(axis=-1)
        if kind == "gpt_oss":
            output = _oss_expert(weights, config, f"{name}.experts", int(expert), normed[tokens])
        else:
            output = _gated(weights, f"{name}.experts.{expert}", normed[tokens])
        result[tokens] += weight[:, None] * output
    return result


def _gated(weights: WeightSource, name: str, value: Float64Array) -> Float64Array:
    gate, up = (linear(weights, f"{name}.{each}_proj", value, biased=False) for each in ("gate", "up"))
    return linear(weights, f"{name}.down_proj", silu(gate) * up, biased=False)


def _oss_expert(weights: WeightSource, config: Settings, name: str, expert: int, normed: Float64Array) -> Float64Array:
    """One expert of gpt-oss, whose gate and up outputs are interleaved."""

    def linear(part: str, rows: int, value: Float64Array) -> Float64Array:
        weight = weights.read_rows(RowRange(f"{name}.{part}", expert * rows, (expert + 1) * rows))
        return np.asarray(value @ weight.astype(np.float64).T + weights.read(f"{name}.{part}_bias")[expert])

    limit, alpha = config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702)
    gate_up = linear("gate_up_proj", 2 * config["intermediate_size"], normed)
    gate, up = np.minimum(gate_up[:, ::2], limit), np.clip(gate_up[:, 1::2], -limit, limit)
    return linear("down_proj", config["hidden_size"], gate / (1 + np.exp(-alpha * gate)) * (up + 1))
