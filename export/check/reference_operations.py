"""Operations of the reference decoder in float64: products, norms, experts, and layers with a state."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..architectures.state_layers import RecurrentConfig
from ..checkpoint.config import ExpertsConfig
from ..checkpoint.layer_weights import FusedLinear, Layer, StateWeights
from ..checkpoint.source import ModelSource, RowRange

Float64Array = npt.NDArray[np.float64]


def linear(weights: ModelSource, linear: FusedLinear, value: Float64Array) -> Float64Array:
    """value @ weight.T + bias, a chunk of the weight at a time."""
    chunks = (chunk for name in linear.weights for chunk in weights.chunks(name))
    result = np.concatenate([value @ chunk.astype(np.float64).T for chunk in chunks], axis=-1)
    return result + np.concatenate([weights.read(name) for name in linear.biases]) if linear.biased else result


def looked_up(weights: ModelSource, table: FusedLinear, tokens: npt.NDArray[np.int64]) -> Float64Array:
    """Rows of an embedding, float64 [n, columns], without the factor that some families apply."""
    rows = [RowRange(table.weights[0], token, token + 1) for token in tokens.tolist()]
    return np.concatenate([weights.read_rows(row) for row in rows]).astype(np.float64)


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


def sigmoid(value: Float64Array) -> Float64Array:
    """1 / (1 + exp(-value))."""
    with np.errstate(over="ignore"):  # exp overflows far below zero, where the quotient is zero
        return np.asarray(1 / (1 + np.exp(-value)))


def silu(value: Float64Array) -> Float64Array:
    """value * sigmoid(value)."""
    return value * sigmoid(value)


def gelu_tanh(value: Float64Array) -> Float64Array:
    """GELU in its approximation by tanh."""
    return np.asarray(value / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3))))


def rotate(heads: Float64Array, cosine: Float64Array, sine: Float64Array) -> Float64Array:
    """Rotate channel pairs (i, i + dim/2) of the first dim channels of heads [n, heads, _] by angles [n, dim/2]."""
    half = cosine.shape[-1]
    first, second, rest = np.split(heads, [half, 2 * half], axis=-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)


def convolution(weights: ModelSource, layer: StateWeights, projected: Float64Array) -> Float64Array:
    """The gated short convolution of LFM2 over its projected inputs (gate in, gate out, value)."""
    gate_in, gate_out, value = np.split(projected, 3, axis=-1)
    return gate_out * _convolved(weights, layer, gate_in * value)


def _convolved(weights: ModelSource, layer: StateWeights, value: Float64Array) -> Float64Array:
    """A causal convolution of each channel over the tokens."""
    taps = weights.read(layer.kernels).astype(np.float64)[:, 0].T
    inputs = np.concatenate([np.zeros((len(taps) - 1, value.shape[-1])), value])
    found = np.stack([(inputs[token : token + len(taps)] * taps).sum(axis=0) for token in range(len(value))])
    return found if layer.bias is None else found + weights.read(layer.bias)


def _steps(weights: ModelSource, layer: StateWeights, step: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The steps of value heads, and the decays of their states, float64 [n, heads] each."""
    step = np.logaddexp(0, step + weights.read(layer.step_bias))
    return step, np.exp(-np.exp(weights.read(layer.log_rates).astype(np.float64)) * step)


def delta_net(
    weights: ModelSource,
    layer: StateWeights,
    config: RecurrentConfig,
    projected: Float64Array,
    gates: Float64Array,
    epsilon: float,
) -> Float64Array:
    """Qwen's linear attention over its projected inputs, token by token, float64 [n, value width].

    The state decays and then has the value for this key corrected (the delta rule). Source: Yang et al. 2024.
    """
    length, key_heads, heads = len(projected), config.key_heads, config.value_heads
    if config.by_key_head:
        by_head, both = (np.reshape(each, (length, key_heads, -1)) for each in (projected, gates))
        *pair, rest = np.split(by_head, [config.key_dim, 2 * config.key_dim], axis=-1)
        parts = [*pair, *np.split(rest, 2, axis=-1), *np.split(both, 2, axis=-1)]
        *qkv, gate, beta, step = (each.reshape(length, -1) for each in parts)
        inputs = np.concatenate(qkv, axis=-1)
    else:
        inputs, gate = np.split(projected, [config.convolved], axis=-1)
        beta, step = np.split(gates, 2, axis=-1)
    mixed = silu(_convolved(weights, layer, inputs))
    by_head = mixed[:, : 2 * config.key_width].reshape(length, 2 * key_heads, -1)
    unit = by_head / np.sqrt((by_head**2).sum(axis=-1, keepdims=True) + 1e-6)
    query, key = np.split(np.repeat(unit, heads // key_heads, axis=1), 2, axis=1)
    value, beta = mixed[:, 2 * config.key_width :].reshape(length, heads, -1), sigmoid(beta)
    _, decay = _steps(weights, layer, step)
    state, read = np.zeros((heads, config.key_dim, config.value_dim)), np.empty_like(value)
    for token in range(length):
        state *= decay[token][:, None, None]
        stored = np.einsum("hkv,hk->hv", state, key[token])
        state += np.einsum("hk,hv->hkv", key[token], beta[token][:, None] * (value[token] - stored))
        read[token] = np.einsum("hkv,hk->hv", state, query[token]) * config.key_dim**-0.5
    scaled = rms_norm(read, epsilon) * weights.read(layer.norm)
    return scaled.reshape(length, -1) * silu(gate)


def mamba2(
    weights: ModelSource, layer: StateWeights, config: RecurrentConfig, projected: Float64Array, epsilon: float
) -> Float64Array:
    """Mamba-2's state space over its projected inputs, token by token, float64 [n, value width].

    Source: Dao and Gu 2024, in Hugging Face transformers as `GraniteMoeHybridMambaLayer.torch_forward`.
    """
    length, heads, groups = len(projected), config.value_heads, config.key_heads
    gate, mixed, step = np.split(projected, np.cumsum([config.value_width, config.convolved]), axis=-1)
    mixed = silu(_convolved(weights, layer, mixed))
    value, key, query = np.split(mixed, np.cumsum([config.value_width, config.key_width]), axis=-1)
    value = value.reshape(length, heads, -1)
    key, query = (np.repeat(each.reshape(length, groups, -1), heads // groups, axis=1) for each in (key, query))
    step, decay = _steps(weights, layer, step)
    state, read = np.zeros((heads, config.key_dim, config.value_dim)), np.empty_like(value)
    for token in range(length):
        state *= decay[token][:, None, None]
        state += np.einsum("hk,hv->hkv", key[token], step[token][:, None] * value[token])
        read[token] = np.einsum("hkv,hk->hv", state, query[token])
    read = read + weights.read(layer.skip)[:, None] * value
    gated = (read.reshape(length, -1) * silu(gate)).reshape(length, groups, -1)
    return rms_norm(gated, epsilon).reshape(length, -1) * weights.read(layer.norm)


def routed(
    weights: ModelSource, layer: Layer, router: FusedLinear, experts: ExpertsConfig, normed: Float64Array
) -> Float64Array:
    """The experts' outputs, weighted by the router, float64 [n, hidden]."""
    probs = softmax(linear(weights, router, normed))
    selected = np.argsort(-probs, axis=-1)[:, : experts.top_k]
    result = np.zeros_like(normed)
    for expert in np.unique(selected).tolist():
        tokens = np.flatnonzero((selected == expert).any(axis=-1))
        weight = probs[tokens, expert]
        if experts.normalized:
            weight = weight / np.take_along_axis(probs[tokens], selected[tokens], axis=-1).sum(axis=-1)
        gate, up = _of_expert(weights, layer.gate_up, expert, normed[tokens])
        if experts.limit is not None:
            gate, up = np.minimum(gate, experts.limit), np.clip(up, -experts.limit, experts.limit)
        opened = gate * sigmoid(experts.alpha * gate) * (up + experts.up_offset)
        result[tokens] += weight[:, None] * _of_expert(weights, layer.down, expert, opened)[0]
    return result


def _of_expert(weights: ModelSource, linear: FusedLinear, expert: int, value: Float64Array) -> list[Float64Array]:
    """The products of one expert: those of its modules, or of alternating rows where the checkpoint stacks experts."""
    rows, parts = linear.shape[0] // linear.experts, len(linear.modules) // linear.experts
    if not linear.stacked:
        names = linear.weights[expert * parts : (expert + 1) * parts]
        return [value @ weights.read_rows(RowRange(name, 0, rows // parts)).astype(np.float64).T for name in names]
    matrix = weights.read_rows(RowRange(linear.weights[0], expert * rows, (expert + 1) * rows))
    product = value @ matrix.astype(np.float64).T
    product = product + weights.read(linear.biases[0])[expert] if linear.biased else product
    return [product] if linear.paired is None else [product[:, ::2], product[:, 1::2]]
