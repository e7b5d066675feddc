"""A model source that quantizes linears with statistics of their inputs."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Final, Protocol

import numpy as np

from ...models.manifest import Method, WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, fused_linears
from ..checkpoint.source import ModelSource, ModelSourceWrapper, QuantizedRows, RowRange
from ..quantization.input_statistics import CorrectionTarget, InputStatistics
from ..quantization.methods import QUANTIZERS

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
        self._linears = {name: linear.name for linear in fused_linears(config) for name in linear.weights}
        self._statistics = lru_cache(_CACHED_LINEARS)(statistics.of)
        self._lock = threading.Lock()

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Quantize rows of a matrix by the method of the format and the statistics of its inputs."""
        quantizer = QUANTIZERS[weight_format.method or Method.RTN]
        return quantizer(self._source.read_rows(rows), weight_format, self._inputs(self._linears[rows.name]))

    def correction_target(self, linear: FusedLinear) -> CorrectionTarget:
        """A linear's weights and the statistics of its inputs."""
        weights = np.concatenate([self._source.read(name) for name in linear.weights])
        return CorrectionTarget(weights, self._inputs(linear.name))

    def _inputs(self, linear: str) -> InputStatistics | None:
        with self._lock:  # so that two threads do not load the same statistics twice
            return self._statistics(linear)
