"""The feed-forward of a layer in the graph: activation(gate) * up, projected down."""

from __future__ import annotations

from .config import Activation
from .layout import Layer
from .nodes import MICROSOFT, Nodes


def append_feed_forward(nodes: Nodes, index: int, layer: Layer, normed: str) -> str:
    """Append layer `index`'s; [1, M, hidden]."""
    name, width = f"layers.{index}", nodes.config.intermediate_size
    both = nodes.linear(layer.gate_up, normed)
    gate, up = nodes.split(both, [f"{name}.gate", f"{name}.up"], nodes.integers("mlp.widths", width, width))
    return nodes.linear(layer.down, nodes.add("Mul", [_activated(nodes, name, gate), up], f"{name}.gated"))


def _activated(nodes: Nodes, name: str, gate: str) -> str:
    match nodes.config.activation:
        case Activation.SILU:
            # QuickGelu is x * sigmoid(alpha * x): SiLU in one node.
            return nodes.add("QuickGelu", [gate], f"{name}.silu", domain=MICROSOFT, alpha=1.0)
        case Activation.GELU_TANH:
            return nodes.add("Gelu", [gate], f"{name}.gelu", approximate="tanh")
