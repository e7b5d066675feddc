"""A model source that quantizes linears with statistics of their inputs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from ...models.manifest import Method, WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import fused_linears
from ..checkpoint.source import ModelSource, ModelSourceWrapper, QuantizedRows, RowRange, joined_rows
from ..quantization.codes import CorrectionTarget, InputStatistics
from ..quantization.methods import QUANTIZERS
from .expert_layers import expert_of

_CACHED_LINEARS: Final = 2
"""Number of linears whose statistics stay in memory, with what methods derive from them: the one that is written and
the next one."""


class Statistics(Protocol):
    """Input statistics of linears (see `collect_statistics.StatisticsStore`)."""

    def of(self, linear: str) -> InputStatistics | None:
        """Statistics of a linear's inputs; None where there are none."""
        ...


class CalibratedSource(ModelSourceWrapper):
    """Wraps a source, and quantizes with the statistics of its linears' inputs."""

    def __init__(self, source: ModelSource, config: DecoderConfig, statistics: Statistics) -> None:
        super().__init__(source)
        # A tied head comes after the embedding, and its statistics are the ones that matter.
        self._linears = {name: linear for linear in fused_linears(config) for name in linear.weights}
        self._statistics = lru_cache(_CACHED_LINEARS)(statistics.of)
        self._lock = threading.Lock()

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Quantize rows of a matrix by the method of the format and the statistics of its inputs."""
        quantizer, weights = QUANTIZERS[weight_format.method or Method.RTN], self._source.read_rows(rows)
        parts = [
            quantizer(weights[start - rows.start : stop - rows.start], weight_format, self._inputs(name))
            for name, start, stop in _statistics_of(self._linears[rows.name], rows)
        ]
        return parts[0] if len(parts) == 1 else joined_rows(parts)

    def correction_target(self, linear: FusedLinear) -> CorrectionTarget:
        """A linear's weights and the statistics of its inputs."""
        weights = np.concatenate([self._source.read(name) for name in linear.weights])
        return CorrectionTarget(weights, self._inputs(linear.name))

    def _inputs(self, linear: str) -> InputStatistics | None:
        with self._lock:  # so that two threads do not load the same statistics twice
            return self._statistics(linear)


def _statistics_of(linear: FusedLinear, rows: RowRange) -> Iterator[tuple[str, int, int]]:
    """Names under which the statistics of rows of a matrix are known, with the rows that each is for."""
    if not linear.experts:
        yield linear.name, rows.start, rows.stop
    elif not linear.stacked:
        modules = len(linear.weights) // linear.experts
        yield expert_of(linear.name, linear.weights.index(rows.name) // modules), rows.start, rows.stop
    else:
        size = linear.shape[0] // linear.experts
        for expert in range(rows.start // size, -(-rows.stop // size)):
            yield (
                expert_of(linear.name, expert),
                max(rows.start, expert * size),
                min(rows.stop, (expert + 1) * size),
            )
