"""Models of random weights, of the shape of a model whose units are to be timed.

Between them, each of a layer's units and the head have every format; and as many layers as there are, or as make a
model too large for any cache, come one after the other, so that weights come from where they will come from in use.
What a pass takes does not depend on the weights' values. Some models more have a single format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from zlib import crc32

import numpy as np

from ...models.bundle import GRAPH_NAME, WEIGHTS_NAME, digest_file, remember_verified
from ...models.manifest import MANIFEST_NAME, FileDigest, Manifest, WeightFormat
from ..bundle_writer import PRODUCER, architecture_of
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import expected_tensors, fused_linears, layer_layout
from ..checkpoint.source import Float32Array, LowRankFactors, QuantizedRows, RowRange, UInt8Array
from ..graph.decoder import build_graph
from ..graph.initializers import Initializers
from ..graph.weight_file import WeightFile
from ..quantization.codes import blocks_of, factor_format
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR, may_have

_CONTEXT: Final = 1024
_SMALL: Final = 64_000_000
"""Weights of all layers up to which the other models have all layers, too: they may lie in a cache, all or in part."""
_LARGE: Final = 2_000_000_000
"""Weights of all layers beyond which even the first model does not have all of them."""
_UNIFORM: Final = 600_000_000
"""Weights of all layers beyond which a model of a single format does not have all of them."""
_PIECE: Final = 1 << 20
_MAGNITUDE: Final = np.float32(0.02)


@dataclass(frozen=True)
class TimingBundle:
    """One of the models: its numbers, and the formats of its units."""

    config: DecoderConfig
    plan: Mapping[str, WeightFormat]

    def write(self, folder: Path) -> None:
        """Write its bundle, without a tokenizer, into a folder that is made for it.

        Raises:
            OSError: the disk refused a write.
        """
        folder.mkdir(parents=True)
        config, context = self.config, min(_CONTEXT, self.config.default_positions)
        with WeightFile(folder / WEIGHTS_NAME) as data:
            weights = Initializers(_RandomSource(config, folder), data, lambda _: None)
            (folder / GRAPH_NAME).write_bytes(build_graph(config, context, self.plan, weights).SerializeToString())
            files: dict[str, FileDigest] = {WEIGHTS_NAME: data.digest()}
        files[GRAPH_NAME] = digest_file(folder / GRAPH_NAME)
        manifest = Manifest(
            architecture=architecture_of(config, context),
            weights=self.plan,
            bits_per_weight=sum(weights.linear_bits.values())
            / sum(linear.weight_count for linear in fused_linears(config)),
            files=files,
            producer=PRODUCER,
        )
        (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        remember_verified(folder / WEIGHTS_NAME, files[WEIGHTS_NAME])


def timing_bundles(config: DecoderConfig, forms: Sequence[WeightFormat]) -> list[TimingBundle]:
    """As many models as there are formats. The first has all layers, unless that is too much."""
    body = sum(linear.weight_count for index in range(config.layers) for linear in layer_layout(config, index).linears)
    most = max(len(forms), int(_LARGE * config.layers / body))
    others = config.layers if body <= _SMALL else 1
    depths = [min(config.layers, most)] + [others] * (len(forms) - 1)
    return [_bundle(config, layers, forms, turn) for turn, layers in enumerate(depths)]


def uniform_bundles(config: DecoderConfig, forms: Sequence[WeightFormat]) -> list[TimingBundle]:
    """For every number of bits among the formats a model in that one with the largest blocks."""
    largest: dict[int, WeightFormat] = {}
    for form in forms:
        known = largest.get(form.bits)
        if not form.rank and (known is None or known.block < form.block):
            largest[form.bits] = form
    body = sum(linear.weight_count for index in range(config.layers) for linear in layer_layout(config, index).linears)
    layers = min(config.layers, max(2, int(_UNIFORM * config.layers / body)))
    return [_bundle(config, layers, [form], 0) for _, form in sorted(largest.items())]


def _bundle(config: DecoderConfig, layers: int, forms: Sequence[WeightFormat], turn: int) -> TimingBundle:
    """A model of the first layers, whose formats begin with the one at `turn`.

    The head is tied, whatever the model's is: there is one matrix less to write, and a pass takes the same.
    """
    short = replace(config, layers=layers, attention=config.attention[:layers], tied_head=True)
    outer = replace(forms[turn], rank=0)
    plan = {EMBEDDING_LINEAR: outer, HEAD_LINEAR: outer}
    for index in range(layers):
        for place, linear in enumerate(layer_layout(short, index).linears):
            form = forms[(index + place + turn) % len(forms)]
            plan[linear.name] = form if may_have(linear, form) else replace(form, rank=0)
    return TimingBundle(short, plan)


class _RandomSource:
    """Random tensors of a model's shapes; a `ModelSource`."""

    def __init__(self, config: DecoderConfig, folder: Path) -> None:
        self._folder = folder
        self._shapes: Mapping[str, tuple[int, ...]] = dict(expected_tensors(config))
        self._numbers = np.random.default_rng(0)

    @property
    def folder(self) -> Path:
        return self._folder

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        if self._shapes[name] != shape:
            raise ValueError(f"{name} has the shape {self._shapes[name]}, not {shape}")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Float32Array:
        return self._normal(self._shapes[name])

    def read_rows(self, rows: RowRange) -> Float32Array:
        return self._normal((rows.stop - rows.start, self._shapes[rows.name][1]))

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        rows, columns = self._shapes[name]
        step = max(1, _PIECE // columns)
        for start in range(0, rows, step):
            yield RowRange(name, start, min(start + step, rows))

    def chunks(self, name: str) -> Iterator[Float32Array]:
        for rows in self.row_ranges(name):
            yield self.read_rows(rows)

    def quantized(self, rows: RowRange, form: WeightFormat) -> QuantizedRows:
        count, columns = rows.stop - rows.start, self._shapes[rows.name][1]
        # A generator for each piece: they are made on several threads, and no two may be alike, or ONNX Runtime packs
        # equal matrices once and reads them from a cache.
        random = np.random.default_rng((crc32(rows.name.encode()), rows.start))
        factors = None
        if form.rank:
            stored = factor_format(form)
            factors = LowRankFactors(
                *_codes(random, form.rank, columns, stored), *_codes(random, count, form.rank, stored)
            )
        return QuantizedRows(*_codes(random, count, columns, form), factors=factors)

    def stored_format(self, name: str) -> WeightFormat:
        raise ValueError(f"{name} has the format that is asked for")

    def _normal(self, shape: tuple[int, ...]) -> Float32Array:
        numbers: Float32Array = self._numbers.standard_normal(shape, np.float32) * _MAGNITUDE
        return numbers


def _codes(random: np.random.Generator, rows: int, columns: int, form: WeightFormat) -> tuple[UInt8Array, Float32Array]:
    """Codes and scales of a matrix."""
    shape = rows, blocks_of(columns, form)
    packed = random.integers(0, 256, (*shape, form.block * form.bits // 8), np.uint8)
    return packed, np.full(shape, _MAGNITUDE / (1 << form.bits - 1), np.float32)
