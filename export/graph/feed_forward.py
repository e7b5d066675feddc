"""The feed-forward of a layer in the graph: activation(gate) * up, projected down, for all tokens or by experts."""

from __future__ import annotations

from typing import Any, Final

from ..checkpoint.config import Activation, ExpertsConfig
from ..checkpoint.layout import FusedLinear, Layer
from .nodes import INT8_ACTIVATIONS, MICROSOFT, Nodes

_INTERLEAVED: Final = 1
"""The one order of an expert's gate and up rows that the operators have on CPU: in turns."""


def append_feed_forward(nodes: Nodes, index: int, layer: Layer, normed: str) -> str:
    """Append layer `index`'s; [1, M, hidden]."""
    if layer.router is not None and nodes.config.experts is not None:
        return _append_experts(nodes, f"layers.{index}", layer, layer.router, nodes.config.experts, normed)
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


def _append_experts(
    nodes: Nodes, name: str, layer: Layer, router: FusedLinear, experts: ExpertsConfig, normed: str
) -> str:
    """One operator that runs each token's experts only: QMoE at accuracy level 4, or MoE in float32."""
    scores = nodes.linear(router, normed)
    flat = nodes.add("Reshape", [scores, nodes.integers("router.flat", -1, experts.count)], f"{name}.scores")
    first, second = _stack(nodes, layer.gate_up), _stack(nodes, layer.down)
    weight_format = nodes.plan[layer.gate_up.name]
    attributes: dict[str, Any] = {
        "k": experts.chosen,
        "activation_type": "swiglu",  # gate * sigmoid(alpha * gate) * (up + beta)
        "activation_alpha": experts.steepness,
        "activation_beta": experts.up_offset,
        "swiglu_fusion": _INTERLEAVED,
        "normalize_routing_weights": 1,
        **({} if experts.bound is None else {"swiglu_limit": experts.bound}),
    }
    if weight_format.bits == 32:
        inputs = _trimmed([normed, flat, first[0], first[2], second[0], second[2]])
        output = nodes.add("MoE", inputs, f"{name}.experts", domain=MICROSOFT, **attributes)
    else:
        output = nodes.add(
            "QMoE",
            _trimmed([normed, flat, *first, *second]),
            f"{name}.experts",
            domain=MICROSOFT,
            **attributes,
            expert_weight_bits=weight_format.bits,
            block_size=weight_format.block,
            accuracy_level=INT8_ACTIVATIONS,
            weights_prepacked=0,
        )
    return output if experts.normalized else _in_shares(nodes, name, experts, scores, output)


def _stack(nodes: Nodes, linear: FusedLinear) -> tuple[str, str, str]:
    """A unit's experts: weights or codes, scales or nothing, biases or nothing."""
    codes, scales = nodes.weights.experts(linear, nodes.plan[linear.name])
    return codes, scales, nodes.weights.vector(f"{linear.name}.bias", linear.biases) if linear.biased else ""


def _trimmed(inputs: list[str]) -> list[str]:
    """Without what is absent at the end."""
    return inputs if inputs[-1] else _trimmed(inputs[:-1])


def _in_shares(nodes: Nodes, name: str, experts: ExpertsConfig, scores: str, output: str) -> str:
    """What the chosen experts make, by their shares among all experts.

    The operators offer that themselves (`normalize_routing_weights=0`). On CPU, QMoE then takes shares among the chosen
    ones all the same, and MoE clears its output before it reads the input, which may be the same memory.
    """
    shares = nodes.add("Softmax", [scores], f"{name}.shares", axis=-1)
    chosen = [f"{name}.chosen", f"{name}.which"]
    nodes.add_of_many("TopK", [shares, nodes.integers("router.chosen", experts.chosen)], chosen, chosen[0])
    total = nodes.add("ReduceSum", [chosen[0], nodes.integers("router.axis", -1)], f"{name}.total", keepdims=1)
    return nodes.add("Mul", [output, total], f"{name}.shared")
