"""Recurrent layers of the reference decoder, token by token: gated delta nets and Mamba-2."""

from __future__ import annotations

import numpy as np

from .reference_operations import WeightSource, linear, rms_norm
from .reference_positions import Float64Array, Settings


def delta_net(weights: WeightSource, config: Settings, name: str, normed: Float64Array) -> Float64Array:
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
    query, key = (_unit(each.reshape(length, key_heads, key_dim)) for each in (query, key))
    query, key = (np.repeat(each, heads // key_heads, axis=1) for each in (query, key))
    value = value.reshape(length, heads, -1)
    beta = 1 / (1 + np.exp(-beta))
    step = step + weights.read(f"{name}.dt_bias")
    decay = np.exp(-np.exp(weights.read(f"{name}.A_log").astype(np.float64)) * np.logaddexp(0, step))
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


def convolved(weights: WeightSource, kernels: str, value: Float64Array) -> Float64Array:
    """Every channel's inputs at the last few tokens, weighted by its kernel."""
    taps = weights.read(kernels).astype(np.float64)[:, 0].T
    inputs = np.concatenate([np.zeros((len(taps) - 1, value.shape[-1])), value])
    return np.stack([(inputs[token : token + len(taps)] * taps).sum(axis=0) for token in range(len(value))])


def _unit(heads: Float64Array) -> Float64Array:
    return np.asarray(heads / np.sqrt((heads**2).sum(axis=-1, keepdims=True) + 1e-6))


def silu(value: Float64Array) -> Float64Array:
    """value * sigmoid(value)."""
    return np.asarray(value / (1 + np.exp(-value)))


def mamba2(weights: WeightSource, config: Settings, name: str, normed: Float64Array) -> Float64Array:
    """A layer's state space (Dao, Gu 2024) as Granite 4.0-H has it.

    Args:
        weights: the checkpoint's tensors.
        config: the settings of the language model.
        name: the module of the state space.
        normed: its input, float64 [n, hidden].

    Returns:
        float64 [n, hidden].
    """
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
    step = np.logaddexp(0, step + weights.read(f"{name}.dt_bias"))
    decay = np.exp(-np.exp(weights.read(f"{name}.A_log").astype(np.float64)) * step)
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
