"""Convolutions and recurrences of layers with states that the caller keeps.

`com.microsoft.LinearAttention` computes the recurrence token by token, with the same bits for every width. The
convolution is made of elementary operators, which take half the time of `CausalConvWithState`
(docs/decisions/0076-recurrent-states.md).

A pass returns by what each of its last tokens updates the state. Where only some tokens of a pass are accepted, the
next pass gets their updates beside the state before that pass, and begins with the recurrence over these alone: neither
the linears nor the other layers run again for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...runtime.kv.state_buffers import UPDATED_WIDTH
from ..checkpoint.layer_weights import ConvolutionWeights, Layer
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


@dataclass(frozen=True)
class Recurrence:
    """The attributes of the operator, and what a token updates its state by."""

    rule: str
    """The operator's `update_rule`."""
    query_heads: int
    value_heads: int
    scale: float
    """Factor on what the queries read."""
    update: dict[str, int]
    """Numbers of a token's key, value, decay and so on, by their names in the order of the operator's inputs."""


def append_silu_convolution(nodes: Nodes, index: int, name: str, convolution: ConvolutionWeights, mixed: str) -> str:
    """Append the convolution of `mixed`, [1, M, channels], and SiLU; the inputs at the last tokens are an output."""
    inputs = nodes.add("Concat", [past_conv(index), mixed], f"{name}.inputs", axis=1)
    nodes.add("Slice", [inputs, *_last(nodes, UPDATED_WIDTH + convolution.kernel - 1)], present_conv(index))
    total = append_taps(nodes, name, convolution, inputs, mixed)
    # QuickGelu computes x * sigmoid(alpha * x), which is SiLU in one node.
    return nodes.add("QuickGelu", [total], f"{name}.convolved", domain=MICROSOFT, alpha=1.0)


def append_recurrence(
    nodes: Nodes, index: int, name: str, recurrence: Recurrence, query: str, update: list[str]
) -> str:
    """Append the recurrence over the cached updates and over the new tokens.

    Args:
        nodes: the graph's nodes.
        index: the layer.
        name: prefix of the nodes.
        recurrence: the rule and its shapes.
        query: name of the queries, [1, M, query heads * key channels].
        update: names of keys, values, decays and so on, as `recurrence.update` lists them.

    Returns:
        The name of what the queries read, [1, M, value heads * value channels].
    """
    advanced, present = advanced_recurrent(index), present_recurrent(index)
    updates = nodes.add("Concat", update, f"{name}.updates", axis=-1)
    nodes.add("Slice", [updates, *_last(nodes, UPDATED_WIDTH)], present_updates(index))
    parts, kind = [f"{name}.past.{part}" for part in recurrence.update], name.rsplit(".", 1)[-1]
    before = nodes.split(past_updates(index), parts, nodes.integers(f"{kind}.updates", *recurrence.update.values()))
    # What the cached tokens read is not needed; their keys stand for queries.
    _append_operator(nodes, recurrence, before[0], before, past_recurrent(index), [f"{name}.past.read", advanced])
    return _append_operator(nodes, recurrence, query, update, advanced, [f"{name}.read", present])


def _append_operator(
    nodes: Nodes, recurrence: Recurrence, query: str, update: list[str], state: str, outputs: list[str]
) -> str:
    """Append the operator; returns the name of what the queries read."""
    nodes.add_multi_output(
        "LinearAttention",
        [query, *update[:2], state, *update[2:]],
        outputs,
        outputs[0],
        MICROSOFT,
        q_num_heads=recurrence.query_heads,
        kv_num_heads=recurrence.value_heads,
        update_rule=recurrence.rule,
        scale=recurrence.scale,
    )
    return outputs[0]


def _last(nodes: Nodes, tokens: int) -> list[str]:
    """The further inputs of a Slice that keeps the last tokens, or all where there are no more."""
    bounds = nodes.integers(f"last.{tokens}", -tokens), nodes.integers("last.end", np.iinfo(np.int64).max)
    return [*bounds, nodes.integers("conv.axis", 1)]


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
