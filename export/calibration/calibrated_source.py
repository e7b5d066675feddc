"""A model whose weights are put into few bits by what is known of the inputs of each linear."""

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

_KEPT: Final = 2
"""Units whose statistics stay in memory, with what methods make of them: one written and the next one begun."""


class Statistics(Protocol):
    """Statistics by unit (see `statistics.StatisticsStore`)."""

    def of(self, linear: str) -> InputStatistics | None:
        """What is known of a unit's inputs; None where nothing is."""
        ...


class CalibratedSource(ModelSourceWrapper):
    """Reads like the model it is made of; `quantized` gives each method the statistics of the unit."""

    def __init__(self, source: ModelSource, config: DecoderConfig, statistics: Statistics) -> None:
        """`statistics` are of the model that `source` is."""
        super().__init__(source)
        # A tied head comes after the embedding, and it is the head that multiplies.
        self._linears = {name: linear.name for linear in fused_linears(config) for name in linear.weights}
        self._statistics = lru_cache(_KEPT)(statistics.of)
        self._reading = threading.Lock()

    def quantized(self, rows: RowRange, form: WeightFormat) -> QuantizedRows:
        """Some rows of a matrix in few bits, by the method that the format names and what is known of their inputs."""
        weights = self._source.read_rows(rows)
        return QUANTIZERS[form.method or Method.RTN](weights, form, self._inputs(self._linears[rows.name]))

    def correction_target(self, linear: FusedLinear) -> CorrectionTarget:
        """A unit's weights, and what is known of its inputs."""
        return CorrectionTarget(
            np.concatenate([self._source.read(name) for name in linear.weights]), self._inputs(linear.name)
        )

    def _inputs(self, linear: str) -> InputStatistics | None:
        with self._reading:  # or two threads would have statistics of one unit apart, and what is made of them
            return self._statistics(linear)
