"""Costs of quantization plans: bytes read or milliseconds of a pass.

ONNX Runtime repacks a quantized matrix for the processor when it is loaded (`packed_row_bytes`): bits + 64 / block bits
per weight where the blocks divide the row. Zero points are part of the sums and cost nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

from ...errors import InputError
from ...models.manifest import WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import embedding_layout, fused_linears
from ..quantization.codes import OFFSETS, blocks_of, packed_row_bytes
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR, planned_linears

_PATTERN: Final = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(bpw|mb|ms)(?:@(\d{1,3}|file))?\s*", re.IGNORECASE)
_HINT: Final = (
    "write 3.5bpw (bits per weight) or 300MB, both as a pass reads them, 3.5bpw@file or 300MB@file, "
    "or 9ms (a pass over one token; 20ms@4 for a pass over four tokens)"
)


class Costs(NamedTuple):
    """One measure of a plan's cost, a sum over its linears."""

    of: Callable[[FusedLinear, WeightFormat], float]
    """Cost of a linear in a format."""
    fixed: float = 0.0
    """Cost of a pass that does not depend on the plan."""


def plan_cost(plan: Mapping[str, WeightFormat], costs: Costs, config: DecoderConfig) -> float:
    """Total cost of a plan in one measure."""
    return costs.fixed + sum(costs.of(linear, plan[linear.name]) for linear in planned_linears(config))


def bytes_read(linear: FusedLinear, weight_format: WeightFormat) -> int:
    """Bytes of a linear that a pass reads, packed for x86, offsets included.

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
    offsets = packed_row_bytes(blocks_of(columns, weight_format), OFFSETS) if weight_format.offsets else 0
    return rows * (packed_row_bytes(columns, weight_format) + offsets)


def bytes_stored(linear: FusedLinear, weight_format: WeightFormat, *, tied_head: bool) -> int:
    """Bytes of a linear in the file.

    Zero points of an embedding take a byte each there, and the zero points of a tied head are stored in both ways.

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
    if weight_format.zero_points and (linear.name == EMBEDDING_LINEAR or (tied_head and linear.name == HEAD_LINEAR)):
        stored += rows * blocks_of(columns, weight_format)
        if linear.name == EMBEDDING_LINEAR:
            stored -= rows * _zero_point_bytes(columns, weight_format)
    return stored


BYTES_READ: Final = Costs(bytes_read)
"""Bytes that a pass reads."""


def file_costs(config: DecoderConfig) -> Costs:
    """Bytes in the file, as `bytes_stored` counts them."""
    return Costs(partial(bytes_stored, tied_head=config.tied_head))


def weight_count(config: DecoderConfig) -> int:
    """Number of weights of all linears; a matrix that two of them share counts once."""
    tied = embedding_layout(config).weight_count if config.tied_head else 0
    return sum(linear.weight_count for linear in fused_linears(config)) - tied


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


class Measure(StrEnum):
    """What a budget limits; each value is the suffix that users write."""

    BITS = "bpw"
    """Mean bits per weight that a pass reads, or in the file."""
    MEGABYTES = "MB"
    """Megabytes that a pass reads, or in the file."""
    MILLISECONDS = "ms"
    """Time of a pass."""


@dataclass(frozen=True)
class Budget:
    """An upper limit to the cost of a quantization plan."""

    amount: float
    measure: Measure
    width: int = 1
    """Number of tokens in the pass whose time is limited."""
    in_file: bool = False
    """Whether bytes are those that the linears take in the file, instead of those that a pass reads."""

    def __str__(self) -> str:
        return f"{self.amount:g}{self.suffix}"

    @property
    def suffix(self) -> str:
        """What users write behind the amount."""
        return self.measure.value + ("@file" if self.in_file else f"@{self.width}" if self.width != 1 else "")

    def limit(self, config: DecoderConfig) -> float:
        """The limit for a model, in bytes or milliseconds."""
        return self.amount * self._unit(config)

    def spelled(self, cost: float, config: DecoderConfig) -> str:
        """Write a cost, in bytes or milliseconds, as a budget of this measure that is not less."""
        digits = 3 if self.measure is Measure.BITS else 2
        return f"{math.ceil(cost / self._unit(config) * 10**digits) / 10**digits:.{digits}f}{self.suffix}"

    def _unit(self, config: DecoderConfig) -> float:
        """Bytes or milliseconds of a cost of 1."""
        return {Measure.BITS: weight_count(config) / 8, Measure.MEGABYTES: 1e6, Measure.MILLISECONDS: 1.0}[self.measure]


def parse_budget(text: str) -> Budget:
    """Parse a budget that a user typed.

    Raises:
        InputError: The text is not a budget.
    """
    found = _PATTERN.fullmatch(text)
    if found is None:
        raise InputError(f"{text!r} is not a budget", _HINT)
    measure = next(each for each in Measure if each.value.lower() == found[2].lower())
    amount, place = float(found[1]), (found[3] or "1").lower()
    in_file = place == "file"
    width = 1 if in_file else int(place)
    if not 0 < amount < math.inf or width < 1:
        raise InputError(f"{text!r} is not a budget: it must be positive", _HINT)
    if found[3] is not None and in_file is (measure is Measure.MILLISECONDS):
        wanted = "a size" if in_file else "a time"
        raise InputError(f"{text!r} is not a budget: @{place} goes with {wanted} only", _HINT)
    return Budget(amount, measure, width, in_file)
