"""A model made of another one: what differs is overridden, all else is read as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...models.manifest import WeightFormat
from .source import Float32Array, ModelSource, QuantizedRows, RowRange


class ModelSourceWrapper:
    """A `ModelSource` that hands everything to the one it is made of."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source

    @property
    def folder(self) -> Path:
        """See `ModelSource.folder`."""
        return self._source.folder

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """See `ModelSource.require`."""
        self._source.require(name, shape)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `ModelSource.shape`."""
        return self._source.shape(name)

    def read(self, name: str) -> Float32Array:
        """See `ModelSource.read`."""
        return self._source.read(name)

    def read_rows(self, rows: RowRange) -> Float32Array:
        """See `ModelSource.read_rows`."""
        return self._source.read_rows(rows)

    def row_ranges(self, name: str) -> Iterator[RowRange]:
        """See `ModelSource.row_ranges`."""
        return self._source.row_ranges(name)

    def chunks(self, name: str) -> Iterator[Float32Array]:
        """See `ModelSource.chunks`."""
        return self._source.chunks(name)

    def quantized(self, rows: RowRange, form: WeightFormat) -> QuantizedRows:
        """See `ModelSource.quantized`."""
        return self._source.quantized(rows, form)

    def stored_format(self, name: str) -> WeightFormat:
        """See `ModelSource.stored_format`."""
        return self._source.stored_format(name)
