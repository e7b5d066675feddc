"""Quantized linears on disk: every linear in every format, quantized once.

A search reads thousands of plans and a bundle is written from one of them; neither should quantize a matrix again. Each
folder of the store holds one linear in one format, as the arrays that the operators take. It appears whole or not at
all, so an interrupted run is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from ...models.array_file import map_array
from ...models.atomic import folder_written_atomically
from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import fused_linears
from ..checkpoint.source import (
    Float32Array,
    LowRankFactors,
    ModelSource,
    QuantizedRows,
    RowRange,
    in_order,
    joined_rows,
)
from ..quantization.codes import CorrectionTarget, InputStatistics, correction_factors, dequantized
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR


class QuantizedLinearStore:
    """The linears of a model in every requested format, on disk."""

    def __init__(
        self,
        source: ModelSource,
        config: DecoderConfig,
        folder: Path,
        correction_targets: Callable[[FusedLinear], CorrectionTarget] | None = None,
    ) -> None:
        """Open a store.

        Args:
            source: Quantizes the linears; the same whenever the folder is used.
            config: The model's numbers.
            folder: Folder of the store; created if necessary.
            correction_targets: Returns the weights and input statistics that a low-rank correction approximates;
                without it, the source's weights, with all inputs weighted alike.
        """
        self._source = source
        self.correction_target = correction_targets or self._own_weights
        """Returns the weights and input statistics that a low-rank correction of a linear approximates."""
        self._folder = folder
        self._linears = {linear.name: linear for linear in fused_linears(config)}
        self._tied = config.tied_head

    def make(self, linear: FusedLinear, weight_format: WeightFormat) -> None:
        """Quantize a linear unless the store has it.

        Raises:
            CheckpointError: A tensor cannot be read.
            OSError: The disk refused a write.
        """
        folder = self._folder_of(linear, weight_format)
        if weight_format.bits == 32 or folder.is_dir():
            return
        if weight_format.rank:  # the codes are shared with the format without a rank
            weights, inputs = self.correction_target(linear)
            if inputs is None:
                ones = np.ones(linear.columns, np.float32)
                inputs = InputStatistics(ones, ones)
            error = weights - self.weights(linear, replace(weight_format, rank=0))
            _save(folder, correction_factors(error, inputs, weight_format)._asdict())
            return
        ranges = (rows for name in linear.weights for rows in self._source.row_ranges(name))
        with _blas().limit(limits=1, user_api="blas"):
            pieces = list(in_order(lambda rows: self._source.quantized(rows, weight_format), ranges))
        _save(folder, joined_rows(pieces)._asdict())

    def quantized(self, linear: FusedLinear, weight_format: WeightFormat) -> QuantizedRows:
        """All rows of a quantized linear, memory-mapped; quantized first if necessary."""
        self.make(linear, weight_format)
        folder = self._folder_of(linear, weight_format)
        if weight_format.rank:
            mapped = (map_array(folder / f"{name}.npy") for name in LowRankFactors._fields)
            return self.quantized(linear, replace(weight_format, rank=0))._replace(factors=LowRankFactors(*mapped))
        files = (folder / f"{name}.npy" for name in QuantizedRows._fields)
        arrays: dict[str, Any] = {file.stem: map_array(file) for file in files if file.is_file()}
        return QuantizedRows(**arrays)

    def weights(self, linear: FusedLinear, weight_format: WeightFormat) -> Float32Array:
        """A linear's matrix, float32 [N, K], quantized and dequantized."""
        if weight_format.bits == 32:
            return self._own_weights(linear).weights
        return dequantized(self.quantized(linear, weight_format), linear.columns, weight_format)

    def view(self, plan: Mapping[str, WeightFormat]) -> StoredSource:
        """The source, with the codes of a plan's linears read from the store."""
        return StoredSource(self._source, {name: self._linears[name] for name in plan}, self.quantized)

    def _own_weights(self, linear: FusedLinear) -> CorrectionTarget:
        return CorrectionTarget(np.concatenate([self._source.read(name) for name in linear.weights]), None)

    def _folder_of(self, linear: FusedLinear, weight_format: WeightFormat) -> Path:
        name = HEAD_LINEAR if self._tied and linear.name == EMBEDDING_LINEAR else linear.name
        method = "" if weight_format.method is None else f"-{weight_format.method.value}"
        return self._folder / f"{name}-{str(weight_format).replace('/', '-')}{method}"


@lru_cache(1)
def _blas() -> ThreadpoolController:
    """Controls the threads of the BLAS library.

    Pieces are quantized on several threads, whose BLAS threads would wait for each other, spinning: an export by GPTQ
    took twice as long on a busy machine.
    """
    return ThreadpoolController()


class StoredSource(ModelSource):
    """A model source whose linears are read from a store, already quantized."""

    def __init__(
        self,
        source: ModelSource,
        linears: Mapping[str, FusedLinear],
        stored: Callable[[FusedLinear, WeightFormat], QuantizedRows],
    ) -> None:
        super().__init__(source)
        self._stored = stored
        self._offsets: dict[str, tuple[FusedLinear, int]] = {}
        """The linear that a matrix belongs to and the matrix's first row in it, by the matrix's name."""
        for linear in linears.values():
            first = 0
            for name, rows in zip(linear.weights, linear.rows, strict=True):
                self._offsets[name] = linear, first
                first += rows

    def quantized(self, rows: RowRange, weight_format: WeightFormat) -> QuantizedRows:
        """Quantized rows of a matrix, from the store."""
        if rows.name not in self._offsets:
            return self._source.quantized(rows, weight_format)
        linear, first = self._offsets[rows.name]
        part = slice(first + rows.start, first + rows.stop)
        packed, scales, offsets, points, factors = self._stored(linear, weight_format)
        return QuantizedRows(
            packed[part],
            scales[part],
            None if offsets is None else offsets[part],
            None if points is None else points[part],
            None
            if factors is None
            else factors._replace(up_codes=factors.up_codes[part], up_scales=factors.up_scales[part]),
        )


def _save(folder: Path, arrays: Mapping[str, npt.NDArray[Any] | None]) -> None:
    """Write the arrays that there are, each to a file of its own."""
    with folder_written_atomically(folder, replaceable=lambda _: False) as staging:
        for name, values in arrays.items():
            if values is not None:
                np.save(staging / f"{name}.npy", values, allow_pickle=False)
