"""AWQ's scaling (Lin et al., 2023): columns of weights that meet large inputs are scaled up before they are rounded.

The inputs are scaled down by the same factors where they come from: in the norm before a unit, in the value heads
before the output projection, in `up` before `down`. In exact arithmetic the model stays what it was, and no graph has
anything more to do. Factors are mean |x_j| ** a, those of one unit about 1; `a` is searched for unit by unit, by the
error of the output after rounding.

What the original does besides, shrinking the range of each block, is left to the search of k-quant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...models.manifest import Method, WeightFormat
from ...models.progress import Progress
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, Layer, Norm, final_norm, head_layout, layer_layout
from ..checkpoint.prefetch import in_order
from ..checkpoint.source import Float32Array, ModelSource, ModelSourceWrapper, QuantizedRows, RowRange
from ..quantization.codes import dequantized
from ..quantization.input_statistics import InputStatistics
from ..quantization.methods import QUANTIZERS
from .calibrated_source import Statistics

_POWERS: Final = tuple(step / 10 for step in range(1, 10))
"""The tried `a`; 0 leaves the unit alone."""
_WORTH: Final = 0.98
"""Share of the error that may be left: less of a gain than that does not outlast another text."""
_ROWS: Final = 256
"""Rows of a unit by which the error is told, evenly spread."""
_NEGLIGIBLE: Final = 1e-4
"""Inputs smaller than this share of the mean count as large as this."""


@dataclass(frozen=True)
class AwqScales:
    """By what a model's tensors are to be multiplied; what is not named stays as it is."""

    columns: dict[str, Float32Array] = field(default_factory=dict)
    """Factors of a matrix's columns [K], by its name."""
    rows: dict[str, Float32Array] = field(default_factory=dict)
    """Factors of a matrix's rows or of a bias [N], by its name."""
    norms: dict[str, Float32Array] = field(default_factory=dict)
    """Factors of what a norm scales by, by the name of its weights."""
    inputs: dict[str, Float32Array] = field(default_factory=dict)
    """Factors of a unit's inputs [K], by the unit's name."""


class AwqSource(ModelSourceWrapper):
    """Reads like a model multiplied by `AwqScales`."""

    def __init__(self, source: ModelSource, config: DecoderConfig, folds: AwqScales) -> None:
        super().__init__(source)
        self._plus = np.float32(config.traits.norms_add_one)
        self.folds: Final = folds

    def read(self, name: str) -> Float32Array:
        """See `ModelSource.read`."""
        value = self._source.read(name)
        if value.ndim == 2:
            return self._multiplied(value, RowRange(name, 0, len(value)))
        if name in self.folds.norms:
            scaled: Float32Array = (value + self._plus) * self.folds.norms[name] - self._plus
            return scaled
        return value * self.folds.rows[name] if name in self.folds.rows else value

    def read_rows(self, rows: RowRange) -> Float32Array:
        """See `ModelSource.read_rows`."""
        return self._multiplied(self._source.read_rows(rows), rows)

    def chunks(self, name: str) -> Iterator[Float32Array]:
        """See `ModelSource.chunks`."""
        return in_order(self.read_rows, self.row_ranges(name))

    def quantized(self, rows: RowRange, form: WeightFormat) -> QuantizedRows:
        """Some rows of a matrix in few bits, by the method that the format names."""
        return QUANTIZERS[form.method or Method.RTN](self.read_rows(rows), form)

    def stored_format(self, name: str) -> WeightFormat:  # noqa: ARG002 -- what is multiplied has no codes of its own
        """Float32."""
        return WeightFormat(32)

    def _multiplied(self, weights: Float32Array, rows: RowRange) -> Float32Array:
        if rows.name in self.folds.columns:
            weights = weights * self.folds.columns[rows.name]
        if rows.name in self.folds.rows:
            weights = weights * self.folds.rows[rows.name][rows.start : rows.stop, None]
        return weights


class AwqStatistics:
    """The statistics of a model multiplied by `AwqScales`."""

    def __init__(self, statistics: Statistics, folds: AwqScales) -> None:
        self._statistics = statistics
        self._folds = folds

    def of(self, linear: str) -> InputStatistics | None:
        """See `Statistics.of`."""
        known, factors = self._statistics.of(linear), self._folds.inputs.get(linear)
        return known if known is None or factors is None else scaled_inputs(known, factors)


def scaled_inputs(inputs: InputStatistics, factors: Float32Array) -> InputStatistics:
    """What is known of inputs once they are multiplied by factors [K]."""
    moments = inputs.second_moment
    return InputStatistics(
        inputs.mean_square * factors**2,
        inputs.mean_magnitude * factors,
        None if moments is None else moments * factors[:, None] * factors,
        inputs.tokens,
    )


def fold(
    source: ModelSource, config: DecoderConfig, statistics: Statistics, form: WeightFormat, progress: Progress
) -> tuple[AwqSource, AwqStatistics]:
    """Find factors for every unit whose inputs can be scaled where they come from, and apply them.

    Args:
        source: the model's tensors.
        config: its numbers; without experts.
        statistics: of its units' inputs.
        form: the format by whose errors factors are chosen, with the method that will round (of GPTQ, k-quant's error
            is taken, which needs no factor of each trial's moments).
        progress: hears the stage "folding".

    Returns:
        The model so multiplied, and the statistics of its inputs.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    places = list(_places(config))
    found: dict[str, Float32Array] = {}

    def search(place: _Place) -> Float32Array | None:
        known = statistics.of(place.linear.name)
        return None if known is None else _factors(_some_rows(source, place.linear), known, form, place.sharing)

    for number, (place, factors) in enumerate(zip(places, in_order(search, places), strict=True)):
        progress("folding", number / len(places))
        if factors is not None:
            found[place.linear.name] = factors
    progress("folding", 1.0)
    folds = AwqScales()
    for place in places:
        if place.linear.name in found:
            place.enter(folds, found[place.linear.name])
    return AwqSource(source, config, folds), AwqStatistics(statistics, folds)


@dataclass(frozen=True)
class _Place:
    """A unit whose inputs come from somewhere that can take a factor for each."""

    linear: FusedLinear
    norm: Norm | None = None
    """The norm before it."""
    before: FusedLinear | None = None
    """Or the linear whose outputs its inputs are multiples of."""
    at: int = 0
    """Where in that linear's rows they begin."""
    sharing: tuple[int, int] = (1, 1)
    """Inputs that have one factor: so many heads side by side, of so many channels each."""

    def enter(self, folds: AwqScales, factors: Float32Array) -> None:
        """Multiply the unit's columns by factors [K], and divide what its inputs come from."""
        inverse = np.reciprocal(factors)
        folds.inputs[self.linear.name] = inverse
        folds.columns.update(dict.fromkeys(self.linear.weights, factors))
        if self.norm is not None:
            folds.norms[self.norm.weight] = inverse
        if self.before is not None:
            folds.rows.update(_by_tensor(self.before, self.at, inverse.reshape(-1, *self.sharing)[:, 0].reshape(-1)))


def _places(config: DecoderConfig) -> Iterator[_Place]:
    for index in range(config.layers):
        yield from _places_of(layer_layout(config, index), config)
    if not config.tied_head:
        yield _Place(head_layout(config), norm=final_norm(config))


def _places_of(layer: Layer, config: DecoderConfig) -> Iterator[_Place]:
    if layer.before_attention is not None:
        yield _Place(layer.qkv, norm=layer.before_attention)
    # What a value head gives goes to the query heads of its group.
    yield _Place(
        layer.output,
        before=layer.qkv,
        at=config.query_width + config.kv_width,
        sharing=(config.heads // config.kv_heads, config.head_dim),
    )
    if layer.before_mlp is not None:
        yield _Place(layer.gate_up, norm=layer.before_mlp)
    yield _Place(layer.down, before=layer.gate_up, at=config.intermediate_size)


def _by_tensor(linear: FusedLinear, start: int, factors: Float32Array) -> Iterator[tuple[str, Float32Array]]:
    """Factors of a unit's outputs from `start` on, by the names of its matrices and biases."""
    whole = np.ones(linear.shape[0], np.float32)
    whole[start : start + len(factors)] = factors
    parts = np.split(whole, np.cumsum(linear.rows)[:-1])
    for names in (linear.weights, linear.biases):
        yield from ((name, part) for name, part in zip(names, parts, strict=bool(names)) if (part != 1).any())


def _some_rows(source: ModelSource, linear: FusedLinear) -> Float32Array:
    """Rows of a unit from top to bottom, about `_ROWS` of them."""
    step = max(1, linear.shape[0] // _ROWS)
    parts = (part for name in linear.weights for part in source.row_ranges(name))
    return np.concatenate([source.read_rows(part)[-part.start % step :: step] for part in parts])


def _factors(
    weights: Float32Array, inputs: InputStatistics, form: WeightFormat, sharing: tuple[int, int]
) -> Float32Array | None:
    """Factors of a unit's columns, float32 [K]; None where none are worth it."""
    sizes = inputs.mean_magnitude.astype(np.float64)
    shared = sizes.reshape(-1, *sharing).mean(axis=1, keepdims=True)
    sizes = np.broadcast_to(shared, (shared.shape[0], *sharing)).reshape(-1)
    if not sizes.any():
        return None
    logs = np.log(np.maximum(sizes, _NEGLIGIBLE * sizes.mean()))
    best, least = None, _WORTH * _error(weights, inputs, form, np.ones(len(sizes), np.float32))
    for power in _POWERS:
        factors = np.exp(power * (logs - (logs.max() + logs.min()) / 2)).astype(np.float32)
        error = _error(weights, inputs, form, factors)
        if error < least:
            best, least = factors, error
    return best


def _error(weights: Float32Array, inputs: InputStatistics, form: WeightFormat, factors: Float32Array) -> float:
    """Mean squared error of the outputs of these rows, rounded after their columns are multiplied by factors."""
    method = Method.K_QUANT if form.method is Method.GPTQ else form.method or Method.RTN
    diagonal = InputStatistics(inputs.mean_square / factors**2, inputs.mean_magnitude / factors)
    scaled = weights * factors
    error = dequantized(QUANTIZERS[method](scaled, form, diagonal), scaled.shape[1], form) / factors - weights
    if inputs.second_moment is None:
        return float((np.square(error) @ inputs.mean_square).sum())
    return float(np.einsum("nk,nk->", error @ inputs.second_moment, error))
