"""Names, types and shapes of the exported graph's inputs and outputs (docs/graph-contract.md).

A pass has M new tokens and T - M cached ones; R of the M positions get logits. The caller owns the KV cache: `past` and
`present` of a layer are bound to one buffer, in which the graph writes slots T - M to T - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from onnx import TensorProto, ValueInfoProto, helper

from ..checkpoint.config import DecoderConfig

LOGITS: Final = "logits"
HIDDEN_STATES: Final = "hidden_states"
PAST_CONV: Final = "past_conv."


def past_key(layer: int) -> str:
    """Name of the input with the cached, rotated keys of a layer."""
    return f"past_key_values.{layer}.key"


def past_value(layer: int) -> str:
    """Name of the input with the cached values of a layer."""
    return f"past_key_values.{layer}.value"


def present_key(layer: int) -> str:
    """Name of the output with cached and new keys of a layer."""
    return f"present.{layer}.key"


def present_value(layer: int) -> str:
    """Name of the output with cached and new values of a layer."""
    return f"present.{layer}.value"


def past_conv(layer: int) -> str:
    """Name of the input with the inputs of a layer's convolution at the last cached tokens."""
    return f"{PAST_CONV}{layer}"


def present_conv(layer: int) -> str:
    """Name of the output with those, followed by the inputs at the new tokens."""
    return present_of(past_conv(layer))


def present_of(past: str) -> str:
    """Name of the output that belongs to an input with convolution states."""
    return f"present_conv.{past.removeprefix(PAST_CONV)}"


def graph_inputs(config: DecoderConfig) -> list[ValueInfoProto]:
    """All inputs of the graph."""
    buffers = [
        helper.make_tensor_value_info(name(layer), TensorProto.FLOAT, _buffer_shape(config, layer))
        for layer in config.attention_layers
        for name in (past_key, past_value)
    ]
    return [*pass_inputs(), *buffers, *_convolution_states(config, past_conv)]


def pass_inputs() -> list[ValueInfoProto]:
    """The inputs that are new in every pass, that is, all but the KV cache."""
    declare, float32, int32, int64 = (
        helper.make_tensor_value_info,
        TensorProto.FLOAT,
        TensorProto.INT32,
        TensorProto.INT64,
    )
    return [
        declare("input_ids", int64, [1, "M"]),
        declare("position_ids", int64, [1, "M"]),
        declare("attention_bias", float32, [1, 1, "M", "T"]),
        declare("seqlens_k", int32, [1]),
        declare("total_sequence_length", int32, []),
        declare("logit_rows", int64, ["R"]),
    ]


def graph_outputs(config: DecoderConfig, hidden_states: bool) -> list[ValueInfoProto]:
    """All outputs of the graph, the states before the LM head among them if `hidden_states`."""
    logits = helper.make_tensor_value_info(LOGITS, TensorProto.FLOAT, ["R", config.vocab_size])
    buffers = [
        helper.make_tensor_value_info(name(layer), TensorProto.FLOAT, _buffer_shape(config, layer))
        for layer in config.attention_layers
        for name in (present_key, present_value)
    ]
    states = helper.make_tensor_value_info(HIDDEN_STATES, TensorProto.FLOAT, ["R", config.hidden_size])
    return [
        logits,
        *([states] if hidden_states else []),
        *buffers,
        *_convolution_states(config, present_conv, "kept + M"),
    ]


def _convolution_states(
    config: DecoderConfig, name: Callable[[int], str], tokens: str | None = None
) -> list[ValueInfoProto]:
    """Inputs of the convolutions, `[1, tokens, hidden_size]`: of as many tokens as a kernel reaches back when None."""
    if config.convolution is None:
        return []
    shape = [1, config.convolution.kernel - 1 if tokens is None else tokens, config.hidden_size]
    return [helper.make_tensor_value_info(name(layer), TensorProto.FLOAT, shape) for layer in config.convolution_layers]


def _buffer_shape(config: DecoderConfig, layer: int) -> list[str | int]:
    shape = config.attention[layer].shape
    return [1, shape.kv_heads, "capacity", shape.head_dim]
