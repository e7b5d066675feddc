"""The feed-forward of a layer in the graph, dense or by experts."""

from __future__ import annotations

from typing import Any, Final

from ..checkpoint.config import SILU, ExpertsConfig
from ..checkpoint.layer_weights import FusedLinear, Layer, SharedExpertWeights
from .nodes import INT8_ACTIVATIONS, MICROSOFT, Nodes

EXPERTS_NODE: Final = "experts"
"""Last part of the name of the operator that runs experts."""
_INTERLEAVED: Final = 1
"""Alternating rows of gate and up, the only order that the CPU operators support."""


def append_feed_forward(nodes: Nodes, index: int, layer: Layer, normed: str) -> str:
    """Append the feed-forward of layer `index`, down(activation(gate) * up); returns the name of [1, M, hidden]."""
    name = f"layers.{index}"
    if layer.router is None or nodes.config.experts is None:
        return append_dense(nodes, name, layer.gate_up, layer.down, normed)
    output = _append_experts(nodes, name, layer, layer.router, nodes.config.experts, normed)
    if layer.shared is None:
        return output
    return nodes.add("Add", [output, append_shared_expert(nodes, index, layer.shared, normed)], f"{name}.all_experts")


def append_shared_expert(nodes: Nodes, index: int, shared: SharedExpertWeights, normed: str) -> str:
    """Append the feed-forward that all tokens of layer `index` run through; returns the name of [1, M, hidden]."""
    name = f"layers.{index}.shared_expert"
    output = append_dense(nodes, name, shared.gate_up, shared.down, normed)
    if shared.gate is None:
        return output
    share = nodes.add("Sigmoid", [nodes.linear(shared.gate, normed)], f"{name}.share")
    return nodes.add("Mul", [output, share], f"{name}.output")


def append_dense(nodes: Nodes, name: str, gate_up: FusedLinear, down: FusedLinear, normed: str) -> str:
    """Append a dense feed-forward; returns the name of [1, M, hidden]."""
    both, width = nodes.linear(gate_up, normed), down.columns
    widths = "mlp.widths" if width == nodes.config.intermediate_size else f"mlp.widths.{width}"
    gate, up = nodes.split(both, [f"{name}.gate", f"{name}.up"], nodes.integers(widths, width, width))
    return nodes.linear(down, nodes.add("Mul", [activated(nodes, name, gate), up], f"{name}.gated"))


def activated(nodes: Nodes, name: str, gate: str) -> str:
    """Append the model's activation function."""
    if nodes.config.activation == SILU:
        return nodes.silu(gate, f"{name}.silu")
    return nodes.add("Gelu", [gate], f"{name}.gelu", approximate="tanh")


def _append_experts(
    nodes: Nodes, name: str, layer: Layer, router: FusedLinear, experts: ExpertsConfig, normed: str
) -> str:
    """Append one operator that runs only the selected experts: QMoE at accuracy level 4, or MoE in float32."""
    scores = nodes.linear(router, normed)
    flat = nodes.add("Reshape", [scores, nodes.integers("router.flat", -1, experts.count)], f"{name}.scores")
    first, second = _stack(nodes, layer.gate_up), _stack(nodes, layer.down)
    weight_format = nodes.plan[layer.gate_up.name]
    attributes: dict[str, Any] = {
        "k": experts.top_k,
        "activation_type": "swiglu",  # gate * sigmoid(alpha * gate) * (up + beta)
        "activation_alpha": experts.alpha,
        "activation_beta": experts.up_offset,
        "swiglu_fusion": _INTERLEAVED,
        "normalize_routing_weights": 1,
        **({} if experts.limit is None else {"swiglu_limit": experts.limit}),
    }
    operator, inputs = "QMoE", [normed, flat, *first, *second]
    if weight_format.bits == 32:
        operator, inputs = "MoE", [normed, flat, first[0], first[2], second[0], second[2]]
    else:
        attributes |= {
            "expert_weight_bits": weight_format.bits,
            "block_size": weight_format.block,
            "accuracy_level": INT8_ACTIVATIONS,
            "weights_prepacked": 0,
        }
    while not inputs[-1]:
        inputs.pop()
    output = nodes.add(operator, inputs, f"{name}.{EXPERTS_NODE}", domain=MICROSOFT, **attributes)
    return output if experts.normalized else _weighted_by_shares(nodes, name, experts, scores, output)


def _stack(nodes: Nodes, linear: FusedLinear) -> tuple[str, str, str]:
    """Add the experts of a linear; returns the names of weights or codes, scales and biases, "" for absent ones."""
    codes, scales = nodes.weights.experts(linear, nodes.plan[linear.name])
    return codes, scales, nodes.weights.vector(f"{linear.name}.bias", linear.biases) if linear.biased else ""


def _weighted_by_shares(nodes: Nodes, name: str, experts: ExpertsConfig, scores: str, output: str) -> str:
    """Multiply the output of the selected experts by their total probability among all experts.

    The operators have an option for it (`normalize_routing_weights=0`), which does not work on CPU: QMoE normalizes
    nevertheless, and MoE clears its output before it reads the input, which may share its memory.
    """
    shares = nodes.add("Softmax", [scores], f"{name}.shares", axis=-1)
    chosen = [f"{name}.chosen", f"{name}.which"]
    nodes.add_multi_output("TopK", [shares, nodes.integers("router.chosen", experts.top_k)], chosen, chosen[0])
    total = nodes.add("ReduceSum", [chosen[0], nodes.integers("router.axis", -1)], f"{name}.total", keepdims=1)
    return nodes.add("Mul", [output, total], f"{name}.shared")
