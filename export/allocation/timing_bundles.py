"""Models of random weights on which the times of linears are measured.

Together the models have each linear of a layer and the head in every format. They have all layers of the model, or
enough of them not to fit into any cache, so that weights come from memory as they do in use. The time of a pass does
not depend on the weights' values. A few further models have a single format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np

from ...models.bundle import GRAPH_NAME, WEIGHTS_NAME, digest_file, mark_verified
from ...models.manifest import MANIFEST_NAME, WeightFormat
from ..bundle_content import BundleContent
from ..bundle_writer import write_graph
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, QuantPlan
from ..checkpoint.layout import expected_tensors, layer_layout
from ..checkpoint.source import (
    Float32Array,
    ModelSource,
    QuantizedRows,
    RowRange,
    ranges_of_rows,
)
from ..quantization.codes import blocks_of
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR, is_allowed

_CONTEXT: Final = 1024
_SMALL_MODEL: Final = 64_000_000
"""Number of layer weights up to which every model has all layers: such weights may partly lie in a cache."""
_LARGE_MODEL: Final = 2_000_000_000
"""Number of layer weights beyond which even the first model has fewer layers."""
_LARGE_UNIFORM_MODEL: Final = 600_000_000
"""Number of layer weights beyond which a model of a single format has fewer layers."""
_MAGNITUDE: Final = np.float32(0.02)


@dataclass(frozen=True)
class TimingBundle:
    """One of the models: its numbers, and the formats of its linears."""

    config: DecoderConfig
    plan: QuantPlan

    def write(self, folder: Path) -> None:
        """Write its bundle, without a tokenizer, into a new folder.

        Raises:
            OSError: The disk refused a write.
        """
        folder.mkdir(parents=True)
        source, context = _RandomSource(self.config, folder), min(_CONTEXT, self.config.default_positions)
        content = BundleContent(source=source, original=source, config=self.config, plan=self.plan, context=context)
        _, manifest = write_graph(folder, content)
        files = {**manifest.files, GRAPH_NAME: digest_file(folder / GRAPH_NAME)}
        (folder / MANIFEST_NAME).write_text(replace(manifest, files=files).to_json(), encoding="utf-8")
        mark_verified(folder / WEIGHTS_NAME, files[WEIGHTS_NAME])


def timing_bundles(config: DecoderConfig, formats: Sequence[WeightFormat]) -> list[TimingBundle]:
    """As many models as there are formats; the first one has all layers unless they are too large."""
    body = _layer_weights(config)
    max_layers = max(len(formats), int(_LARGE_MODEL * config.layers / body))
    other_layers = config.layers if body <= _SMALL_MODEL else 1
    least = _layers_of_all_kinds(config)
    depths = [max(least, min(config.layers, max_layers))] + [max(least, other_layers)] * (len(formats) - 1)
    return [_bundle(config, layers, formats, first) for first, layers in enumerate(depths)]


def uniform_bundles(config: DecoderConfig, formats: Sequence[WeightFormat]) -> list[TimingBundle]:
    """For every number of bits a model of one format, the one with the largest blocks."""
    largest: dict[int, WeightFormat] = {}
    for each in formats:
        known = largest.get(each.bits)
        if known is None or known.block < each.block:
            largest[each.bits] = each
    layers = max(2, _layers_of_all_kinds(config), int(_LARGE_UNIFORM_MODEL * config.layers / _layer_weights(config)))
    layers = min(config.layers, layers)
    return [_bundle(config, layers, [each, *formats], 0, cycle=1) for _, each in sorted(largest.items())]


def _layers_of_all_kinds(config: DecoderConfig) -> int:
    """Smallest number of first layers that have linears of every kind that the model has."""
    kinds = [
        frozenset(linear.name.rsplit(".", 1)[-1] for linear in layer_layout(config, index).linears)
        for index in range(config.layers)
    ]
    return 1 + max(kinds.index(kind) for kind in set(kinds))


def _layer_weights(config: DecoderConfig) -> int:
    layers = (layer_layout(config, index) for index in range(config.layers))
    return sum(linear.weight_count for layer in layers for linear in layer.linears)


def _bundle(
    config: DecoderConfig, layers: int, formats: Sequence[WeightFormat], first: int, cycle: int | None = None
) -> TimingBundle:
    """A model of the first layers, whose formats rotate from the one at index `first`.

    All formats take turns, or the first `cycle`; the others are for linears that cannot have these.
    The head is tied, whatever the model's is: that saves writing a matrix and takes the same time.
    """
    short = replace(config.first_layers(layers), tied_head=True)
    plan = {EMBEDDING_LINEAR: formats[first], HEAD_LINEAR: formats[first]}
    for index in range(layers):
        for place, linear in enumerate(layer_layout(short, index).linears):
            number = (index + place + first) % (cycle or len(formats))
            plan.setdefault(linear.name, _timed_format(linear, formats, number))
            if linear.paired is not None:
                plan[linear.paired.name] = plan[linear.name]
    return TimingBundle(short, plan)


def _timed_format(linear: FusedLinear, formats: Sequence[WeightFormat], first: int) -> WeightFormat:
    """The first of the formats from index `first` on that a linear can have."""
    in_turn = (formats[(first + number) % len(formats)] for number in range(len(formats)))
    allowed = (each for each in in_turn if is_allowed(linear, each) and not linear.exact)
    return next(allowed, WeightFormat(32))


class _RandomSource(ModelSource):
    """Random tensors of a model's shapes."""

    def __init__(self, config: DecoderConfig, folder: Path) -> None:
        self.folder = folder
        self._shapes: Mapping[str, tuple[int, ...]] = dict(expected_tensors(config))
        self._generator = np.random.default_rng(0)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Float32Array:
        return self._normal(self._shapes[name])

    def read_rows(self, rows: RowRange) -> Float32Array:
        return self._normal((rows.stop - rows.start, self._shapes[rows.name][1]))

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        return ranges_of_rows(name, *self.shape(name))

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        count, columns = rows.stop - rows.start, self._shapes[rows.name][1]
        # Each part has its own generator: they are made on several threads, and must differ, since ONNX Runtime packs
        # equal matrices once and would read them from a cache.
        generator = np.random.default_rng((crc32(rows.name.encode()), rows.start))
        shape = count, blocks_of(columns, weight_format)
        codes = generator.integers(0, 256, (*shape, weight_format.block * weight_format.bits // 8), np.uint8)
        return QuantizedRows(codes, np.full(shape, _MAGNITUDE / (1 << weight_format.bits - 1), np.float32))

    def _normal(self, shape: tuple[int, ...]) -> Float32Array:
        values: Float32Array = self._generator.standard_normal(shape, np.float32) * _MAGNITUDE
        return values
