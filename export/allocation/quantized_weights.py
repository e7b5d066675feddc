"""Quantized linears on disk: every linear in every format, quantized once.

A search reads thousands of plans and a bundle is written from one of them; neither should quantize a matrix again. Each
folder of the store holds one linear in one format, as the arrays that the operators take. It appears whole or not at
all, so an interrupted run is resumed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from ...models.array_file import map_array
from ...models.atomic import folder_written_atomically
from ...models.manifest import Method, WeightFormat
from ..calibration.layer_graphs import expert_of
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import fused_linears
from ..checkpoint.source import (
    Float32Array,
    ModelSource,
    QuantizedRows,
    RowRange,
    in_order,
    joined_rows,
)
from ..quantization.codes import InputStatistics, StatisticsOf, dequantized
from ..quantization.gptq import gptq_rows
from ..quantization.methods import QUANTIZERS
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR

_CACHED_LINEARS: Final = 2
"""Number of linears whose statistics stay in memory, with what methods derive from them: the one that is written and
the next one."""
_BLAS: Final = ThreadpoolController()
"""Controls the threads of the BLAS library. Pieces are quantized on several threads, whose BLAS threads would wait for
each other, spinning: an export by GPTQ took twice as long on a busy machine."""


class Target(NamedTuple):
    """What a linear that is quantized by GPTQ approximates in place of its own weights."""

    weights: Float32Array
    """[N, K]."""
    inputs: InputStatistics
    outputs_of: Callable[[RowRange], Float32Array | None]
    """Returns the second moments of the gradients at the outputs of rows of a matrix (see `gptq_rows`)."""


class QuantizedLinearStore(ModelSource):
    """A model source whose linears are quantized once in every requested format, and kept on disk."""

    def __init__(
        self, source: ModelSource, config: DecoderConfig, folder: Path, statistics: StatisticsOf | None = None
    ) -> None:
        """Open a store.

        Args:
            source: The model's tensors; the same whenever the folder is used.
            config: The model's numbers.
            folder: Folder of the store; created if necessary.
            statistics: Returns the statistics of a linear's inputs; None to quantize linears as the source does.
        """
        super().__init__(source)
        self.statistics = statistics
        self._cached_statistics = lru_cache(_CACHED_LINEARS)(statistics or (lambda _: None))
        self._lock = threading.Lock()
        self._folder = folder
        self._tied = config.tied_head
        self._places: dict[str, tuple[FusedLinear, int]] = {}
        """The linear that a matrix belongs to and the matrix's first row in it, by the matrix's name."""
        # A tied head comes after the embedding, and its statistics are the ones that matter.
        for linear in fused_linears(config):
            firsts = np.cumsum([0, *linear.rows]).tolist()
            self._places.update((name, (linear, first)) for name, first in zip(linear.weights, firsts, strict=False))

    def make(self, linear: FusedLinear, weight_format: WeightFormat, target: Target | None = None) -> None:
        """Quantize a linear unless the store has it.

        Raises:
            CheckpointError: A tensor cannot be read.
            OSError: The disk refused a write.
        """
        if self.has(linear, weight_format):
            return
        ranges = (rows for name in linear.weights for rows in self.row_ranges(name))
        with _BLAS.limit(limits=1, user_api="blas"):
            pieces = list(in_order(lambda rows: self._new_rows(rows, weight_format, target), ranges))
        self.keep(linear, weight_format, joined_rows(pieces))

    def has(self, linear: FusedLinear, weight_format: WeightFormat) -> bool:
        """Whether the store has a linear, or it is not quantized."""
        return weight_format.bits == 32 or self._folder_of(linear, weight_format).is_dir()

    def keep(self, linear: FusedLinear, weight_format: WeightFormat, rows: QuantizedRows) -> None:
        """Keep a quantized linear unless the store has it.

        Raises:
            OSError: The disk refused a write.
        """
        if not self.has(linear, weight_format):
            _save(self._folder_of(linear, weight_format), rows._asdict())

    def whole(self, linear: FusedLinear, weight_format: WeightFormat) -> QuantizedRows:
        """All rows of a quantized linear, memory-mapped; quantized first if necessary."""
        self.make(linear, weight_format)
        folder = self._folder_of(linear, weight_format)
        files = (folder / f"{name}.npy" for name in QuantizedRows._fields)
        arrays: dict[str, Any] = {file.stem: map_array(file) for file in files if file.is_file()}
        return QuantizedRows(**arrays)

    def weights(self, linear: FusedLinear, weight_format: WeightFormat) -> Float32Array:
        """A linear's matrix, float32 [N, K], quantized and dequantized."""
        if weight_format.bits == 32:
            return np.concatenate([self.read(name) for name in linear.weights])
        return dequantized(self.whole(linear, weight_format), linear.columns, weight_format)

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Quantized rows of a matrix; those of a linear are read from the store."""
        if rows.name not in self._places:
            return self._source.quantized(rows, weight_format)
        linear, first = self._places[rows.name]
        part = slice(first + rows.start, first + rows.stop)
        own: list[Any] = [None if each is None else each[part] for each in self.whole(linear, weight_format)]
        return QuantizedRows(*own)

    def _new_rows(self, rows: RowRange, weight_format: WeightFormat, target: Target | None) -> QuantizedRows:
        """Quantize rows of a matrix by the method of the format, or as the source does without statistics."""
        quantizer, (linear, first) = QUANTIZERS[weight_format.method or Method.RTN], self._places[rows.name]
        if target is not None:
            own = target.weights[first + rows.start : first + rows.stop]
            return gptq_rows(own, weight_format, target.inputs, target.outputs_of(rows))
        if self.statistics is None:
            return self._source.quantized(rows, weight_format)
        weights = self.read_rows(rows)
        parts = [
            quantizer(weights[start - rows.start : stop - rows.start], weight_format, self._inputs(name))
            for name, start, stop in _statistics_of(linear, rows)
        ]
        return parts[0] if len(parts) == 1 else joined_rows(parts)

    def _inputs(self, linear: str) -> InputStatistics | None:
        with self._lock:  # so that two threads do not load the same statistics twice
            return self._cached_statistics(linear)

    def _folder_of(self, linear: FusedLinear, weight_format: WeightFormat) -> Path:
        name = HEAD_LINEAR if self._tied and linear.name == EMBEDDING_LINEAR else linear.name
        method = "" if weight_format.method is None else f"-{weight_format.method.value}"
        return self._folder / f"{name}-{str(weight_format).replace('/', '-')}{method}"


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
            yield (expert_of(linear.name, expert), max(rows.start, expert * size), min(rows.stop, (expert + 1) * size))


def _save(folder: Path, arrays: Mapping[str, npt.NDArray[Any] | None]) -> None:
    """Write the arrays that there are, each to a file of its own."""
    with folder_written_atomically(folder, replaceable=lambda _: False) as staging:
        for name, values in arrays.items():
            if values is not None:
                np.save(staging / f"{name}.npy", values, allow_pickle=False)
