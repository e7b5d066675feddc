"""Convolutions and recurrences of layers with states that the caller keeps.

`com.microsoft.LinearAttention` computes the recurrence token by token, with the same bits for every width. The
convolution is made of elementary operators, which take half the time of `CausalConvWithState`
(docs/decisions/0076-recurrent-states.md).

A pass returns by what each of its last tokens updates the state. Where only some tokens of a pass are accepted, the
next pass gets their updates beside the state before that pass, and begins with the recurrence over these alone: neither
the linears nor the other layers run again for them.

In Mamba-2, B is the key, dt x the value and C the query of the operator, by its rule "gated". Heads of a group share B
and C, so the operator has as many key and query heads as there are groups.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...runtime.kv.state_buffers import UPDATED_WIDTH
from ..architectures.state_layers import RecurrentConfig
from ..checkpoint.layer_weights import Layer, StateWeights
from .inputs_outputs import advanced_recurrent, past_conv, past_recurrent, past_updates, present_of
from .nodes import MICROSOFT, Nodes

_NORM_EPSILON: Final = 1e-6
"""What the models add to the sum of squares of a query or key head, whatever config.json says."""


def append_states(nodes: Nodes, index: int, layer: Layer, states: StateWeights, normed: str) -> str:
    """Append what layer `index` has in place of attention, without its output projection; returns the result's name."""
    match states.config:
        case RecurrentConfig(delta_rule=True) as config:
            return append_delta_net(nodes, index, layer, states, config, normed)
        case RecurrentConfig() as config:
            return append_mamba(nodes, index, layer, states, config, normed)
    return append_convolution(nodes, index, layer, states, normed)


def append_silu_convolution(nodes: Nodes, index: int, name: str, states: StateWeights, mixed: str) -> str:
    """Append the convolution of `mixed`, [1, M, channels], and SiLU; the inputs at the last tokens are an output."""
    inputs = nodes.add("Concat", [past_conv(index), mixed], f"{name}.inputs", axis=1)
    nodes.add("Slice", [inputs, *_last(nodes, UPDATED_WIDTH + states.config.kernel - 1)], present_of(past_conv(index)))
    return nodes.silu(append_taps(nodes, name, states, inputs, mixed), f"{name}.convolved")


def append_recurrence(
    nodes: Nodes, index: int, name: str, query: str, update: dict[str, tuple[str, int]], **attributes: Any
) -> str:
    """Append the recurrence over the cached updates and over the new tokens.

    Args:
        nodes: the graph's nodes.
        index: the layer.
        name: prefix of the nodes.
        query: name of the queries, [1, M, query heads * key channels].
        update: name and numbers of a token's key, value, decay and so on, in the order of the operator's inputs.
        attributes: those of the operator.

    Returns:
        The name of what the queries read, [1, M, value heads * value channels].
    """
    advanced, present = advanced_recurrent(index), present_of(past_recurrent(index))
    new, kind = [value for value, _ in update.values()], name.rsplit(".", 1)[-1]
    updates = nodes.add("Concat", new, f"{name}.updates", axis=-1)
    nodes.add("Slice", [updates, *_last(nodes, UPDATED_WIDTH)], present_of(past_updates(index)))
    widths = nodes.integers(f"{kind}.updates", *(width for _, width in update.values()))
    before = nodes.split(past_updates(index), [f"{name}.past.{part}" for part in update], widths)
    # What the cached tokens read is not needed; their keys stand for queries.
    for queries, values, state, outputs in (
        (before[0], before, past_recurrent(index), [f"{name}.past.read", advanced]),
        (query, new, advanced, [f"{name}.read", present]),
    ):
        inputs = [queries, *values[:2], state, *values[2:]]
        nodes.add_multi_output("LinearAttention", inputs, outputs, outputs[0], MICROSOFT, **attributes)
    return f"{name}.read"


def _last(nodes: Nodes, tokens: int) -> list[str]:
    """The further inputs of a Slice that keeps the last tokens, or all where there are no more."""
    bounds = nodes.integers(f"last.{tokens}", -tokens), nodes.integers("last.end", np.iinfo(np.int64).max)
    return [*bounds, nodes.integers("conv.axis", 1)]


def append_convolution(nodes: Nodes, index: int, layer: Layer, states: StateWeights, normed: str) -> str:
    """Append C * convolution(B * x) of layer `index`; returns the name of [1, M, channels]."""
    name, width = f"layers.{index}.conv", states.channels
    parts = [f"{name}.{part}" for part in ("b", "c", "x")]
    widths = nodes.integers("conv.widths", width, width, width)
    gate_in, gate_out, value = nodes.split(nodes.linear(layer.qkv, normed), parts, widths)
    gated = nodes.add("Mul", [gate_in, value], f"{name}.gated")
    inputs = nodes.add("Concat", [past_conv(index), gated], present_of(past_conv(index)), axis=1)
    return nodes.add("Mul", [gate_out, append_taps(nodes, name, states, inputs, gated)], f"{name}.mixed")


def append_taps(nodes: Nodes, name: str, states: StateWeights, inputs: str, new: str) -> str:
    """Append the convolution of each channel, [1, M, channels].

    Args:
        nodes: the graph's nodes.
        name: prefix of the nodes.
        states: the weights.
        inputs: name of the inputs at the tokens before the new ones followed by these, [1, kernel - 1 + M, channels].
        new: name of those at the new tokens, [1, M, channels].
    """
    kernel = states.config.kernel
    taps = nodes.weights.taps(f"{name}.tap", states.kernels, kernel)
    terms = [
        nodes.add("Mul", [_shifted(nodes, inputs, new, tap, kernel), weight], f"{name}.term.{tap}")
        for tap, weight in enumerate(taps)
    ]
    total = terms[0]
    for tap, term in enumerate(terms[1:], 1):
        total = nodes.add("Add", [total, term], f"{name}.sum.{tap}")
    if states.bias is not None:
        total = nodes.add("Add", [total, nodes.weights.vector(f"{name}.bias", [states.bias])], f"{name}.biased")
    return total


def _shifted(nodes: Nodes, inputs: str, gated: str, tap: int, kernel: int) -> str:
    """The input that each new token's kernel multiplies by its weight `tap`, [1, M, channels]."""
    back = kernel - 1 - tap
    if not back:
        return gated
    first, last = nodes.integers(f"conv.first.{tap}", tap), nodes.integers(f"conv.last.{back}", -back)
    shifted = nodes.add("Slice", [inputs, first, last, nodes.integers("conv.axis", 1)], f"{gated}.{tap}")
    return nodes.within_text(shifted, back)


def append_delta_net(
    nodes: Nodes, index: int, layer: Layer, states: StateWeights, config: RecurrentConfig, normed: str
) -> str:
    """Append the delta net of layer `index` without its output projection; returns the name of [1, M, values]."""
    name, projected = f"layers.{index}.delta", nodes.linear(layer.qkv, normed)
    if config.by_key_head:
        served = config.value_width // config.key_heads
        widths = {"q": config.key_dim, "k": config.key_dim, "v": served, "z": served}
        *parts, gate = _split_by_key_head(nodes, name, config, projected, widths)
        mixed = nodes.add("Concat", parts, f"{name}.qkv", axis=-1)
    else:
        both = nodes.integers("delta.widths", config.convolved, config.value_width)
        mixed, gate = nodes.split(projected, [f"{name}.qkv", f"{name}.z"], both)
    convolved = append_silu_convolution(nodes, index, name, states, mixed)
    heads = nodes.integers("delta.parts", 2 * config.key_width, config.value_width)
    query_key, value = nodes.split(convolved, [f"{name}.qk", f"{name}.value"], heads)
    query, key = _append_query_and_key(nodes, name, config, query_key)
    decay, beta = _append_gates(nodes, name, layer, states, config, normed)
    count = config.value_heads
    update = {"key": (key, count * config.key_dim), "value": (value, config.value_width)}
    update |= {"decay": (decay, count), "beta": (beta, count)}
    heads_and_scale = {"q_num_heads": count, "kv_num_heads": count, "scale": config.key_dim**-0.5}
    read = append_recurrence(nodes, index, name, query, update, update_rule="gated_delta", **heads_and_scale)
    # The RMS norm of every head, times SiLU of the gate.
    apart = nodes.integers("delta.values", 0, 0, config.value_heads, config.value_dim)
    read_heads, factors = nodes.add("Reshape", [read, apart], f"{name}.heads"), f"{name}.norm"
    read_normed = nodes.norm_by(read_heads, nodes.weights.vector(factors, [states.norm]), f"{name}.normed")
    together = nodes.together(read_normed, f"{name}.together")
    return nodes.add("Mul", [together, nodes.silu(gate, f"{name}.silu")], f"{name}.gated")


def _split_by_key_head(
    nodes: Nodes, name: str, config: RecurrentConfig, value: str, widths: dict[str, int]
) -> list[str]:
    """Split [1, M, key heads * all widths] into parts [1, M, key heads * width]; `widths` has their names."""
    kind, total = "".join(widths), sum(widths.values())
    apart = nodes.integers(f"delta.{kind}.apart", 0, 0, config.key_heads, total)
    heads = nodes.add("Reshape", [value, apart], f"{name}.{kind}.heads")
    parts = [f"{name}.{part}.heads" for part in widths]
    nodes.split(heads, parts, nodes.integers(f"delta.{kind}.widths", *widths.values()))
    return [nodes.together(f"{name}.{part}.heads", f"{name}.{part}") for part in widths]


def _append_query_and_key(nodes: Nodes, name: str, config: RecurrentConfig, query_key: str) -> tuple[str, str]:
    """Append queries and keys of length 1, repeated for every value head, [1, M, value heads * key channels] each."""
    apart = nodes.integers("delta.apart", 0, 0, 2 * config.key_heads, config.key_dim)
    heads = nodes.add("Reshape", [query_key, apart], f"{name}.qk.heads")
    # An RMS norm divides by the root of the mean of squares, which is that of their sum / sqrt(channels).
    length = nodes.constant("delta.length", np.full(config.key_dim, config.key_dim**-0.5, np.float32))
    normed = nodes.norm_by(heads, length, f"{name}.qk.normed", _NORM_EPSILON / config.key_dim)
    if config.value_heads != config.key_heads:
        repeated = np.repeat(np.arange(config.key_heads), config.value_heads // config.key_heads)
        order = nodes.integers("delta.repeated", *repeated.tolist(), *(repeated + config.key_heads).tolist())
        normed = nodes.add("Gather", [normed, order], f"{name}.qk.repeated", axis=2)
    together = nodes.together(normed, f"{name}.qk.together")
    width = config.value_heads * config.key_dim
    query, key = nodes.split(together, [f"{name}.query", f"{name}.key"], nodes.integers("delta.qk", width, width))
    return query, key


def _append_gates(
    nodes: Nodes, name: str, layer: Layer, states: StateWeights, config: RecurrentConfig, normed: str
) -> tuple[str, str]:
    """Append the decay's logarithm, -exp(A) softplus(a + bias), and beta = sigmoid(b), [1, M, value heads] each."""
    assert layer.gates is not None  # noqa: S101  every delta net has them
    heads, both = config.value_heads, nodes.linear(layer.gates, normed)
    if config.by_key_head:
        served = heads // config.key_heads
        beta, step = _split_by_key_head(nodes, name, config, both, {"b": served, "a": served})
    else:
        beta, step = nodes.split(both, [f"{name}.b", f"{name}.a"], nodes.integers("delta.gates", heads, heads))
    _, decay = _append_decay(nodes, name, states, step)
    return decay, nodes.add("Sigmoid", [beta], f"{name}.beta")


def _append_decay(nodes: Nodes, name: str, states: StateWeights, raw_step: str) -> tuple[str, str]:
    """Append the step, softplus(raw + bias), and the decay's logarithm, -exp(A) step, [1, M, value heads] each."""
    bias = nodes.weights.vector(f"{name}.dt_bias", [states.step_bias])
    step = nodes.add("Softplus", [nodes.add("Add", [raw_step, bias], f"{name}.shifted")], f"{name}.step")
    rates = nodes.add("Exp", [nodes.weights.vector(f"{name}.a_log", [states.log_rates])], f"{name}.rates")
    scaled = nodes.add("Mul", [step, rates], f"{name}.rate")
    return step, nodes.forgetting_other_texts(nodes.add("Neg", [scaled], f"{name}.decay"))


def append_mamba(
    nodes: Nodes, index: int, layer: Layer, states: StateWeights, config: RecurrentConfig, normed: str
) -> str:
    """Append the state space of layer `index` without its output projection; returns the name of [1, M, channels]."""
    name = f"layers.{index}.mamba"
    widths = nodes.integers("mamba.widths", config.value_width, config.convolved, config.value_heads)
    parts = [f"{name}.gate", f"{name}.xbc", f"{name}.dt"]
    gate, mixed, raw_step = nodes.split(nodes.linear(layer.qkv, normed), parts, widths)
    convolved = append_silu_convolution(nodes, index, name, states, mixed)
    parts = [f"{name}.{part}" for part in ("x", "b", "c")]
    widths = nodes.integers("mamba.parts", config.value_width, config.key_width, config.key_width)
    channels, key, query = nodes.split(convolved, parts, widths)
    step, decay = _append_decay(nodes, name, states, raw_step)
    apart = nodes.integers("mamba.apart", 0, 0, config.value_heads, config.value_dim)
    heads = nodes.add("Reshape", [channels, apart], f"{name}.heads")
    steps = nodes.add("Unsqueeze", [step, nodes.integers("mamba.last", -1)], f"{name}.steps")
    value = nodes.together(nodes.add("Mul", [heads, steps], f"{name}.values"), f"{name}.value")
    update = {"key": (key, config.key_width), "value": (value, config.value_width)}
    update["decay"] = (decay, config.value_heads)
    heads_and_scale = {"q_num_heads": config.key_heads, "kv_num_heads": config.value_heads, "scale": 1.0}
    read = append_recurrence(nodes, index, name, query, update, update_rule="gated", **heads_and_scale)
    skip = nodes.weights.vector(f"{name}.d", [states.skip])
    factors = nodes.add("Unsqueeze", [skip, nodes.integers("mamba.last", -1)], f"{name}.ds")
    skipped = nodes.together(nodes.add("Mul", [heads, factors], f"{name}.skips"), f"{name}.skip")
    output = nodes.add("Add", [read, skipped], f"{name}.y")
    # The RMS norm, of every group by itself, of the output times SiLU of the gate.
    gated = nodes.add("Mul", [output, nodes.silu(gate, f"{name}.silu")], f"{name}.gated")
    count, factors = config.key_heads, nodes.weights.vector(f"{name}.norm", [states.norm])
    if count == 1:
        return nodes.norm_by(gated, factors, f"{name}.normed")
    width = config.value_width // count
    groups = nodes.add("Reshape", [gated, nodes.integers("mamba.groups", 0, 0, count, width)], f"{name}.groups")
    normed = nodes.together(nodes.unweighted_norm(groups, width, f"{name}.normed"), f"{name}.together")
    return nodes.add("Mul", [normed, factors], f"{name}.scaled")
