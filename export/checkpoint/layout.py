"""The linears and norms of a model, and their checkpoint tensors.

A fused linear is one linear of the graph and the smallest part with its own weight format. Its matrix stacks one or
more checkpoint tensors, one under the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeAlias

from ...models.manifest import WeightFormat
from ..architectures.delta_net import DeltaNetConfig
from ..architectures.family import HeadNorm
from ..architectures.mamba2 import Mamba2Config
from .config import DecoderConfig

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
PER_LAYER_EMBEDDING: Final = "per_layer_embedding"
"""Name of the linear with the embeddings that layers have of their own."""

QuantPlan: TypeAlias = Mapping[str, WeightFormat]
"""A quantization plan: the weight format of each linear, by its name."""


@dataclass(frozen=True)
class FusedLinear:
    """A linear of the graph: `modules[j]` of the checkpoint computes `rows[j]` of its outputs."""

    name: str
    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    """Number of inputs (K)."""
    biased: bool = False
    exact: bool = False
    """Whether it stays in float32 whatever the recipe."""
    experts: int = 0
    """Number of experts it stacks, each with the same number of modules; 0 for a dense linear."""
    stacked: bool = False
    """Whether the checkpoint already stacks the experts, in a tensor that is named like a module."""
    paired: FusedLinear | None = None
    """The linear that has to have the same format, because one operator multiplies by both."""

    @property
    def interleaved(self) -> bool:
        """Whether the rows of each expert's two modules alternate."""
        return self.experts > 0 and len(self.modules) == 2 * self.experts

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs (N) and inputs (K)."""
        return sum(self.rows), self.columns

    @property
    def weight_count(self) -> int:
        """Number of weights in the matrix."""
        return sum(self.rows) * self.columns

    @property
    def weights(self) -> list[str]:
        """Checkpoint names of the matrices, from top to bottom."""
        return list(self.modules) if self.stacked else [f"{module}.weight" for module in self.modules]

    @property
    def biases(self) -> list[str]:
        """Checkpoint names of the biases, in the same order; empty for a linear without bias."""
        suffix = "_bias" if self.stacked else ".bias"
        return [f"{module}{suffix}" for module in self.modules] if self.biased else []


@dataclass(frozen=True)
class Norm:
    """An RMS norm: the name and the number of its weights."""

    weight: str
    width: int


@dataclass(frozen=True)
class Convolution:
    """The weights of a short convolution, see `architectures.short_convolution`."""

    weight: str
    """Checkpoint name of the kernels, `[channels, 1, kernel]`."""
    bias: str | None
    channels: int
    kernel: int

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the checkpoint's tensors."""
        bias = () if self.bias is None else ((self.bias, (self.channels,)),)
        return ((self.weight, (self.channels, 1, self.kernel)), *bias)


@dataclass(frozen=True)
class Producer:
    """The rows of a mixer's first linear that its output projection's inputs are proportional to."""

    first_row: int
    shared: tuple[int, int] = (1, 1)
    """How many inputs are proportional to one row: number of heads side by side, and of channels of each."""


@dataclass(frozen=True)
class LayerInput:
    """The linears and the norm by which a layer reads its own part of the per-layer inputs."""

    gate: FusedLinear
    output: FusedLinear
    after: Norm


@dataclass(frozen=True)
class DeltaNet:
    """The weights of a gated delta net apart from its linears, see `architectures.delta_net`."""

    config: DeltaNetConfig
    convolution: Convolution
    log_rate: str
    """Checkpoint name of the logarithms of the decay rates, one per value head."""
    step_bias: str
    """Checkpoint name of what is added to the decay's inputs, one per value head."""
    norm: str
    """Checkpoint name of the norm of value heads."""

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the checkpoint's tensors."""
        heads = (self.config.value_heads,)
        own = (self.log_rate, heads), (self.step_bias, heads), (self.norm, (self.config.value_dim,))
        return (*self.convolution.tensors, *own)


@dataclass(frozen=True)
class Mamba2:
    """The weights of a Mamba-2 state space apart from its linears, see `architectures.mamba2`."""

    config: Mamba2Config
    convolution: Convolution
    log_rate: str
    """Checkpoint name of the logarithms of the decay rates, one per head."""
    step_bias: str
    """Checkpoint name of what is added to the steps, one per head."""
    skip: str
    """Checkpoint name of D, the factors of x in the output, one per head."""
    norm: str
    """Checkpoint name of the norm of the gated output."""

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the checkpoint's tensors."""
        own = ((name, (self.config.value_heads,)) for name in (self.log_rate, self.step_bias, self.skip))
        return (*self.convolution.tensors, *own, (self.norm, (self.config.value_width,)))


@dataclass(frozen=True)
class Layer:
    """The linears and norms of one decoder layer; None for a norm that the layer lacks."""

    qkv: FusedLinear
    """Queries, keys and values, with gated attention a gate after the query of each head; queries alone in a layer that
    reads the keys and values of another, queries and keys where values are keys; in a layer with a convolution its
    three inputs B, C and x; in one with a delta net queries, keys, values and the gate of its output; in one with
    Mamba-2 the gate, x, B, C and the steps."""
    output: FusedLinear
    """The output projection of attention, or of what a layer has in its place."""
    producer: Producer | None
    """What of `qkv` the inputs of `output` are proportional to; None where they are to no part of it."""
    convolution: Convolution | None
    """None for a layer without a short convolution."""
    delta_net: DeltaNet | None
    """None for a layer without a delta net."""
    mamba: Mamba2 | None
    """None for a layer without a Mamba-2 state space."""
    gates: FusedLinear | None
    """The inputs of beta and of the decay in a layer with a delta net; None for others."""
    gate_up: FusedLinear
    down: FusedLinear
    router: FusedLinear | None
    """Selects the experts, which gate_up and down then stack; None for a dense layer."""
    sinks: str | None
    """Checkpoint name of the attention sinks, one logit per head; None where the family has none."""
    own_input: LayerInput | None
    """How the layer reads its own embedding; None for a model without per-layer inputs."""
    scale: str | None
    """Checkpoint name of the factor on the hidden states after the layer; None where the family has none."""
    before_attention: Norm | None
    query_norm: Norm | None
    key_norm: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None

    @property
    def recurrent(self) -> DeltaNet | Mamba2 | None:
        """The linear attention of the layer; None for a layer without."""
        return self.delta_net or self.mamba

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """All linears, in the order of the graph."""
        own = () if self.own_input is None else (self.own_input.gate, self.own_input.output)
        return *self.mixer_linears, *self.feed_forward_linears, *own

    @property
    def mixer_linears(self) -> tuple[FusedLinear, ...]:
        """The linears of attention, of the convolution, of the delta net or of the state space."""
        gates = () if self.gates is None else (self.gates,)
        return self.qkv, *gates, self.output

    @property
    def feed_forward_linears(self) -> tuple[FusedLinear, ...]:
        """The linears of the feed-forward."""
        router = () if self.router is None else (self.router,)
        return *router, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Norm, ...]:
        """All norms that the layer has."""
        before, after = (self.before_attention, self.before_mlp), (self.after_attention, self.after_mlp)
        own = None if self.own_input is None else self.own_input.after
        return tuple(norm for norm in (*before, *after, self.query_norm, self.key_norm, own) if norm is not None)


def layer_layout(config: DecoderConfig, index: int) -> Layer:
    """Return the linears and norms of layer `index`."""
    module, traits = f"model.layers.{index}", config.traits
    attention, hidden = f"{module}.self_attn", config.hidden_size
    others = _convolution(config, index) or _delta_net(config, index) or _mamba(config, index)
    mixer = others or _attention(config, index)
    router, gate_up, down = _feed_forward(config, index)

    def norm(name: str | None) -> Norm | None:
        return None if name is None else Norm(f"{module}.{name}.weight", hidden)

    return Layer(
        qkv=mixer.inputs,
        output=mixer.output,
        producer=mixer.producer,
        convolution=mixer.convolution,
        delta_net=mixer.delta_net,
        mamba=mixer.mamba,
        gates=mixer.gates,
        gate_up=gate_up,
        down=down,
        router=router,
        sinks=f"{attention}.sinks" if traits.sinks else None,
        own_input=_own_input(config, index),
        scale=None if traits.layer_scale is None else f"{module}.{traits.layer_scale}",
        before_attention=norm(traits.norms.before_attention),
        query_norm=mixer.query_norm,
        key_norm=mixer.key_norm,
        after_attention=norm(traits.norms.after_attention),
        before_mlp=norm(traits.norms.before_mlp),
        after_mlp=norm(traits.norms.after_mlp),
    )


class _Mixer(NamedTuple):
    """The part of a layer that mixes tokens."""

    inputs: FusedLinear
    output: FusedLinear
    producer: Producer | None = None
    convolution: Convolution | None = None
    delta_net: DeltaNet | None = None
    mamba: Mamba2 | None = None
    gates: FusedLinear | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None


def _attention(config: DecoderConfig, index: int) -> _Mixer:
    linear, traits, hidden = f"layers.{index}", config.traits, config.hidden_size
    attention, settings = f"model.layers.{index}.self_attn", config.attention[index]
    query_width, kv_width = config.heads * settings.shape.head_dim, settings.kv_width
    parts = 1 if settings.owner is not None else 2 if settings.keys_as_values else 3
    inputs = _fused(
        f"{linear}.qkv",
        tuple(f"{attention}.{name}" for name in traits.qkv[:parts]),
        (query_width * (2 if traits.gated_attention else 1), kv_width, kv_width)[:parts],
        hidden,
        config.qkv_bias,
    )
    output = FusedLinear(f"{linear}.o", (f"{attention}.{traits.output}",), (hidden,), query_width, config.output_bias)
    query_norm, key_norm = (f"{attention}.{name}.weight" for name in traits.head_norms)
    # A value head serves all query heads of its group; normed values are proportional to nothing.
    producer = Producer(inputs.shape[0] - kv_width, (config.heads // settings.shape.kv_heads, settings.shape.head_dim))
    return _Mixer(
        inputs,
        output,
        producer if parts == 3 and not traits.value_norm else None,
        query_norm=_head_norm(config, index, query_norm, query_width),
        key_norm=None if parts == 1 else _head_norm(config, index, key_norm, kv_width),
    )


def _convolution(config: DecoderConfig, index: int) -> _Mixer | None:
    """The convolution of a layer; None for a layer with attention."""
    convolution, traits = config.convolution, config.traits.convolution
    if convolution is None or traits is None or not convolution.layers[index]:
        return None
    linear, module, hidden = f"layers.{index}", f"model.layers.{index}.{traits.module}", config.hidden_size
    biased = convolution.biased
    inputs = FusedLinear(f"{linear}.conv_in", (f"{module}.in_proj",), (3 * hidden,), hidden, biased)
    output = FusedLinear(f"{linear}.conv_out", (f"{module}.out_proj",), (hidden,), hidden, biased)
    bias = f"{module}.conv.bias" if biased else None
    weights = Convolution(f"{module}.conv.weight", bias, hidden, convolution.kernel)
    return _Mixer(inputs, output, Producer(hidden), weights)  # the gate behind the convolution, C


def _delta_net(config: DecoderConfig, index: int) -> _Mixer | None:
    """The gated delta net of a layer; None for a layer without one."""
    settings, traits = config.delta_net, config.traits.delta_net
    if settings is None or traits is None or not settings.layers[index]:
        return None
    linear, module, hidden = f"layers.{index}", f"model.layers.{index}.{traits.module}", config.hidden_size
    inputs = FusedLinear(
        f"{linear}.delta_in",
        (f"{module}.in_proj_qkv", f"{module}.in_proj_z"),
        (settings.convolved, settings.value_width),
        hidden,
    )
    # They are a hundredth of the layer's weights, and small errors of a decay add up over the tokens.
    gates = FusedLinear(
        f"{linear}.delta_gates",
        (f"{module}.in_proj_b", f"{module}.in_proj_a"),
        (settings.value_heads,) * 2,
        hidden,
        exact=True,
    )
    output = FusedLinear(f"{linear}.delta_out", (f"{module}.out_proj",), (hidden,), settings.value_width)
    convolution = Convolution(f"{module}.conv1d.weight", None, settings.convolved, settings.kernel)
    names = (f"{module}.{name}" for name in ("A_log", "dt_bias", "norm.weight"))
    return _Mixer(inputs, output, delta_net=DeltaNet(settings, convolution, *names), gates=gates)


def _mamba(config: DecoderConfig, index: int) -> _Mixer | None:
    """The Mamba-2 state space of a layer; None for a layer without one."""
    settings, traits = config.mamba, config.traits.mamba
    if settings is None or traits is None or not settings.layers[index]:
        return None
    linear, module, hidden = f"layers.{index}", f"model.layers.{index}.{traits.module}", config.hidden_size
    rows = settings.value_width + settings.convolved + settings.value_heads
    inputs = FusedLinear(f"{linear}.mamba_in", (f"{module}.in_proj",), (rows,), hidden, settings.biased)
    output = FusedLinear(
        f"{linear}.mamba_out", (f"{module}.out_proj",), (hidden,), settings.value_width, settings.biased
    )
    bias = f"{module}.conv1d.bias" if settings.convolution_biased else None
    convolution = Convolution(f"{module}.conv1d.weight", bias, settings.convolved, settings.kernel)
    names = (f"{module}.{name}" for name in ("A_log", "dt_bias", "D", "norm.weight"))
    return _Mixer(inputs, output, mamba=Mamba2(settings, convolution, *names))


def _feed_forward(config: DecoderConfig, index: int) -> tuple[FusedLinear | None, FusedLinear, FusedLinear]:
    """Return the router, if there is one, gate_up and down of layer `index`."""
    linear, hidden, experts = f"layers.{index}", config.hidden_size, config.experts
    mlp = f"model.layers.{index}.{config.traits.mlp}"
    if experts is None or config.traits.experts is None or not experts.layers[index]:
        wide, biased = config.feed_forward_width(index), config.mlp_bias
        modules = tuple(f"{mlp}.{name}" for name in config.traits.gate_up)
        return (
            None,
            _fused(f"{linear}.gate_up", modules, (wide, wide), hidden, biased),
            FusedLinear(f"{linear}.down", (f"{mlp}.{config.traits.down}",), (hidden,), wide, biased),
        )
    experts_count, wide, traits = experts.count, experts.intermediate_size, config.traits.experts
    # A quantized router selects other experts, and it is only a thousandth of their size.
    router = FusedLinear(
        f"{linear}.router", (f"{mlp}.{traits.router}",), (experts_count,), hidden, traits.router_bias, exact=True
    )
    each = [f"{mlp}.experts.{expert}" for expert in range(experts_count)]
    both = [f"{expert}.{name}" for expert in each for name in config.traits.gate_up]
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


def _fused(name: str, modules: tuple[str, ...], rows: tuple[int, ...], columns: int, biased: bool) -> FusedLinear:
    """Fuse several projections, each in a module of its own or all in one."""
    return FusedLinear(name, modules, rows if len(modules) == len(rows) else (sum(rows),), columns, biased)


def _own_input(config: DecoderConfig, index: int) -> LayerInput | None:
    modules, width, hidden = config.traits.per_layer_inputs, config.per_layer_width, config.hidden_size
    if modules is None or not width:
        return None
    linear, module = f"layers.{index}", f"model.layers.{index}"
    return LayerInput(
        FusedLinear(f"{linear}.input_gate", (f"{module}.{modules.gate}",), (width,), hidden),
        FusedLinear(f"{linear}.input_output", (f"{module}.{modules.output}",), (hidden,), width),
        Norm(f"{module}.{modules.output_norm}.weight", hidden),
    )


def _head_norm(config: DecoderConfig, index: int, weight: str, width: int) -> Norm | None:
    match config.traits.head_norm:
        case HeadNorm.NONE:
            return None
        case HeadNorm.EACH_HEAD:
            return Norm(weight, config.attention[index].shape.head_dim)
        case HeadNorm.WHOLE:
            return Norm(weight, width)


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


@dataclass(frozen=True)
class PerLayerInputsLayout:
    """The linears and the norm that compute the inputs of all layers beside the hidden states."""

    table: FusedLinear
    """The embeddings of all layers side by side, a linear of vocab_size x (layers * width)."""
    projection: FusedLinear
    """From the token embedding."""
    norm: Norm
    """The norm of each layer's part of the projection."""


def per_layer_inputs_layout(config: DecoderConfig) -> PerLayerInputsLayout | None:
    """The per-layer inputs; None for a model without them."""
    modules, width = config.traits.per_layer_inputs, config.layers * config.per_layer_width
    if modules is None or not width:
        return None
    return PerLayerInputsLayout(
        FusedLinear(PER_LAYER_EMBEDDING, (f"model.{modules.table}",), (config.vocab_size,), width),
        FusedLinear("per_layer_projection", (f"model.{modules.projection}",), (width,), config.hidden_size),
        Norm(f"model.{modules.projection_norm}.weight", config.per_layer_width),
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
    yield from _tensors_of(embedding_layout(config))
    if (inputs := per_layer_inputs_layout(config)) is not None:
        yield from (*_tensors_of(inputs.table), *_tensors_of(inputs.projection))
        yield inputs.norm.weight, (inputs.norm.width,)
    for index in range(config.layers):
        layer = layer_layout(config, index)
        for linear in layer.linears:
            yield from _tensors_of(linear)
        for norm in layer.norms:
            yield norm.weight, (norm.width,)
        if layer.sinks is not None:
            yield layer.sinks, (config.heads,)
        if layer.scale is not None:
            yield layer.scale, (1,)
        if layer.convolution is not None:
            yield from layer.convolution.tensors
        if layer.recurrent is not None:
            yield from layer.recurrent.tensors
    yield from _tensors_of(head_layout(config))
    yield final_norm(config).weight, (config.hidden_size,)


def _tensors_of(linear: FusedLinear) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, rows in zip(linear.weights, linear.rows, strict=True):
        yield name, (rows, linear.columns)
    for name, rows in zip(linear.biases, linear.rows, strict=linear.biased):
        yield name, (linear.experts, rows // linear.experts) if linear.stacked else (rows,)
