"""The layout of a model: the weights of each layer, embedding and LM head, derived from its config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from ..architectures.state_layers import ConvolutionConfig, RecurrentConfig
from .config import DecoderConfig
from .layer_weights import (
    FusedLinear,
    Layer,
    LayerInput,
    Norm,
    PerLayerInputsLayout,
    Producer,
    SharedExpertWeights,
    StateWeights,
)

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
PER_LAYER_EMBEDDING: Final = "per_layer_embedding"
"""Name of the linear with the embeddings that layers have of their own."""


def tensor_names(config: DecoderConfig) -> list[tuple[str, str]] | None:
    """Beginnings of names of tensors, and those in the checkpoint in their place; None for the common ones."""
    pairs = [(*pair, str(layer)) for layer in range(config.layers) for pair in config.traits.tensors.items()]
    return [(name.replace("#", layer), own.replace("#", layer)) for name, own, layer in pairs] or None


def layer_layout(config: DecoderConfig, index: int) -> Layer:
    """Return the linears and norms of layer `index`."""
    module, traits = f"model.layers.{index}", config.traits
    attention, hidden = f"{module}.self_attn", config.hidden_size
    router, gate_up, down = _feed_forward(config, index)
    shared = None if router is None else _shared_expert(config, index)

    def norm(name: str | None) -> Norm | None:
        return None if name is None else Norm(f"{module}.{name}.weight", hidden)

    return Layer(
        **_mixer(config, index),
        gate_up=gate_up,
        down=down,
        router=router,
        shared=shared,
        sinks=f"{attention}.sinks" if traits.sinks else None,
        own_input=_own_input(config, index),
        scale=None if traits.layer_scale is None else f"{module}.{traits.layer_scale}",
        before_attention=norm(traits.norms.before_attention),
        after_attention=norm(traits.norms.after_attention),
        before_mlp=norm(traits.norms.before_mlp),
        after_mlp=norm(traits.norms.after_mlp),
    )


def _mixer(config: DecoderConfig, index: int) -> dict[str, Any]:
    """The fields of `Layer` that attention, or what takes its place, determines."""
    states, hidden, linear = config.state_layers, config.hidden_size, f"layers.{index}"
    match states if states is not None and states.layers[index] else None:
        case ConvolutionConfig() as settings:
            module, biased = f"model.layers.{index}.conv", settings.biased
            inputs = FusedLinear(f"{linear}.conv_in", (f"{module}.in_proj",), (3 * hidden,), hidden, biased)
            output = FusedLinear(f"{linear}.conv_out", (f"{module}.out_proj",), (hidden,), hidden, biased)
            bias = f"{module}.conv.bias" if biased else None
            weights = StateWeights(settings, f"{module}.conv.weight", hidden, bias=bias)
            producer = Producer(hidden)  # the gate behind the convolution, C
            return {"qkv": inputs, "output": output, "producer": producer, "states": weights}
        case RecurrentConfig(delta_rule=True) as settings:
            module = f"model.layers.{index}.linear_attn"
            projections = ("in_proj_qkvz",) if settings.by_key_head else ("in_proj_qkv", "in_proj_z")
            gates = ("in_proj_ba",) if settings.by_key_head else ("in_proj_b", "in_proj_a")
            rows = (settings.convolved, settings.value_width)
            inputs = fused(f"{linear}.delta_in", module, projections, rows, hidden)
            # They are a hundredth of the layer's weights, and small errors of a decay add up over the tokens.
            exact = fused(f"{linear}.delta_gates", module, gates, (settings.value_heads,) * 2, hidden, exact=True)
            output = FusedLinear(f"{linear}.delta_out", (f"{module}.out_proj",), (hidden,), settings.value_width)
            recurrent = _recurrent(settings, module, settings.value_dim)
            return {"qkv": inputs, "output": output, "states": recurrent, "gates": exact}
        case RecurrentConfig() as settings:
            module, biased, width = f"model.layers.{index}.mamba", settings.biased, settings.value_width
            total = width + settings.convolved + settings.value_heads
            inputs = FusedLinear(f"{linear}.mamba_in", (f"{module}.in_proj",), (total,), hidden, biased)
            output = FusedLinear(f"{linear}.mamba_out", (f"{module}.out_proj",), (hidden,), width, biased)
            bias = f"{module}.conv1d.bias" if settings.convolution_biased else None
            recurrent = _recurrent(settings, module, width, bias=bias, skip=f"{module}.D")
            return {"qkv": inputs, "output": output, "states": recurrent}
    return _attention(config, index)


def _attention(config: DecoderConfig, index: int) -> dict[str, Any]:
    linear, traits, hidden = f"layers.{index}", config.traits, config.hidden_size
    attention, settings = f"model.layers.{index}.self_attn", config.attention[index]
    query_width, kv_width = config.heads * settings.head_dim, settings.kv_width
    parts = 1 if settings.owner is not None else 2 if settings.keys_as_values else 3
    rows = (query_width * (2 if traits.gated_attention else 1), kv_width, kv_width)[:parts]
    inputs = fused(f"{linear}.qkv", attention, traits.qkv[:parts], rows, hidden, config.qkv_bias)
    output = FusedLinear(f"{linear}.o", (f"{attention}.{traits.output}",), (hidden,), query_width, config.output_bias)
    query_norm, key_norm = (f"{attention}.{name}.weight" for name in traits.head_norms)
    # A value head serves all query heads of its group; normed values are proportional to nothing.
    producer = Producer(inputs.shape[0] - kv_width, (config.heads // settings.kv_heads, settings.head_dim))
    return {
        "qkv": inputs,
        "output": output,
        "producer": producer if parts == 3 and not traits.value_norm else None,
        "query_norm": _head_norm(config, index, query_norm, query_width),
        "key_norm": None if parts == 1 else _head_norm(config, index, key_norm, kv_width),
    }


def _recurrent(settings: RecurrentConfig, module: str, norm_width: int, **others: Any) -> StateWeights:
    return StateWeights(
        settings,
        f"{module}.conv1d.weight",
        settings.convolved,
        log_rates=f"{module}.A_log",
        step_bias=f"{module}.dt_bias",
        norm=f"{module}.norm.weight",
        norm_width=norm_width,
        **others,
    )


def _feed_forward(config: DecoderConfig, index: int) -> tuple[FusedLinear | None, FusedLinear, FusedLinear]:
    """Return the router, if there is one, gate_up and down of layer `index`."""
    linear, hidden, experts = f"layers.{index}", config.hidden_size, config.experts
    if experts is None or config.traits.experts is None or not experts.layers[index]:
        mlp = f"model.layers.{index}.{config.traits.mlp}"
        wide, biased = config.feed_forward_width(index), config.mlp_bias
        return (
            None,
            fused(f"{linear}.gate_up", mlp, config.traits.gate_up, (wide, wide), hidden, biased),
            FusedLinear(f"{linear}.down", (f"{mlp}.{config.traits.down}",), (hidden,), wide, biased),
        )
    experts_count, wide, traits = experts.count, experts.intermediate_size, config.traits.experts
    mlp = f"model.layers.{index}.{traits.module}"
    # A quantized router selects other experts, and it is only a thousandth of their size.
    router = FusedLinear(
        f"{linear}.router", (f"{mlp}.{traits.router}",), (experts_count,), hidden, traits.bias, exact=True
    )
    each = [f"{mlp}.experts.{expert}" for expert in range(experts_count)]
    both = [f"{expert}.{name}" for expert in each for name in ("gate_proj", "up_proj")]
    downs = [f"{expert}.down_proj" for expert in each]
    if traits.stacked:
        both, downs = [f"{mlp}.experts.gate_up_proj"], [f"{mlp}.experts.down_proj"]
    down, gate_up = (
        FusedLinear(
            f"{linear}.{name}",
            tuple(modules),
            (experts_count * rows // len(modules),) * len(modules),
            columns,
            traits.bias,
            experts=experts_count,
            stacked=traits.stacked,
        )
        for name, modules, rows, columns in (("down", downs, hidden, wide), ("gate_up", both, 2 * wide, hidden))
    )
    return router, replace(gate_up, paired=down), down


def _shared_expert(config: DecoderConfig, index: int) -> SharedExpertWeights | None:
    """The feed-forward beside the experts of layer `index`; None for a model without one."""
    shared = None if config.traits.experts is None else config.traits.experts.shared
    if shared is None or config.experts is None:
        return None
    linear, module, hidden = f"layers.{index}.shared", f"model.layers.{index}", config.hidden_size
    wide, mlp = config.experts.shared_size, f"{module}.{shared.module}"
    return SharedExpertWeights(
        fused(f"{linear}_gate_up", mlp, config.traits.gate_up, (wide, wide), hidden),
        FusedLinear(f"{linear}_down", (f"{mlp}.{config.traits.down}",), (hidden,), wide),
        # One row, whose errors would scale all outputs.
        None
        if shared.gate is None
        else FusedLinear(f"{linear}_gate", (f"{module}.{shared.gate}",), (1,), hidden, exact=True),
    )


def fused(
    name: str,
    module: str,
    parts: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    biased: bool = False,
    exact: bool = False,
) -> FusedLinear:
    """Fuse several projections, each in a part of the module or all in one part."""
    modules = tuple(f"{module}.{part}" for part in parts)
    return FusedLinear(name, modules, rows if len(parts) == len(rows) else (sum(rows),), columns, biased, exact)


def _own_input(config: DecoderConfig, index: int) -> LayerInput | None:
    width, hidden = config.per_layer_width, config.hidden_size
    if not width:
        return None
    linear, module = f"layers.{index}", f"model.layers.{index}"
    return LayerInput(
        FusedLinear(f"{linear}.input_gate", (f"{module}.per_layer_input_gate",), (width,), hidden),
        FusedLinear(f"{linear}.input_output", (f"{module}.per_layer_projection",), (hidden,), width),
        Norm(f"{module}.post_per_layer_input_norm.weight", hidden),
    )


def _head_norm(config: DecoderConfig, index: int, weight: str, width: int) -> Norm | None:
    kind = config.traits.head_norm
    return None if kind is None else Norm(weight, width if kind == "whole" else config.attention[index].head_dim)


def final_norm(config: DecoderConfig) -> Norm:
    """The norm before the LM head."""
    return Norm(f"model.{config.traits.final_norm}.weight", config.hidden_size)


def embedding_layout(config: DecoderConfig) -> FusedLinear:
    """The token embedding as a linear of vocab_size x hidden_size."""
    return FusedLinear("embedding", (EMBEDDING.removesuffix(".weight"),), (config.vocab_size,), config.hidden_size)


def head_layout(config: DecoderConfig) -> FusedLinear:
    """The LM head, which shares the embedding's matrix where the two are tied."""
    source = EMBEDDING if config.tied_head else HEAD
    return FusedLinear("head", (source.removesuffix(".weight"),), (config.vocab_size,), config.hidden_size)


def per_layer_inputs_layout(config: DecoderConfig) -> PerLayerInputsLayout | None:
    """The per-layer inputs; None for a model without them."""
    width = config.layers * config.per_layer_width
    if not width:
        return None
    return PerLayerInputsLayout(
        FusedLinear(PER_LAYER_EMBEDDING, ("model.embed_tokens_per_layer",), (config.vocab_size,), width),
        FusedLinear("per_layer_projection", ("model.per_layer_model_projection",), (width,), config.hidden_size),
        Norm("model.per_layer_projection_norm.weight", config.per_layer_width),
    )


def fused_linears(config: DecoderConfig) -> Iterator[FusedLinear]:
    """Yield all linears in the order of the graph; a tied head comes after the embedding."""
    yield embedding_layout(config)
    if (inputs := per_layer_inputs_layout(config)) is not None:
        yield from (inputs.table, inputs.projection)
    for index in range(config.layers):
        yield from layer_layout(config, index).linears
    yield head_layout(config)


def expected_tensors(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor that the graph needs, lazily: config.json may claim any number of layers."""
    yield from tensors_of([embedding_layout(config)])
    if (inputs := per_layer_inputs_layout(config)) is not None:
        yield from tensors_of((inputs.table, inputs.projection), [inputs.norm])
    for index in range(config.layers):
        layer = layer_layout(config, index)
        yield from tensors_of(layer.linears, layer.norms)
        if layer.sinks is not None:
            yield layer.sinks, (config.heads,)
        if layer.scale is not None:
            yield layer.scale, (1,)
        if layer.states is not None:
            yield from layer.states.tensors
    yield from tensors_of([head_layout(config)], [final_norm(config)])


def tensors_of(linears: Iterable[FusedLinear], norms: Iterable[Norm] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of linears and norms."""
    for linear in linears:
        for name, rows in zip(linear.weights, linear.rows, strict=True):
            yield name, (rows, linear.columns)
        for name, rows in zip(linear.biases, linear.rows, strict=linear.biased):
            yield name, (linear.experts, rows // linear.experts) if linear.stacked else (rows,)
    for norm in norms:
        yield norm.weight, (norm.width,)
