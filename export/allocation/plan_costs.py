"""Costs of quantization plans: bytes read or milliseconds of a pass.

ONNX Runtime repacks a quantized matrix for the processor when it is loaded: the codes of every block, the last block of
a row padded, and 8 bytes for each block, its scale and its sum. That is bits + 64 / block bits per weight where the
blocks divide the row. Zero points are part of the sum and cost nothing. The factors of a low-rank correction are two
further matrices of 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import embedding_layout, fused_linears
from ..quantization.codes import FACTOR_FORMAT, OFFSETS, blocks_of
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR, planned_linears

_PACKED_BLOCK_BYTES: Final = 8


class Costs(Protocol):
    """One measure of a plan's cost, a sum over its linears."""

    @property
    def fixed(self) -> float:
        """Cost of a pass that does not depend on the plan."""
        ...

    def of(self, linear: FusedLinear, weight_format: WeightFormat) -> float:
        """Cost of a linear in that format."""
        ...


class ByteCosts:
    """Bytes that a pass reads, as `bytes_read` counts them."""

    fixed = 0.0

    def of(self, linear: FusedLinear, weight_format: WeightFormat) -> float:
        """Bytes of a linear in that format."""
        return float(bytes_read(linear, weight_format))


class FileCosts:
    """Bytes in the file, as `bytes_stored` counts them."""

    fixed = 0.0

    def __init__(self, config: DecoderConfig) -> None:
        """`config` says whether the head is the embedding's matrix too."""
        self._tied = config.tied_head

    def of(self, linear: FusedLinear, weight_format: WeightFormat) -> float:
        """Bytes of a linear in that format."""
        return float(bytes_stored(linear, weight_format, tied_head=self._tied))


def plan_cost(plan: Mapping[str, WeightFormat], costs: Costs, config: DecoderConfig) -> float:
    """Total cost of a plan in one measure."""
    return costs.fixed + sum(costs.of(linear, plan[linear.name]) for linear in planned_linears(config))


def bytes_read(linear: FusedLinear, weight_format: WeightFormat) -> int:
    """Bytes of a linear that a pass reads, packed for x86, offsets and low-rank factors included.

    A pass reads only one row of an embedding for each token, which is negligible, so the embedding's size in the file
    and in memory is counted instead. All experts are counted, and with a linear of theirs the one paired with it.
    """
    if linear.paired is not None:
        return bytes_read(replace(linear, paired=None), weight_format) + bytes_read(linear.paired, weight_format)
    rows, columns = linear.shape
    if weight_format.bits == 32:
        return 4 * rows * columns
    if linear.name == EMBEDDING_LINEAR:
        return _stored_bytes(rows, columns, weight_format)
    down = _packed_bytes(weight_format.rank, columns, FACTOR_FORMAT)
    up = _packed_bytes(rows, weight_format.rank, FACTOR_FORMAT)
    offsets = _packed_bytes(rows, blocks_of(columns, weight_format), OFFSETS) if weight_format.offsets else 0
    return _packed_bytes(rows, columns, weight_format) + offsets + down + up


def bytes_stored(linear: FusedLinear, weight_format: WeightFormat, *, tied_head: bool) -> int:
    """Bytes of a linear in the file, low-rank factors included.

    Zero points of an embedding take a byte each there, and those of a tied head are stored in both ways.

    Args:
        linear: The linear.
        weight_format: Its format.
        tied_head: Whether the head shares the matrix of the embedding.
    """
    if linear.paired is not None:
        parts = (replace(linear, paired=None), linear.paired)
        return sum(bytes_stored(each, weight_format, tied_head=tied_head) for each in parts)
    rows, columns = linear.shape
    if weight_format.bits == 32:
        return 4 * rows * columns
    stored = _stored_bytes(rows, columns, weight_format)
    if weight_format.rank:
        stored += _stored_bytes(weight_format.rank, columns, FACTOR_FORMAT) + _stored_bytes(
            rows, weight_format.rank, FACTOR_FORMAT
        )
    if weight_format.zero_points and (linear.name == EMBEDDING_LINEAR or (tied_head and linear.name == HEAD_LINEAR)):
        stored += rows * blocks_of(columns, weight_format)
        if linear.name == EMBEDDING_LINEAR:
            stored -= rows * _zero_point_bytes(columns, weight_format)
    return stored


def weight_count(config: DecoderConfig) -> int:
    """Number of weights of all linears; a matrix that two of them share counts once."""
    tied = embedding_layout(config).weight_count if config.tied_head else 0
    return sum(linear.weight_count for linear in fused_linears(config)) - tied


def _packed_bytes(rows: int, columns: int, weight_format: WeightFormat) -> int:
    """Bytes of a packed matrix [rows, columns]; 0 where it has no columns."""
    block_bytes = weight_format.block * weight_format.bits // 8 + _PACKED_BLOCK_BYTES
    return rows * blocks_of(columns, weight_format) * block_bytes


def _stored_bytes(rows: int, columns: int, weight_format: WeightFormat) -> int:
    """Bytes of codes, scales and zero points of a matrix [rows, columns] in the file."""
    blocks = blocks_of(columns, weight_format)
    codes = blocks * weight_format.block * weight_format.bits // 8
    scales = blocks * (2 if weight_format.half_scales else 4)
    return rows * (codes + scales + _zero_point_bytes(columns, weight_format))


def _zero_point_bytes(columns: int, weight_format: WeightFormat) -> int:
    """Bytes of the packed zero points of a row."""
    blocks = blocks_of(columns, weight_format)
    return -(-blocks * weight_format.bits // 8) if weight_format.zero_points else 0
