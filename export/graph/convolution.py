"""The gated short convolution of a layer in the graph, whose state the caller keeps.

ONNX Runtime's own operator (`CausalConvWithState`) takes channels before tokens, which needs two transpositions, and
returns the state after the last token alone. These elementary operators take the same time for one token and less for
several, give the same bits for every width, and return the inputs of all new tokens, from which the state after each of
them can be taken (docs/decisions/0075-convolution-states.md).
"""

from __future__ import annotations

from ..checkpoint.layer_weights import ConvolutionWeights, Layer
from .inputs_outputs import past_conv, present_conv
from .nodes import Nodes


def append_convolution(nodes: Nodes, index: int, layer: Layer, convolution: ConvolutionWeights, normed: str) -> str:
    """Append C * convolution(B * x) of layer `index`; returns the name of [1, M, channels]."""
    name, width = f"layers.{index}.conv", convolution.channels
    parts = [f"{name}.{part}" for part in ("b", "c", "x")]
    widths = nodes.integers("conv.widths", width, width, width)
    gate_in, gate_out, value = nodes.split(nodes.linear(layer.qkv, normed), parts, widths)
    gated = nodes.add("Mul", [gate_in, value], f"{name}.gated")
    inputs = nodes.add("Concat", [past_conv(index), gated], present_conv(index), axis=1)
    return nodes.add("Mul", [gate_out, append_taps(nodes, name, convolution, inputs, gated)], f"{name}.mixed")


def append_taps(nodes: Nodes, name: str, convolution: ConvolutionWeights, inputs: str, new: str) -> str:
    """Append the convolution of each channel, [1, M, channels].

    Args:
        nodes: the graph's nodes.
        name: prefix of the nodes.
        convolution: the weights.
        inputs: name of the inputs at the tokens before the new ones followed by these, [1, kernel - 1 + M, channels].
        new: name of those at the new tokens, [1, M, channels].
    """
    taps = nodes.weights.taps(f"{name}.tap", convolution.weight, convolution.kernel)
    terms = [
        nodes.add("Mul", [_shifted(nodes, inputs, new, tap, convolution.kernel), weight], f"{name}.term.{tap}")
        for tap, weight in enumerate(taps)
    ]
    total = terms[0]
    for tap, term in enumerate(terms[1:], 1):
        total = nodes.add("Add", [total, term], f"{name}.sum.{tap}")
    if convolution.bias is not None:
        total = nodes.add("Add", [total, nodes.weights.vector(f"{name}.bias", [convolution.bias])], f"{name}.biased")
    return total


def _shifted(nodes: Nodes, inputs: str, gated: str, tap: int, kernel: int) -> str:
    """The input that each new token's kernel multiplies by its weight `tap`, [1, M, channels]."""
    back = kernel - 1 - tap
    if not back:
        return gated
    first, last = nodes.integers(f"conv.first.{tap}", tap), nodes.integers(f"conv.last.{back}", -back)
    shifted = nodes.add("Slice", [inputs, first, last, nodes.integers("conv.axis", 1)], f"{gated}.{tap}")
    return nodes.within_text(shifted, back)
