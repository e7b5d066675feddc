"""The formats that mixed weights choose from, and the bytes a pass reads of each.

ONNX Runtime packs a matrix of few bits for the processor when it is loaded: the codes of every block, the last of a row
padded, and for each block a scale and a sum of 4 bytes each. That is bits + 64 / block bits a weight where the blocks
divide the row. Zero points are part of the sum and cost nothing. Factors of low rank are two matrices of 8 bits more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ...models.manifest import Method, WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layout import FusedLinear, embedding_layout, fused_linears
from ..quantization.codes import blocks_of, factor_format

LADDER: Final = tuple(
    WeightFormat(bits, block)
    for bits, block in ((2, 128), (2, 64), (4, 128), (4, 64), (4, 32), (8, 128), (8, 64), (8, 32))
)
"""2 bits in blocks of 32 are not among them: they read 4 bits a weight and are slower than 4 bits in blocks of 32."""
REPAIRED: Final = tuple(replace(form, rank=rank) for form in LADDER if form.bits == 2 for rank in (16, 32, 64))
"""What is there besides where units may be repaired."""
_PACKED_BLOCK_BYTES: Final = 8
_STORED_BLOCK_BYTES: Final = 4
EMBEDDING_LINEAR: Final = "embedding"
HEAD_LINEAR: Final = "head"


def levels(
    methods: Sequence[Mapping[int, Method]],
    zero_points: bool = False,
    powers_of_two: bool = False,
    repaired: bool = False,
) -> tuple[WeightFormat, ...]:
    """The ladder's formats, each with every method that there is for its bits.

    Args:
        methods: that choose the codes, by bits; several for as many versions of a format.
        zero_points: whether there are formats with zero points besides.
        powers_of_two: whether all scales are powers of two.
        repaired: whether there are formats of 2 bits with factors of low rank besides.
    """
    forms = (
        replace(form, method=by_bits[form.bits], zero_points=points, powers_of_two=powers_of_two)
        for form in (*LADDER, *(REPAIRED if repaired else ()))
        for points in ((False, True) if zero_points else (False,))
        for by_bits in methods
    )
    return tuple({(form, form.method): form for form in forms}.values())


def may_have(linear: FusedLinear, form: WeightFormat) -> bool:
    """Whether a unit can be stored so: only the linears of layers are repaired, by factors that are thinner than they.

    Of an embedding rows are taken and no products, and a head may be the embedding's matrix.
    """
    return not form.rank or (linear.name not in (EMBEDDING_LINEAR, HEAD_LINEAR) and form.rank <= min(linear.shape))


def chosen_linears(config: DecoderConfig) -> Iterator[FusedLinear]:
    """The units that have a format of their own: a tied head stands for the embedding too."""
    for linear in fused_linears(config):
        if not linear.exact and not (config.tied_head and linear.name == EMBEDDING_LINEAR):
            yield linear


def with_embedding(config: DecoderConfig, plan: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """A plan for every unit, in the order of the graph: a tied embedding has its head's format."""
    formats = dict(plan)
    if config.tied_head:
        formats[EMBEDDING_LINEAR] = formats[HEAD_LINEAR]
    return {linear.name: WeightFormat(32) if linear.exact else formats[linear.name] for linear in fused_linears(config)}


def bytes_read(linear: FusedLinear, form: WeightFormat) -> int:
    """Bytes of a unit that a pass reads, packed for x86, factors included; those of the file of an embedding.

    Of an embedding a pass reads a row for each token, which is next to nothing. What it takes of the file and of memory
    counts instead.
    """
    rows, columns = linear.shape
    if form.bits == 32:
        return 4 * rows * columns
    if linear.name != EMBEDDING_LINEAR:
        factors = factor_format(form)
        thin = _packed_bytes(form.rank, columns, factors) + _packed_bytes(rows, form.rank, factors)
        return _packed_bytes(rows, columns, form) + thin
    blocks = blocks_of(columns, form)
    codes = blocks * form.block * form.bits // 8
    points = -(-blocks * form.bits // 8) if form.zero_points else 0
    return rows * (codes + blocks * _STORED_BLOCK_BYTES + points)


def _packed_bytes(rows: int, columns: int, form: WeightFormat) -> int:
    """Bytes of a matrix [rows, columns] as packed; none where it has no columns."""
    return rows * blocks_of(columns, form) * (form.block * form.bits // 8 + _PACKED_BLOCK_BYTES)


def weight_count(config: DecoderConfig) -> int:
    """Weights of all units, a shared matrix once."""
    tied = embedding_layout(config).weight_count if config.tied_head else 0
    return sum(linear.weight_count for linear in fused_linears(config)) - tied
