"""The gated delta net of a layer in the graph: linear attention whose tokens replace what the state stores."""

from __future__ import annotations

from typing import Final

import numpy as np

from ..architectures.delta_net import DeltaNetConfig
from ..checkpoint.layer_weights import DeltaNetWeights, Layer
from .linear_attention import Recurrence, append_recurrence, append_silu_convolution
from .nodes import MICROSOFT, Nodes

_NORM_EPSILON: Final = 1e-6
"""What the models add to the sum of squares of a query or key head, whatever config.json says."""


def append_delta_net(nodes: Nodes, index: int, layer: Layer, delta_net: DeltaNetWeights, normed: str) -> str:
    """Append the delta net of layer `index` without its output projection; returns the name of [1, M, values]."""
    config, name = delta_net.config, f"layers.{index}.delta"
    projected = nodes.linear(layer.qkv, normed)
    if config.by_key_head:
        served = config.value_width // config.key_heads
        widths = {"q": config.key_dim, "k": config.key_dim, "v": served, "z": served}
        *parts, gate = _split_by_key_head(nodes, name, config, projected, widths)
        mixed = nodes.add("Concat", parts, f"{name}.qkv", axis=-1)
    else:
        both = nodes.integers("delta.widths", config.convolved, config.value_width)
        mixed, gate = nodes.split(projected, [f"{name}.qkv", f"{name}.z"], both)
    convolved = append_silu_convolution(nodes, index, name, delta_net.convolution, mixed)
    heads = nodes.integers("delta.parts", 2 * config.key_width, config.value_width)
    query_key, value = nodes.split(convolved, [f"{name}.qk", f"{name}.value"], heads)
    query, key = _append_query_and_key(nodes, name, config, query_key)
    decay, beta = _append_gates(nodes, name, layer, delta_net, normed)
    count = config.value_heads
    update = {"key": count * config.key_dim, "value": config.value_width, "decay": count, "beta": count}
    recurrence = Recurrence("gated_delta", count, count, config.key_dim**-0.5, update)
    read = append_recurrence(nodes, index, name, recurrence, query, [key, value, decay, beta])
    return _append_gated_norm(nodes, name, delta_net, read, gate)


def _split_by_key_head(
    nodes: Nodes, name: str, config: DeltaNetConfig, value: str, widths: dict[str, int]
) -> list[str]:
    """Split [1, M, key heads * all widths] into parts [1, M, key heads * width]; `widths` has their names."""
    kind, total = "".join(widths), sum(widths.values())
    apart = nodes.integers(f"delta.{kind}.apart", 0, 0, config.key_heads, total)
    heads = nodes.add("Reshape", [value, apart], f"{name}.{kind}.heads")
    parts = [f"{name}.{part}.heads" for part in widths]
    nodes.split(heads, parts, nodes.integers(f"delta.{kind}.widths", *widths.values()))
    together = nodes.integers("heads.together", 0, 0, -1)
    return [nodes.add("Reshape", [f"{name}.{part}.heads", together], f"{name}.{part}") for part in widths]


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


def _append_gates(nodes: Nodes, name: str, layer: Layer, delta_net: DeltaNetWeights, normed: str) -> tuple[str, str]:
    """Append the decay's logarithm, -exp(A) softplus(a + bias), and beta = sigmoid(b), [1, M, value heads] each."""
    assert layer.gates is not None  # noqa: S101  every delta net has them
    config, heads = delta_net.config, delta_net.config.value_heads
    both = nodes.linear(layer.gates, normed)
    if config.by_key_head:
        served = heads // config.key_heads
        beta, step = _split_by_key_head(nodes, name, config, both, {"b": served, "a": served})
    else:
        beta, step = nodes.split(both, [f"{name}.b", f"{name}.a"], nodes.integers("delta.gates", heads, heads))
    shifted = nodes.add("Add", [step, nodes.weights.vector(f"{name}.dt_bias", [delta_net.step_bias])], f"{name}.step")
    rates = nodes.add("Exp", [nodes.weights.vector(f"{name}.a_log", [delta_net.log_rate])], f"{name}.rates")
    scaled = nodes.add("Mul", [nodes.add("Softplus", [shifted], f"{name}.softplus"), rates], f"{name}.rate")
    decay = nodes.forgetting_other_texts(nodes.add("Neg", [scaled], f"{name}.decay"))
    return decay, nodes.add("Sigmoid", [beta], f"{name}.beta")


def _append_gated_norm(nodes: Nodes, name: str, delta_net: DeltaNetWeights, read: str, gate: str) -> str:
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
