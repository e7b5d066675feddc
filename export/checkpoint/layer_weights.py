"""The weights of a decoder layer: fused linears, norms and their checkpoint tensors.

A fused linear is one linear of the graph and the smallest part with its own weight format. Its matrix stacks one or
more checkpoint tensors, one under the other. `layout` derives the weights of a model from its config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...models.manifest import WeightFormat
from ..architectures.state_layers import RecurrentConfig, StateLayers

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


class Norm(NamedTuple):
    """An RMS norm: the name and the number of its weights."""

    weight: str
    width: int


@dataclass(frozen=True)
class StateWeights:
    """The weights of a layer that keeps a state, apart from its linears, by their names in the checkpoint."""

    config: StateLayers
    kernels: str
    """The kernels of the convolution, `[channels, 1, kernel]`."""
    channels: int
    bias: str | None = None
    """The bias of the convolution."""
    log_rates: str = ""
    """Logarithms of the decay rates, one per value head."""
    step_bias: str = ""
    """What is added to the inputs of the decays, or to the steps, one per value head."""
    norm: str = ""
    """The norm of value heads, or of the gated output."""
    norm_width: int = 0
    skip: str = ""
    """D, the factors of x in the output of a Mamba-2 state space, one per head."""

    @property
    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the checkpoint's tensors."""
        yield self.kernels, (self.channels, 1, self.config.kernel)
        if self.bias is not None:
            yield self.bias, (self.channels,)
        if isinstance(self.config, RecurrentConfig):
            names = filter(None, (self.log_rates, self.step_bias, self.skip))
            yield from ((name, (self.config.value_heads,)) for name in names)
            yield self.norm, (self.norm_width,)


class Producer(NamedTuple):
    """The rows of a mixer's first linear that its output projection's inputs are proportional to."""

    first_row: int
    shared: tuple[int, int] = (1, 1)
    """How many inputs are proportional to one row: number of heads side by side, and of channels of each."""


class LayerInput(NamedTuple):
    """The linears and the norm by which a layer reads its own part of the per-layer inputs."""

    gate: FusedLinear
    output: FusedLinear
    after: Norm


class SharedExpertWeights(NamedTuple):
    """The linears of a feed-forward that all tokens run through beside the selected experts."""

    gate_up: FusedLinear
    down: FusedLinear
    gate: FusedLinear | None
    """One output, whose sigmoid is a factor on the outputs of `down`; None for no factor."""

    @property
    def linears(self) -> tuple[FusedLinear, ...]:
        """All linears, in the order of the graph."""
        return (self.gate_up, self.down) if self.gate is None else (self.gate_up, self.down, self.gate)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The linears and norms of one decoder layer; None for a norm that the layer lacks."""

    qkv: FusedLinear
    """Queries, keys and values, with gated attention a gate after the query of each head; queries alone in a layer that
    reads the keys and values of another, queries and keys where values are keys; in a layer with a convolution its
    three inputs B, C and x; in one with a delta net queries, keys, values and the gate of its output; in one with
    Mamba-2 the gate, x, B, C and the steps."""
    output: FusedLinear
    """The output projection of attention, or of what a layer has in its place."""
    producer: Producer | None = None
    """What of `qkv` the inputs of `output` are proportional to; None where they are to no part of it."""
    states: StateWeights | None = None
    """The convolution, delta net or state space in place of attention; None for a layer with attention."""
    gates: FusedLinear | None = None
    """The inputs of beta and of the decay in a layer with a delta net; None for others."""
    gate_up: FusedLinear
    down: FusedLinear
    router: FusedLinear | None
    """Selects the experts, which gate_up and down then stack; None for a dense layer."""
    shared: SharedExpertWeights | None
    """The feed-forward beside the experts; None for a layer without."""
    sinks: str | None
    """Checkpoint name of the attention sinks, one logit per head; None where the family has none."""
    own_input: LayerInput | None
    """How the layer reads its own embedding; None for a model without per-layer inputs."""
    scale: str | None
    """Checkpoint name of the factor on the hidden states after the layer; None where the family has none."""
    before_attention: Norm | None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None

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
        shared = () if self.shared is None else self.shared.linears
        return *router, self.gate_up, self.down, *shared

    @property
    def norms(self) -> tuple[Norm, ...]:
        """All norms that the layer has."""
        before, after = (self.before_attention, self.before_mlp), (self.after_attention, self.after_mlp)
        own = None if self.own_input is None else self.own_input.after
        return tuple(norm for norm in (*before, *after, self.query_norm, self.key_norm, own) if norm is not None)


class PerLayerInputsLayout(NamedTuple):
    """The linears and the norm that compute the inputs of all layers beside the hidden states."""

    table: FusedLinear
    """The embeddings of all layers side by side, a linear of vocab_size x (layers * width)."""
    projection: FusedLinear
    """From the token embedding."""
    norm: Norm
    """The norm of each layer's part of the projection."""
