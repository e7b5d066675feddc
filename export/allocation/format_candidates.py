"""Format candidates of a quantization plan, and the linears it covers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ...models.manifest import Method, WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear
from ..checkpoint.layout import PER_LAYER_EMBEDDING, fused_linears

BASE_FORMATS: Final = tuple(
    WeightFormat(bits, block)
    for bits, block in ((2, 128), (2, 64), (4, 128), (4, 64), (4, 32), (8, 128), (8, 64), (8, 32))
)
"""Bits and block sizes to choose from. 2 bits in blocks of 32 are left out: they read 4 bits per weight and are slower
than 4 bits in blocks of 32."""
LOW_RANK_FORMATS: Final = tuple(
    replace(weight_format, rank=rank)
    for weight_format in BASE_FORMATS
    if weight_format.bits == 2
    for rank in (16, 32, 64)
)
"""Formats with a low-rank correction, candidates only where corrections are allowed."""
EMBEDDING_LINEAR: Final = "embedding"
HEAD_LINEAR: Final = "head"


def format_candidates(
    methods: Sequence[Mapping[int, Method]],
    zero_points: bool = False,
    half_scales: bool = False,
    low_rank: bool = False,
) -> tuple[WeightFormat, ...]:
    """List the candidates: every base format with every quantization method for its number of bits.

    Args:
        methods: Quantization method by bits; each further mapping adds further versions of the formats.
        zero_points: Whether to add versions with zero points.
        half_scales: Whether all scales are stored in float16.
        low_rank: Whether to add 2-bit formats with a low-rank correction.
    """
    formats = (
        replace(base, method=by_bits[base.bits], zero_points=with_points, half_scales=half_scales)
        for base in (*BASE_FORMATS, *(LOW_RANK_FORMATS if low_rank else ()))
        for with_points in ((False, True) if zero_points else (False,))
        for by_bits in methods
    )
    return tuple({(each, each.method): each for each in formats}.values())


def is_allowed(linear: FusedLinear, weight_format: WeightFormat) -> bool:
    """Whether a linear can be stored in a format.

    Only linears inside layers can have a low-rank correction, of at most their own rank: the embedding is read by row
    and not multiplied, and the head may be the embedding's matrix. The operator of experts has neither corrections nor
    zero points nor float16 scales, and its blocks divide the columns of both its linears.
    """
    if linear.experts:
        plain = not (weight_format.rank or weight_format.zero_points or weight_format.half_scales)
        both = (linear, linear.paired or linear)
        return plain and not any(weight_format.block and each.columns % weight_format.block for each in both)
    outer = linear.name in (EMBEDDING_LINEAR, PER_LAYER_EMBEDDING, HEAD_LINEAR)
    return not weight_format.rank or (not outer and weight_format.rank <= min(linear.shape))


def planned_linears(config: DecoderConfig) -> Iterator[FusedLinear]:
    """The linears that have a format of their own.

    A tied head stands for the embedding too, and the first linear of experts for the second.
    """
    paired = set()
    for linear in fused_linears(config):
        if linear.paired is not None:
            paired.add(linear.paired.name)
        is_shared = linear.name in paired or (config.tied_head and linear.name == EMBEDDING_LINEAR)
        if not linear.exact and not is_shared:
            yield linear


def completed_plan(config: DecoderConfig, plan: Mapping[str, WeightFormat]) -> dict[str, WeightFormat]:
    """Complete the formats of `planned_linears` to every linear, in the order of the graph."""
    formats = dict(plan)
    if config.tied_head:
        formats[EMBEDDING_LINEAR] = formats[HEAD_LINEAR]
    for linear in fused_linears(config):
        if linear.paired is not None:
            formats[linear.paired.name] = formats[linear.name]
    return {linear.name: WeightFormat(32) if linear.exact else formats[linear.name] for linear in fused_linears(config)}
