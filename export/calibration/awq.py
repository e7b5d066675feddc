"""AWQ scaling of weight columns with large inputs (Lin et al., 2023).

The columns are scaled up before quantization. The inputs are divided by the same factors where they are computed: in
the norm before a linear, in the value heads before the output projection, in `up` before `down`. In exact arithmetic
the model is unchanged, and the graph has no further nodes. The factors are mean |x_j| ** a, centred at 1 for each
linear; `a` is chosen for each linear by the output error after quantization.

The original also clips the range of each block; here the scale search of k-quant does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, Layer, Norm
from ..checkpoint.layout import final_norm, head_layout, layer_layout
from ..checkpoint.source import Float32Array, ModelSource, QuantizedRows, RowRange, in_order
from ..quantization.codes import InputStatistics, StatisticsOf, dequantized
from ..quantization.methods import QUANTIZERS
from .layer_graphs import expert_of

STAGE: Final = "AWQ scaling"
_EXPONENTS: Final = tuple(step / 10 for step in range(1, 10))
"""Candidates of `a`; 0 leaves the linear as it is."""
_MAX_ERROR_RATIO: Final = 0.98
"""Largest error after scaling relative to the error before: a smaller gain would not hold on other text."""
_SAMPLED_ROWS: Final = 256
"""Number of rows of a linear on which the error is measured, evenly spaced."""
_MIN_MAGNITUDE: Final = 1e-4
"""Lower bound of input magnitudes, relative to their mean."""


@dataclass(frozen=True)
class AwqScales:
    """Factors of a model's tensors; tensors that are not named stay as they are."""

    columns: dict[str, Float32Array] = field(default_factory=dict)
    """Factors of a matrix's columns [K], by its name."""
    rows: dict[str, Float32Array] = field(default_factory=dict)
    """Factors of a matrix's rows or of a bias [N], by its name."""
    norms: dict[str, Float32Array] = field(default_factory=dict)
    """Factors of a norm's weights, by their name."""
    inputs: dict[str, Float32Array] = field(default_factory=dict)
    """Factors of a linear's inputs [K], by the linear's name."""


class AwqSource(ModelSource):
    """Wraps a source, and multiplies its tensors by AWQ scales."""

    def __init__(self, source: ModelSource, config: DecoderConfig, scales: AwqScales) -> None:
        super().__init__(source)
        self._norm_offset = np.float32(config.traits.norms_add_one)
        self.scales: Final = scales

    def read(self, name: str) -> Float32Array:
        """Read a whole tensor, scaled."""
        value = self._source.read(name)
        if value.ndim == 2:
            return self._scaled(value, RowRange(name, 0, len(value)))
        if name in self.scales.norms:
            scaled: Float32Array = (value + self._norm_offset) * self.scales.norms[name] - self._norm_offset
            return scaled
        return value * self.scales.rows[name] if name in self.scales.rows else value

    def read_rows(self, rows: RowRange) -> Float32Array:
        """Read some rows of a matrix, scaled."""
        return self._scaled(self._source.read_rows(rows), rows)

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Quantize scaled rows of a matrix by the method of the format."""
        return QUANTIZERS[weight_format.method or Method.RTN](self.read_rows(rows), weight_format, None)

    def _scaled(self, weights: Float32Array, rows: RowRange) -> Float32Array:
        if rows.name in self.scales.columns:
            weights = weights * self.scales.columns[rows.name]
        if rows.name in self.scales.rows:
            weights = weights * self.scales.rows[rows.name][rows.start : rows.stop, None]
        return weights


def scaled_statistics(statistics: StatisticsOf, scales: AwqScales) -> StatisticsOf:
    """Input statistics of a model with AWQ scaling."""

    def of(linear: str) -> InputStatistics | None:
        known, factors = statistics(linear), scales.inputs.get(linear)
        if known is None or factors is None:
            return known
        moments = known.second_moment
        return InputStatistics(
            known.mean_square * factors**2,
            known.mean_magnitude * factors,
            None if moments is None else moments * factors[:, None] * factors,
        )

    return of


def apply_awq(
    source: ModelSource,
    config: DecoderConfig,
    statistics: StatisticsOf,
    weight_format: WeightFormat,
    progress: Progress,
) -> tuple[AwqSource, StatisticsOf]:
    """Find and apply AWQ scales for every linear whose inputs can be scaled where they are computed.

    Args:
        source: The model's tensors.
        config: The model's numbers.
        statistics: Statistics of the linears' inputs.
        weight_format: Format and method by whose errors the scales are chosen. For GPTQ the error of k-quant is used,
            which needs no factorization of the moments for each candidate.
        progress: Receives the stage "AWQ scaling".

    Returns:
        The scaled model, and the statistics of its inputs.

    Raises:
        CheckpointError: A tensor cannot be read.
    """
    candidates, scales = scalable_linears(config), AwqScales()

    def search(candidate: ScalableLinear) -> Float32Array | None:
        linear, known = candidate.linear, statistics(candidate.linear.name)
        if known is None:
            return None
        return _best_scales(_sampled_rows(source, linear), known, weight_format, candidate.shared)

    for number, (candidate, factors) in enumerate(zip(candidates, in_order(search, candidates), strict=True)):
        progress(STAGE, number / len(candidates))
        if factors is not None:
            candidate.enter(scales, factors)
    progress(STAGE, 1.0)
    return AwqSource(source, config, scales), scaled_statistics(statistics, scales)


@dataclass(frozen=True)
class ScalableLinear:
    """A linear whose inputs can be divided by factors where they are computed."""

    linear: FusedLinear
    norm: Norm | None = None
    """The norm that computes the inputs."""
    producer: FusedLinear | None = None
    """The linear that computes the inputs, up to factors."""
    first_row: int = 0
    """First row of the producer that computes inputs."""
    shared: tuple[int, int] = (1, 1)
    """Inputs that share factors: number of heads side by side, and of channels of each."""
    beside: tuple[FusedLinear, ...] = ()
    """Other linears that read the same inputs."""

    def enter(self, scales: AwqScales, factors: Float32Array) -> None:
        """Multiply the linear's columns by factors [K], and divide what computes its inputs."""
        inverse = np.reciprocal(factors)
        for linear in (self.linear, *self.beside):
            experts = (expert_of(linear.name, expert) for expert in range(linear.experts))
            scales.inputs.update(dict.fromkeys((linear.name, *experts), inverse))
            scales.columns.update(dict.fromkeys(linear.weights, factors))
        if self.norm is not None:
            scales.norms[self.norm.weight] = inverse
        if self.producer is not None:
            outputs = inverse.reshape(-1, *self.shared)[:, 0].reshape(-1)
            scales.rows.update(_by_tensor(self.producer, self.first_row, outputs))


def scalable_linears(config: DecoderConfig) -> list[ScalableLinear]:
    """All linears of a model whose inputs can be divided by factors where they are computed."""
    layers = (layer_layout(config, index) for index in range(config.layers))
    candidates = [each for layer in layers for each in _of_layer(layer, config)]
    return (
        candidates if config.tied_head else [*candidates, ScalableLinear(head_layout(config), norm=final_norm(config))]
    )


def _of_layer(layer: Layer, config: DecoderConfig) -> Iterator[ScalableLinear]:
    if layer.before_attention is not None:
        beside: tuple[FusedLinear, ...] = () if layer.gates is None else (layer.gates,)
        yield ScalableLinear(layer.qkv, norm=layer.before_attention, beside=beside)
    if (producer := layer.producer) is not None:
        yield ScalableLinear(layer.output, None, layer.qkv, producer.first_row, producer.shared)
    if layer.before_mlp is not None:
        # The router keeps its scores: its columns are multiplied by the same factors, and it stays in float32.
        of_shared = () if layer.shared is None else (layer.shared.gate_up, *filter(None, (layer.shared.gate,)))
        beside = () if layer.router is None else (layer.router, *of_shared)
        yield ScalableLinear(layer.gate_up, norm=layer.before_mlp, beside=beside)
    if layer.router is None:
        yield ScalableLinear(layer.down, producer=layer.gate_up, first_row=layer.gate_up.shape[0] // 2)
    elif config.experts is not None and not config.experts.up_offset and config.experts.limit is None:
        # The inputs of an expert's second linear are proportional to the rows of up of its first one. With bounds of
        # up, or a constant that is added to it, they would not be.
        for expert in range(layer.down.experts):
            second, first = _expert(layer.down, expert), _expert(layer.gate_up, expert)
            yield ScalableLinear(second, producer=first, first_row=first.shape[0] // 2)
    if (shared := layer.shared) is not None:
        yield ScalableLinear(shared.down, producer=shared.gate_up, first_row=shared.gate_up.shape[0] // 2)


def _expert(linear: FusedLinear, expert: int) -> FusedLinear:
    """One expert of a linear whose modules are apart."""
    modules = len(linear.modules) // linear.experts
    own = slice(expert * modules, (expert + 1) * modules)
    return FusedLinear(
        expert_of(linear.name, expert), linear.modules[own], linear.rows[own], linear.columns, linear.biased
    )


def _by_tensor(linear: FusedLinear, start: int, factors: Float32Array) -> Iterator[tuple[str, Float32Array]]:
    """Factors of a linear's outputs from row `start` on, by the names of its matrices and biases."""
    whole = np.ones(linear.shape[0], np.float32)
    whole[start : start + len(factors)] = factors
    parts = np.split(whole, np.cumsum(linear.rows)[:-1])
    for names in (linear.weights, linear.biases):
        yield from ((name, part) for name, part in zip(names, parts, strict=bool(names)) if (part != 1).any())


def _sampled_rows(source: ModelSource, linear: FusedLinear) -> Float32Array:
    """About `_SAMPLED_ROWS` rows of a linear, evenly spaced."""
    step = max(1, linear.shape[0] // _SAMPLED_ROWS)
    parts = (part for name in linear.weights for part in source.row_ranges(name))
    return np.concatenate([source.read_rows(part)[-part.start % step :: step] for part in parts])


def _best_scales(
    weights: Float32Array, inputs: InputStatistics, weight_format: WeightFormat, shared: tuple[int, int]
) -> Float32Array | None:
    """Factors of a linear's columns, float32 [K]; None where scaling gains too little."""
    magnitudes = inputs.mean_magnitude.astype(np.float64)
    groups = magnitudes.reshape(-1, *shared).mean(axis=1, keepdims=True)
    magnitudes = np.broadcast_to(groups, (groups.shape[0], *shared)).reshape(-1)
    if not magnitudes.any():
        return None
    logs = np.log(np.maximum(magnitudes, _MIN_MAGNITUDE * magnitudes.mean()))
    unscaled = _output_error(weights, inputs, weight_format, np.ones(len(magnitudes), np.float32))
    best, least = None, _MAX_ERROR_RATIO * unscaled
    for exponent in _EXPONENTS:
        factors = np.exp(exponent * (logs - (logs.max() + logs.min()) / 2)).astype(np.float32)
        error = _output_error(weights, inputs, weight_format, factors)
        if error < least:
            best, least = factors, error
    return best


def _output_error(
    weights: Float32Array, inputs: InputStatistics, weight_format: WeightFormat, factors: Float32Array
) -> float:
    """Mean squared error of the outputs of these rows, quantized with their columns multiplied by factors."""
    method = Method.K_QUANT if weight_format.method is Method.GPTQ else weight_format.method or Method.RTN
    diagonal = InputStatistics(inputs.mean_square / factors**2, inputs.mean_magnitude / factors)
    scaled = weights * factors
    rounded = dequantized(QUANTIZERS[method](scaled, weight_format, diagonal), scaled.shape[1], weight_format)
    error = rounded / factors - weights
    if inputs.second_moment is None:
        return float((np.square(error) @ inputs.mean_square).sum())
    return float(np.einsum("nk,nk->", error @ inputs.second_moment, error))
