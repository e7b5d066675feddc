"""The exported graph's inputs and outputs, hidden states for drafts among them (docs/graph-contract.md).

A pass has M new tokens and T - M cached ones; R of the M positions get logits. The caller owns the KV cache: `past` and
`present` of a layer are bound to one buffer, in which the graph writes slots T - M to T - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from onnx import TensorProto, ValueInfoProto, helper

from ...errors import InputError
from ..architectures.state_layers import ConvolutionConfig, RecurrentConfig
from ..checkpoint.config import DecoderConfig

LOGITS: Final = "logits"
HIDDEN_STATES: Final = "hidden_states"
DRAFT_FEATURES: Final = "draft_features"
DRAFT_STATES: Final = "draft_states"
NEXT_STATES: Final = "next_states"
PAST_STATES: Final = ("past_conv.", "past_recurrent.", "past_recurrent_updates.")
"""Beginnings of the names of inputs that are states of layers without attention."""


def past_cache(layer: int) -> tuple[str, str]:
    """Names of the inputs with the cached, rotated keys of a layer, and with its values."""
    return f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"


def present_cache(layer: int) -> tuple[str, str]:
    """Names of the outputs with cached and new keys of a layer, and with its values."""
    return f"present.{layer}.key", f"present.{layer}.value"


def past_conv(layer: int) -> str:
    """Name of the input with the inputs of a layer's convolution at the last cached tokens."""
    return f"past_conv.{layer}"


def past_recurrent(layer: int) -> str:
    """Name of the input with a layer's state of linear attention after the last cached token."""
    return f"past_recurrent.{layer}"


def advanced_recurrent(layer: int) -> str:
    """Name of the output with that state after the updates in the input `past_updates`, before the first new token."""
    return f"advanced_recurrent.{layer}"


def past_updates(layer: int) -> str:
    """Name of the input with the updates of a layer's state by the cached tokens after it."""
    return f"past_recurrent_updates.{layer}"


def present_of(past: str) -> str:
    """Name of the output that belongs to an input with a state: the same after the new tokens."""
    return past.replace("past_", "present_", 1)


def graph_inputs(config: DecoderConfig) -> list[ValueInfoProto]:
    """All inputs of the graph."""
    return [*pass_inputs(), *caches(config, past_cache), *_states(config)]


def pass_inputs() -> list[ValueInfoProto]:
    """The inputs that are new in every pass, that is, all but the KV cache."""
    declare, float32 = helper.make_tensor_value_info, TensorProto.FLOAT
    int32, int64 = TensorProto.INT32, TensorProto.INT64
    return [
        declare("input_ids", int64, [1, "M"]),
        declare("position_ids", int64, [1, "M"]),
        declare("attention_bias", float32, [1, 1, "M", "T"]),
        declare("seqlens_k", int32, [1]),
        declare("total_sequence_length", int32, []),
        declare("logit_rows", int64, ["R"]),
    ]


def graph_outputs(
    config: DecoderConfig, hidden_states: bool, features: DraftFeatures | None = None
) -> list[ValueInfoProto]:
    """All outputs of the graph, the states before the LM head among them if `hidden_states`, and the `features`."""
    declare, float32 = helper.make_tensor_value_info, TensorProto.FLOAT
    outputs = [declare(LOGITS, float32, ["R", config.vocab_size])]
    if hidden_states:
        outputs.append(declare(HIDDEN_STATES, float32, ["R", config.hidden_size]))
    if features is not None:
        outputs.append(declare(DRAFT_FEATURES, float32, ["M" if features.all_tokens else "R", features.size(config)]))
    return [*outputs, *caches(config, present_cache), *_states(config, present=True)]


def _states(config: DecoderConfig, *, present: bool = False) -> list[ValueInfoProto]:
    """Inputs for the states of layers without attention; their outputs if `present`.

    Those of short convolutions are followed by the inputs at the new tokens, `[1, kernel - 1 + M, hidden_size]`; of
    linear attention, the convolution is followed by the inputs at the last new tokens, and the matrix is as large as
    before.
    """
    shapes: dict[str, list[str | int]] = {}
    advanced: dict[str, list[str | int]] = {}
    for layer in config.layers_with_states:
        match config.state_layers:
            case RecurrentConfig() as states:
                shapes[past_conv(layer)] = [1, "kept + kernel" if present else states.kernel - 1, states.convolved]
                shapes[past_recurrent(layer)] = [1, states.value_heads, states.key_dim, states.value_dim]
                shapes[past_updates(layer)] = [1, "kept" if present else "updates", states.update_width]
                advanced[advanced_recurrent(layer)] = shapes[past_recurrent(layer)]
            case ConvolutionConfig() as states:
                shapes[past_conv(layer)] = [1, "kept + M" if present else states.kernel - 1, config.hidden_size]
    declared = {present_of(name): shape for name, shape in shapes.items()} | advanced if present else shapes
    return [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in declared.items()]


def caches(
    config: DecoderConfig,
    names: Callable[[int], tuple[str, str]],
    slots: int | str = "capacity",
    element_type: int = TensorProto.FLOAT,
    batch: int | str = 1,
) -> list[ValueInfoProto]:
    """The caches of all layers with keys and values of their own, as inputs or outputs of these names."""
    layers = {layer: config.attention[layer] for layer in config.attention_layers}
    return [
        helper.make_tensor_value_info(name, element_type, [batch, each.kv_heads, slots, each.head_dim])
        for layer, each in layers.items()
        for name in names(layer)
    ]


@dataclass(frozen=True)
class DraftFeatures:
    """Which hidden states a graph gives as `draft_features`."""

    layers: tuple[int, ...] = ()
    """Layers whose inputs, the residual stream, are concatenated; the number of layers stands for the output of the
    last one. Empty for the states after the last norm."""
    all_tokens: bool = True
    """Whether all tokens of a pass have features, or those with logits only."""

    def size(self, config: DecoderConfig) -> int:
        """Number of features of a token."""
        return max(1, len(self.layers)) * config.hidden_size

    def needs_last_layer(self, config: DecoderConfig) -> bool:
        """Whether the last layer has to run for tokens without logits too."""
        return self.all_tokens and (not self.layers or config.layers in self.layers)


def feature_layers(layers: int, listed: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The layers of a target whose inputs, the residual stream, are the features of an EAGLE-3 head.

    Args:
        layers: number of layers of the target.
        listed: the layers whose outputs a config.json lists; None for the default, which is counted by inputs.
    """
    return (2, layers // 2, layers - 3) if listed is None else tuple(each + 1 for each in listed)


def eagle_features(config: DecoderConfig, listed: tuple[int, ...] | None) -> DraftFeatures:
    """The features of an EAGLE-3 head.

    Args:
        config: the target.
        listed: the layers that the head's config.json lists; None for the default.

    Raises:
        InputError: the target does not have such layers.
    """
    layers = feature_layers(config.layers, listed)
    if not all(0 <= layer < config.layers for layer in layers):
        raise InputError(
            f"the head reads the inputs of layers {', '.join(map(str, layers))}, but the model has {config.layers}",
            "give a head that was trained for this model",
        )
    return DraftFeatures(layers)
