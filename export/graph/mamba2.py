"""The Mamba-2 state space of a layer in the graph: linear attention with one decay a head.

B is the key, dt x the value and C the query of `linear_attention`, by the operator's rule "gated". Heads of a group
share B and C, so the operator has as many key and query heads as there are groups.
"""

from __future__ import annotations

from ..architectures.mamba2 import Mamba2Config
from ..checkpoint.layer_weights import Layer, Mamba2Weights
from .linear_attention import Recurrence, append_recurrence, append_silu_convolution
from .nodes import MICROSOFT, Nodes


def append_mamba(nodes: Nodes, index: int, layer: Layer, mamba: Mamba2Weights, normed: str) -> str:
    """Append the state space of layer `index` without its output projection; returns the name of [1, M, channels]."""
    config, name = mamba.config, f"layers.{index}.mamba"
    widths = nodes.integers("mamba.widths", config.value_width, config.convolved, config.value_heads)
    parts = [f"{name}.gate", f"{name}.xbc", f"{name}.dt"]
    gate, mixed, raw_step = nodes.split(nodes.linear(layer.qkv, normed), parts, widths)
    convolved = append_silu_convolution(nodes, index, name, mamba.convolution, mixed)
    parts = [f"{name}.{part}" for part in ("x", "b", "c")]
    widths = nodes.integers("mamba.parts", config.value_width, config.key_width, config.key_width)
    channels, key, query = nodes.split(convolved, parts, widths)
    step, decay = _append_step(nodes, name, mamba, raw_step)
    apart = nodes.integers("mamba.apart", 0, 0, config.value_heads, config.value_dim)
    heads = nodes.add("Reshape", [channels, apart], f"{name}.heads")
    steps = nodes.add("Unsqueeze", [step, nodes.integers("mamba.last", -1)], f"{name}.steps")
    value = _together(nodes, nodes.add("Mul", [heads, steps], f"{name}.values"), f"{name}.value")
    update = {"key": config.key_width, "value": config.value_width, "decay": config.value_heads}
    recurrence = Recurrence("gated", config.groups, config.value_heads, 1.0, update)
    read = append_recurrence(nodes, index, name, recurrence, query, [key, value, decay])
    factors = nodes.add(
        "Unsqueeze", [nodes.weights.vector(f"{name}.d", [mamba.skip]), nodes.integers("mamba.last", -1)], f"{name}.ds"
    )
    skipped = _together(nodes, nodes.add("Mul", [heads, factors], f"{name}.skips"), f"{name}.skip")
    return _append_gated_norm(nodes, name, mamba, nodes.add("Add", [read, skipped], f"{name}.y"), gate)


def _append_step(nodes: Nodes, name: str, mamba: Mamba2Weights, raw: str) -> tuple[str, str]:
    """Append dt = softplus(raw + bias) and the decay's logarithm, -exp(A) dt, [1, M, heads] each."""
    shifted = nodes.add("Add", [raw, nodes.weights.vector(f"{name}.dt_bias", [mamba.step_bias])], f"{name}.shifted")
    step = nodes.add("Softplus", [shifted], f"{name}.step")
    rates = nodes.add("Exp", [nodes.weights.vector(f"{name}.a_log", [mamba.log_rate])], f"{name}.rates")
    scaled = nodes.add("Mul", [step, rates], f"{name}.rate")
    return step, nodes.forgetting_other_texts(nodes.add("Neg", [scaled], f"{name}.decay"))


def _append_gated_norm(nodes: Nodes, name: str, mamba: Mamba2Weights, read: str, gate: str) -> str:
    """Append the RMS norm, of every group by itself, of the output times SiLU of the gate."""
    activated = nodes.add("QuickGelu", [gate], f"{name}.silu", domain=MICROSOFT, alpha=1.0)
    gated = nodes.add("Mul", [read, activated], f"{name}.gated")
    config, factors = mamba.config, nodes.weights.vector(f"{name}.norm", [mamba.norm])
    if config.groups == 1:
        return nodes.norm_by(gated, factors, f"{name}.normed")
    normed = _append_group_norms(nodes, name, config, gated)
    return nodes.add("Mul", [normed, factors], f"{name}.scaled")


def _append_group_norms(nodes: Nodes, name: str, config: Mamba2Config, gated: str) -> str:
    width = config.value_width // config.groups
    apart = nodes.integers("mamba.groups", 0, 0, config.groups, width)
    groups = nodes.add("Reshape", [gated, apart], f"{name}.groups")
    return _together(nodes, nodes.unweighted_norm(groups, width, f"{name}.normed"), f"{name}.together")


def _together(nodes: Nodes, heads: str, output: str) -> str:
    """Append the reshaping of [1, M, heads, channels] to [1, M, heads * channels]."""
    return nodes.add("Reshape", [heads, nodes.integers("heads.together", 0, 0, -1)], output)
