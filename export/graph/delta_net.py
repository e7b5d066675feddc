"""The gated delta net of a layer in the graph, whose states the caller keeps.

`com.microsoft.LinearAttention` computes the recurrence token by token, with the same bits for every width. The
convolution is made of elementary operators, which take half the time of `CausalConvWithState`
(docs/decisions/0076-recurrent-states.md).

A pass returns by what each of its last tokens updates the state. Where only some tokens of a pass are accepted, the
next pass gets their updates beside the state before that pass, and begins with the recurrence over these alone: neither
the linears nor the other layers run again for them.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ...runtime.kv.state_buffers import UPDATED_WIDTH
from ..architectures.delta_net import DeltaNetConfig
from ..checkpoint.layout import DeltaNet, Layer
from .convolution import append_taps
from .inputs_outputs import (
    advanced_recurrent,
    past_conv,
    past_recurrent,
    past_updates,
    present_conv,
    present_recurrent,
    present_updates,
)
from .nodes import MICROSOFT, Nodes

_NORM_EPSILON: Final = 1e-6
"""What the models add to the sum of squares of a query or key head, whatever config.json says."""


def append_delta_net(nodes: Nodes, index: int, layer: Layer, delta_net: DeltaNet, normed: str) -> str:
    """Append the delta net of layer `index` without its output projection; returns the name of [1, M, values]."""
    config, name = delta_net.config, f"layers.{index}.delta"
    advanced, present = advanced_recurrent(index), present_recurrent(index)
    widths = nodes.integers("delta.widths", config.convolved, config.value_width)
    mixed, gate = nodes.split(nodes.linear(layer.qkv, normed), [f"{name}.qkv", f"{name}.z"], widths)
    convolved = _append_convolution(nodes, index, delta_net, mixed)
    heads = nodes.integers("delta.parts", 2 * config.key_width, config.value_width)
    query_key, value = nodes.split(convolved, [f"{name}.qk", f"{name}.value"], heads)
    query, key = _append_query_and_key(nodes, name, config, query_key)
    decay, beta = _append_gates(nodes, name, layer, delta_net, normed)
    updates = nodes.add("Concat", [key, value, decay, beta], f"{name}.updates", axis=-1)
    nodes.add("Slice", [updates, *_last(nodes, UPDATED_WIDTH)], present_updates(index))
    parts = [f"{name}.past.{part}" for part in ("key", "value", "decay", "beta")]
    count = config.value_heads
    sizes = nodes.integers("delta.updates", count * config.key_dim, count * config.value_dim, count, count)
    before = nodes.split(past_updates(index), parts, sizes)
    # What the cached tokens read is not needed; their keys stand for queries.
    _append_recurrence(nodes, config, [before[0], *before], past_recurrent(index), f"{name}.past.read", advanced)
    read = _append_recurrence(nodes, config, [query, key, value, decay, beta], advanced, f"{name}.read", present)
    return _append_gated_norm(nodes, name, delta_net, read, gate)


def _append_recurrence(
    nodes: Nodes, config: DeltaNetConfig, inputs: list[str], state: str, read: str, new_state: str
) -> str:
    """Append the recurrence over queries, keys, values, decays and betas; returns the name of what the queries read."""
    query, key, value, decay, beta = inputs
    nodes.add_multi_output(
        "LinearAttention",
        [query, key, value, state, decay, beta],
        [read, new_state],
        read,
        MICROSOFT,
        q_num_heads=config.value_heads,
        kv_num_heads=config.value_heads,
        update_rule="gated_delta",
        scale=config.key_dim**-0.5,
    )
    return read


def _last(nodes: Nodes, tokens: int) -> list[str]:
    """The further inputs of a Slice that keeps the last tokens, or all where there are no more."""
    bounds = nodes.integers(f"last.{tokens}", -tokens), nodes.integers("last.end", np.iinfo(np.int64).max)
    return [*bounds, nodes.integers("conv.axis", 1)]


def _append_convolution(nodes: Nodes, index: int, delta_net: DeltaNet, mixed: str) -> str:
    """Append the convolution of queries, keys and values; the inputs at the last tokens are an output."""
    name, kernel = f"layers.{index}.delta", delta_net.config.kernel
    inputs = nodes.add("Concat", [past_conv(index), mixed], f"{name}.inputs", axis=1)
    nodes.add("Slice", [inputs, *_last(nodes, UPDATED_WIDTH + kernel - 1)], present_conv(index))
    total = append_taps(nodes, name, delta_net.convolution, inputs, mixed)
    # QuickGelu computes x * sigmoid(alpha * x), which is SiLU in one node.
    return nodes.add("QuickGelu", [total], f"{name}.convolved", domain=MICROSOFT, alpha=1.0)


def _append_query_and_key(nodes: Nodes, name: str, config: DeltaNetConfig, query_key: str) -> tuple[str, str]:
    """Append queries and keys of length 1, repeated for every value head, [1, M, value heads * key channels] each."""
    apart = nodes.integers("delta.apart", 0, 0, 2 * config.key_heads, config.key_dim)
    heads = nodes.add("Reshape", [query_key, apart], f"{name}.qk.heads")
    # An RMS norm divides by the root of the mean of squares, which is that of their sum / sqrt(channels).
    length = nodes.vector_constant("delta.length", np.full(config.key_dim, config.key_dim**-0.5, np.float32))
    normed = nodes.add(
        "SimplifiedLayerNormalization",
        [heads, length],
        f"{name}.qk.normed",
        axis=-1,
        epsilon=_NORM_EPSILON / config.key_dim,
        stash_type=1,
    )
    if config.value_heads != config.key_heads:
        repeated = np.repeat(np.arange(config.key_heads), config.value_heads // config.key_heads)
        order = nodes.integers("delta.repeated", *repeated.tolist(), *(repeated + config.key_heads).tolist())
        normed = nodes.add("Gather", [normed, order], f"{name}.qk.repeated", axis=2)
    together = nodes.add("Reshape", [normed, nodes.integers("heads.together", 0, 0, -1)], f"{name}.qk.together")
    width = config.value_heads * config.key_dim
    query, key = nodes.split(together, [f"{name}.query", f"{name}.key"], nodes.integers("delta.qk", width, width))
    return query, key


def _append_gates(nodes: Nodes, name: str, layer: Layer, delta_net: DeltaNet, normed: str) -> tuple[str, str]:
    """Append the decay's logarithm, -exp(A) softplus(a + bias), and beta = sigmoid(b), [1, M, value heads] each."""
    assert layer.gates is not None  # noqa: S101  every delta net has them
    heads = delta_net.config.value_heads
    beta, step = nodes.split(
        nodes.linear(layer.gates, normed), [f"{name}.b", f"{name}.a"], nodes.integers("delta.gates", heads, heads)
    )
    shifted = nodes.add("Add", [step, nodes.weights.vector(f"{name}.dt_bias", [delta_net.step_bias])], f"{name}.step")
    rates = nodes.add("Exp", [nodes.weights.vector(f"{name}.a_log", [delta_net.log_rate])], f"{name}.rates")
    scaled = nodes.add("Mul", [nodes.add("Softplus", [shifted], f"{name}.softplus"), rates], f"{name}.rate")
    decay = nodes.forgetting_other_texts(nodes.add("Neg", [scaled], f"{name}.decay"))
    return decay, nodes.add("Sigmoid", [beta], f"{name}.beta")


def _append_gated_norm(nodes: Nodes, name: str, delta_net: DeltaNet, read: str, gate: str) -> str:
    """Append the RMS norm of every head, times SiLU of the gate."""
    config = delta_net.config
    apart = nodes.integers("delta.values", 0, 0, config.value_heads, config.value_dim)
    normed = nodes.add(
        "SimplifiedLayerNormalization",
        [nodes.add("Reshape", [read, apart], f"{name}.heads"), nodes.weights.vector(f"{name}.norm", [delta_net.norm])],
        f"{name}.normed",
        axis=-1,
        epsilon=nodes.config.norm_epsilon,
        stash_type=1,
    )
    together = nodes.add("Reshape", [normed, nodes.integers("heads.together", 0, 0, -1)], f"{name}.together")
    activated = nodes.add("QuickGelu", [gate], f"{name}.silu", domain=MICROSOFT, alpha=1.0)
    return nodes.add("Mul", [together, activated], f"{name}.gated")
