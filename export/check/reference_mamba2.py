"""The Mamba-2 state space of the reference decoder, token by token."""

from __future__ import annotations

import numpy as np

from .reference_delta_net import convolved, silu
from .reference_operations import WeightSource, linear, rms_norm
from .reference_positions import Float64Array, Settings


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
