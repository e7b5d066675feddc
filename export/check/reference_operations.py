"""Operations of the reference decoder in float64: products, norms, experts, and layers with a state."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from ..checkpoint.source import ModelSource, RowRange
from .reference_positions import Float64Array, Settings

_PROJECTIONS: Final = ("gate_proj", "up_proj", "down_proj")


def linear(weights: ModelSource, name: str, value: Float64Array, biased: bool) -> Float64Array:
    """value @ weight.T + bias, a chunk of the weight at a time."""
    products = [value @ piece.astype(np.float64).T for piece in weights.chunks(f"{name}.weight")]
    result = np.concatenate(products, axis=-1)
    return result + weights.read(f"{name}.bias") if biased else result


def rms_norm(value: Float64Array, epsilon: float) -> Float64Array:
    """Value divided by its root mean square over the last axis."""
    return np.asarray(value / np.sqrt(np.mean(value**2, axis=-1, keepdims=True) + epsilon))


def softmax(scores: Float64Array) -> Float64Array:
    """Probabilities of scores, over the last axis."""
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=-1, keepdims=True))


def soft_capped(value: Float64Array, cap: float | None) -> Float64Array:
    """cap * tanh(value / cap), or the value itself without a cap."""
    return value if cap is None else np.asarray(cap * np.tanh(value / cap))


def gelu_tanh(value: Float64Array) -> Float64Array:
    """GELU in its approximation by tanh."""
    return np.asarray(value / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))))


def rotate(heads: Float64Array, cosine: Float64Array, sine: Float64Array) -> Float64Array:
    """Rotate channel pairs (i, i + dim/2) of the first dim channels of heads [n, heads, _] by angles [n, dim/2]."""
    half = cosine.shape[-1]
    first, second, rest = np.split(heads, [half, 2 * half], axis=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)


def embedding_rows(
    weights: ModelSource, tokens: npt.NDArray[np.int64], module: str = "model.embed_tokens"
) -> Float64Array:
    """Embeddings of tokens, float64 [n, hidden], without the factor that some families apply."""
    rows = [RowRange(f"{module}.weight", token, token + 1) for token in tokens.tolist()]
    return np.concatenate([weights.read_rows(row) for row in rows]).astype(np.float64)


def _steps(weights: ModelSource, name: str, step: Float64Array) -> tuple[Float64Array, Float64Array]:
    """Step sizes and decays of a state, from the outputs of a projection."""
    step = np.logaddexp(0, step + weights.read(f"{name}.dt_bias"))
    return step, np.exp(-np.exp(weights.read(f"{name}.A_log").astype(np.float64)) * step)


def delta_net(weights: ModelSource, config: Settings, name: str, normed: Float64Array) -> Float64Array:
    """A layer's gated delta net (Yang et al. 2024) as Qwen3.5 has it.

    Args:
        weights: the checkpoint's tensors.
        config: the settings of the language model.
        name: the module of the delta net.
        normed: its input, float64 [n, hidden].

    Returns:
        float64 [n, hidden].
    """
    length, heads = len(normed), config.get("linear_num_value_heads", 32)
    key_heads, key_dim = config.get("linear_num_key_heads", 16), config.get("linear_key_head_dim", 128)

    def project(module: str, value: Float64Array) -> Float64Array:
        return linear(weights, f"{name}.{module}", value, biased=False)

    if config["model_type"] == "qwen3_next":
        inputs, gate, beta, step = _by_key_head(
            project("in_proj_qkvz", normed), project("in_proj_ba", normed), key_heads, key_dim
        )
    else:
        inputs, gate, beta, step = (project(f"in_proj_{each}", normed) for each in ("qkv", "z", "b", "a"))
    mixed = silu(convolved(weights, f"{name}.conv1d.weight", inputs))
    width = key_heads * key_dim
    query, key, value = np.split(mixed, [width, 2 * width], axis=-1)
    query, key = (each.reshape(length, key_heads, key_dim) for each in (query, key))
    query, key = (each / np.sqrt((each**2).sum(axis=-1, keepdims=True) + 1e-6) for each in (query, key))
    query, key = (np.repeat(each, heads // key_heads, axis=1) for each in (query, key))
    value = value.reshape(length, heads, -1)
    beta = 1 / (1 + np.exp(-beta))
    _, decay = _steps(weights, name, step)
    state = np.zeros((heads, key_dim, value.shape[-1]))
    read = np.empty_like(value)
    for token in range(length):
        state *= decay[token][:, None, None]
        stored = np.einsum("hkv,hk->hv", state, key[token])
        state += np.einsum("hk,hv->hkv", key[token], beta[token][:, None] * (value[token] - stored))
        read[token] = np.einsum("hkv,hk->hv", state, query[token]) * key_dim**-0.5
    epsilon = float(config.get("rms_norm_eps") or 1e-6)
    scaled = rms_norm(read, epsilon) * weights.read(f"{name}.norm.weight")
    return project("out_proj", scaled.reshape(length, -1) * silu(gate))


def _by_key_head(qkvz: Float64Array, ba: Float64Array, heads: int, key_dim: int) -> list[Float64Array]:
    """Queries, keys and values side by side, gates, and the inputs of betas and decays, of projections by key head."""
    length = len(qkvz)
    query, key, rest = np.split(qkvz.reshape(length, heads, -1), [key_dim, 2 * key_dim], axis=-1)
    parts = [query, key, *np.split(rest, 2, axis=-1), *np.split(ba.reshape(length, heads, -1), 2, axis=-1)]
    query, key, value, gate, beta, step = (each.reshape(length, -1) for each in parts)
    return [np.concatenate([query, key, value], axis=-1), gate, beta, step]


def convolved(weights: ModelSource, kernels: str, value: Float64Array) -> Float64Array:
    """Every channel's inputs at the last few tokens, weighted by its kernel."""
    taps = weights.read(kernels).astype(np.float64)[:, 0].T
    inputs = np.concatenate([np.zeros((len(taps) - 1, value.shape[-1])), value])
    return np.stack([(inputs[token : token + len(taps)] * taps).sum(axis=0) for token in range(len(value))])


def silu(value: Float64Array) -> Float64Array:
    """value * sigmoid(value)."""
    with np.errstate(over="ignore"):  # exp overflows far below zero, where the quotient is zero
        return np.asarray(value / (1 + np.exp(-value)))


def gated(weights: ModelSource, name: str, modules: tuple[str, str, str], value: Float64Array) -> Float64Array:
    """A feed-forward without biases, down(silu(gate) * up), by the names of gate, up and down."""
    gate, up, down = (f"{name}.{each}" for each in modules)
    opened, expanded = (linear(weights, each, value, biased=False) for each in (gate, up))
    return linear(weights, down, silu(opened) * expanded, biased=False)


def gated_by_half(weights: ModelSource, name: str, value: Float64Array) -> Float64Array:
    """Granite's shared feed-forward, the first half of whose first matrix is the gate."""
    gate, up = np.split(linear(weights, f"{name}.input_linear", value, biased=False), 2, axis=-1)
    return linear(weights, f"{name}.output_linear", silu(gate) * up, biased=False)


def mamba2(weights: ModelSource, config: Settings, name: str, normed: Float64Array) -> Float64Array:
    """A layer's state space (Dao, Gu 2024) as Granite 4.0-H has it; arguments and result as for `delta_net`."""
    length, heads, groups = len(normed), config.get("mamba_n_heads", 128), config.get("mamba_n_groups", 1)
    width, states = config.get("mamba_expand", 2) * config["hidden_size"], config.get("mamba_d_state", 256)
    biased = bool(config.get("mamba_proj_bias"))
    gate, mixed, step = np.split(
        linear(weights, f"{name}.in_proj", normed, biased), [width, 2 * width + 2 * groups * states], axis=-1
    )
    bias = weights.read(f"{name}.conv1d.bias") if config.get("mamba_conv_bias", True) else 0.0
    mixed = silu(convolved(weights, f"{name}.conv1d.weight", mixed) + bias)
    value, key, query = np.split(mixed, [width, width + groups * states], axis=-1)
    value = value.reshape(length, heads, -1)
    key, query = (np.repeat(each.reshape(length, groups, -1), heads // groups, axis=1) for each in (key, query))
    step, decay = _steps(weights, name, step)
    state, read = np.zeros((heads, states, value.shape[-1])), np.empty_like(value)
    for token in range(length):
        state *= decay[token][:, None, None]
        state += np.einsum("hk,hv->hkv", key[token], step[token][:, None] * value[token])
        read[token] = np.einsum("hkv,hk->hv", state, query[token])
    read = read + weights.read(f"{name}.D")[:, None] * value
    gated = read.reshape(length, -1) * silu(gate)
    epsilon = float(config.get("rms_norm_eps") or 1e-6)
    scaled = rms_norm(gated.reshape(length, groups, -1), epsilon).reshape(length, -1)
    return linear(weights, f"{name}.out_proj", scaled * weights.read(f"{name}.norm.weight"), biased)


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


def experts(weights: ModelSource, config: Settings, layer: str, normed: Float64Array) -> Float64Array:
    """Send each token through its experts of highest router probability, and through the shared one if there is one.

    Args:
        weights: the checkpoint's tensors.
        config: the settings of the language model.
        layer: the module of the layer.
        normed: the input, float64 [n, hidden].

    Returns:
        The outputs of the selected experts weighted by their probabilities, plus the output of the shared one,
        float64 [n, hidden].
    """
    kind = config["model_type"]
    routed = _routed(weights, config, layer, normed)
    if kind == "granitemoehybrid":
        return routed + gated_by_half(weights, f"{layer}.shared_mlp", normed)
    if kind not in ("qwen3_5_moe_text", "qwen3_next"):
        return routed
    opened = 1 / (1 + np.exp(-linear(weights, f"{layer}.mlp.shared_expert_gate", normed, biased=False)))
    return routed + opened * gated(weights, f"{layer}.mlp.shared_expert", _PROJECTIONS, normed)


def _routed(weights: ModelSource, config: Settings, layer: str, normed: Float64Array) -> Float64Array:
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
            output = gated(weights, f"{name}.experts.{expert}", _PROJECTIONS, normed[tokens])
        result[tokens] += weight[:, None] * output
    return result


def _oss_expert(weights: ModelSource, config: Settings, name: str, expert: int, normed: Float64Array) -> Float64Array:
    """One expert of gpt-oss, whose gate and up outputs are interleaved."""

    def linear(part: str, rows: int, value: Float64Array) -> Float64Array:
        weight = weights.read_rows(RowRange(f"{name}.{part}", expert * rows, (expert + 1) * rows))
        return np.asarray(value @ weight.astype(np.float64).T + weights.read(f"{name}.{part}_bias")[expert])

    limit, alpha = config.get("swiglu_limit", 7.0), config.get("swiglu_alpha", 1.702)
    gate_up = linear("gate_up_proj", 2 * config["intermediate_size"], normed)
    gate, up = np.minimum(gate_up[:, ::2], limit), np.clip(gate_up[:, 1::2], -limit, limit)
    return linear("down_proj", config["hidden_size"], gate / (1 + np.exp(-alpha * gate)) * (up + 1))
