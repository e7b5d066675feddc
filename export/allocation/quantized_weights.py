"""Every unit in every format that a plan may give it, rounded once and kept on disk.

A search looks at thousands of plans and a bundle is written from one of them: neither should round a matrix again. A
folder holds a unit in a format, as the arrays that the operators take; it appears whole or not at all, so what an
interrupted run has made is found by the next.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from ...models.atomic import folder_written_atomically
from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, fused_linears
from ..checkpoint.prefetch import in_order
from ..checkpoint.source import Float32Array, LowRankFactors, ModelSource, ModelSourceWrapper, QuantizedRows, RowRange
from ..quantization.codes import dequantized
from ..quantization.input_statistics import CorrectionTarget, InputStatistics
from ..quantization.low_rank_correction import correction_factors
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR


class QuantizedLinearStore:
    """The units of a source in few bits, on disk."""

    def __init__(
        self,
        source: ModelSource,
        config: DecoderConfig,
        folder: Path,
        correction_targets: Callable[[FusedLinear], CorrectionTarget] | None = None,
    ) -> None:
        """Open a store, with what is in it.

        Args:
            source: what rounds the units; the same whenever the folder is used.
            config: the model's numbers.
            folder: of the store's files; made if need be.
            aims: what a repaired unit should compute; without it, the source's weights, and all inputs count alike.
        """
        self._source = source
        self._aims = correction_targets or self._own_weights
        self._folder = folder
        self._linears = {linear.name: linear for linear in fused_linears(config)}
        self._tied = config.tied_head

    def make(self, linear: FusedLinear, form: WeightFormat) -> None:
        """Round a unit, unless that has been done.

        Raises:
            CheckpointError: a tensor cannot be read.
            OSError: the disk refused a write.
        """
        folder = self._place(linear, form)
        if form.bits == 32 or folder.is_dir():
            return
        if form.rank:
            self._make_factors(linear, form)
            return
        ranges = (rows for name in linear.weights for rows in self._source.row_ranges(name))
        with _blas().limit(limits=1, user_api="blas"):
            pieces = list(in_order(lambda rows: self._source.quantized(rows, form), ranges))
        with folder_written_atomically(folder, replaceable=lambda _: False) as staging:
            for field, parts in zip(QuantizedRows._fields, zip(*pieces, strict=True), strict=True):
                if parts[0] is not None:
                    np.save(staging / f"{field}.npy", np.concatenate(parts), allow_pickle=False)

    def quantized(self, linear: FusedLinear, form: WeightFormat) -> QuantizedRows:
        """All rows of a unit in few bits, mapped from disk; rounded first if need be."""
        self.make(linear, form)
        folder = self._place(linear, form)
        if form.rank:
            mapped = (
                np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in LowRankFactors._fields
            )
            return self.quantized(linear, replace(form, rank=0))._replace(factors=LowRankFactors(*mapped))
        return QuantizedRows(
            np.load(folder / "packed.npy", mmap_mode="r", allow_pickle=False),
            np.load(folder / "scales.npy", mmap_mode="r", allow_pickle=False),
            _mapped(folder / "offsets.npy"),
            _mapped(folder / "zero_points.npy"),
        )

    def weights(self, linear: FusedLinear, form: WeightFormat) -> Float32Array:
        """A unit's matrix, float32 [N, K], rounded to a format and back."""
        if form.bits == 32:
            return self._own_weights(linear).weights
        return dequantized(self.quantized(linear, form), linear.columns, form)

    def view(self, plan: Mapping[str, WeightFormat]) -> StoredSource:
        """The source with the codes of a plan's units as they lie in the store."""
        return StoredSource(self._source, {name: self._linears[name] for name in plan}, self.quantized)

    def remove(self) -> None:
        """Delete the store's files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _make_factors(self, linear: FusedLinear, form: WeightFormat) -> None:
        """What repairs the unit as it is without a rank, which shares its codes."""
        weights, inputs = self._aims(linear)
        if inputs is None:
            alike = np.ones(linear.columns, np.float32)
            inputs = InputStatistics(alike, alike)
        factors = correction_factors(weights - self.weights(linear, replace(form, rank=0)), inputs, form)
        with folder_written_atomically(self._place(linear, form), replaceable=lambda _: False) as staging:
            for field, values in factors._asdict().items():
                np.save(staging / f"{field}.npy", values, allow_pickle=False)

    def _own_weights(self, linear: FusedLinear) -> CorrectionTarget:
        return CorrectionTarget(np.concatenate([self._source.read(name) for name in linear.weights]), None)

    def _place(self, linear: FusedLinear, form: WeightFormat) -> Path:
        name = HEAD_LINEAR if self._tied and linear.name == EMBEDDING_LINEAR else linear.name
        method = "" if form.method is None else f"-{form.method.value}"
        return self._folder / f"{name}-{str(form).replace('/', '-')}{method}"


@lru_cache(1)
def _blas() -> ThreadpoolController:
    """The library of matrix products.

    Pieces are worked on side by side, and its own threads would wait for each other, spinning: an export by GPTQ took
    twice as long on a machine with other work.
    """
    return ThreadpoolController()


class StoredSource(ModelSourceWrapper):
    """A source whose units are rounded already."""

    def __init__(
        self,
        source: ModelSource,
        linears: Mapping[str, FusedLinear],
        stored: Callable[[FusedLinear, WeightFormat], QuantizedRows],
    ) -> None:
        super().__init__(source)
        self._stored = stored
        self._places: dict[str, tuple[FusedLinear, int]] = {}
        """By a matrix's name the unit it belongs to and its first row there."""
        for linear in linears.values():
            first = 0
            for name, rows in zip(linear.weights, linear.rows, strict=True):
                self._places[name] = linear, first
                first += rows

    def quantized(self, rows: RowRange, form: WeightFormat) -> QuantizedRows:
        """Some rows of a matrix in few bits, from the store."""
        if rows.name not in self._places:
            return self._source.quantized(rows, form)
        linear, first = self._places[rows.name]
        part = slice(first + rows.start, first + rows.stop)
        packed, scales, offsets, points, factors = self._stored(linear, form)
        return QuantizedRows(
            packed[part],
            scales[part],
            None if offsets is None else offsets[part],
            None if points is None else points[part],
            None
            if factors is None
            else factors._replace(up_codes=factors.up_codes[part], up_scales=factors.up_scales[part]),
        )


def _mapped(file: Path) -> npt.NDArray[Any] | None:
    return np.load(file, mmap_mode="r", allow_pickle=False) if file.is_file() else None
