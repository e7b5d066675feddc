"""Weight formats and quantization methods that an export may use, and round-to-nearest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from ...errors import InputError
from ...models.manifest import Method, WeightFormat
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import FusedLinear, QuantPlan
from ..checkpoint.layout import PER_LAYER_EMBEDDING, fused_linears
from ..checkpoint.source import Float32Array, QuantizedRows
from .codes import InputStatistics, nearest_rows, packed_row_bytes
from .gptq import gptq_rows
from .k_quant import k_quant_rows

FP32: Final = WeightFormat(32)
INT8: Final = WeightFormat(8, 32)
INT4: Final = WeightFormat(4, 32)

BLOCKS: Final = (32, 64, 128)
QUANTIZED_BITS: Final = (2, 4, 8)
DEFAULT_METHODS: Final[Mapping[int, Method]] = dict.fromkeys((2, 3, 4, 5, 6), Method.K_QUANT) | {8: Method.RTN}
"""Method by bit width, without calibration. At 8 bits, round-to-nearest is nearly lossless and the fastest."""
CALIBRATED_METHODS: Final[Mapping[int, Method]] = dict.fromkeys((2, 3, 4, 5, 6), Method.GPTQ) | {8: Method.K_QUANT}
"""Method by bit width, where statistics of the linears' inputs are known."""


_VOCABULARY_LINEARS: Final = ("embedding", PER_LAYER_EMBEDDING, "head")


Quantizer = Callable[[Float32Array, WeightFormat, InputStatistics | None], QuantizedRows]
"""Chooses codes, scales and, where the format has them, zero points of rows of a weight matrix.

The arguments are the weights, float32 [N, K], finite, in any memory order; 2, 4 or 8 bits, the block size, and whether
there are zero points; and statistics of the K inputs, None where none are known. Raises `InputError` if the statistics
are not K finite numbers of at least 0."""


QUANTIZERS: Final[Mapping[Method, Quantizer]] = {
    Method.RTN: nearest_rows,
    Method.K_QUANT: k_quant_rows,
    Method.GPTQ: gptq_rows,
}


def with_methods(plan: QuantPlan, methods: Mapping[int, Method]) -> dict[str, WeightFormat]:
    """Fill in the quantization method of each linear: the one it has, or the one in `methods` for its bit width."""
    return {
        linear: each if each.bits == FP32.bits else replace(each, method=each.method or methods.get(each.bits))
        for linear, each in plan.items()
    }


def require_expert_format(linear: FusedLinear, weight_format: WeightFormat) -> None:
    """Refuse a format of a linear of experts that their operator does not have.

    Raises:
        InputError: blocks do not divide the linear's columns, or the format has zero points or float16 scales.
    """
    if linear.experts and weight_format.block and linear.columns % weight_format.block:
        raise InputError(
            f"the experts of {linear.name} have {linear.columns} columns, "
            f"which is not a multiple of the block size {weight_format.block}",
            "choose smaller blocks, or fp32",
        )
    if linear.experts and (weight_format.zero_points or weight_format.half_scales):
        lacks, option = (
            ("zero points", "--zero-points") if weight_format.zero_points else ("float16 scales", "--half-scales")
        )
        raise InputError(f"{linear.name} has experts, whose operator does not support {lacks}", f"leave {option} out")


def with_fitting_blocks(linear: FusedLinear, weight_format: WeightFormat) -> WeightFormat:
    """The format with blocks of its size, or with smaller ones where a pass reads fewer bytes then.

    A row that the block does not divide is padded: 320 weights of 4 bits take 216 bytes in 3 blocks of 128 and 200 in
    5 of 64, whose scales fit their weights better too. Experts keep the blocks, which two linears of theirs share.
    """
    if linear.experts or weight_format.bits == FP32.bits:
        return weight_format
    largest_first = [replace(weight_format, block=each) for each in reversed(BLOCKS) if each <= weight_format.block]
    return min(largest_first, key=lambda each: packed_row_bytes(linear.columns, each))


def require_exportable(weight_format: WeightFormat) -> None:
    """Refuse a format that cannot be requested for all weights.

    Raises:
        InputError: it has offsets, or its bits or blocks are not supported.
    """
    if weight_format.offsets:
        raise InputError(
            "weights with offsets cannot be requested", "they are only kept where a GGUF file already has them"
        )
    if weight_format.bits == FP32.bits and weight_format.block == 0:
        return
    if weight_format.bits not in QUANTIZED_BITS or weight_format.block not in BLOCKS:
        raise InputError(
            f"{weight_format.bits}-bit weights in blocks of {weight_format.block} are not supported",
            "supported are fp32, and 2, 4 and 8 bits in blocks of " + ", ".join(map(str, BLOCKS)),
        )


def formats_of_linears(
    config: DecoderConfig,
    body: WeightFormat | None,
    head: WeightFormat | None,
    stored_format: Callable[[str], WeightFormat],
) -> dict[str, WeightFormat]:
    """The format of every linear; one that keeps its format takes the widest of its matrices.

    Args:
        config: the model's configuration.
        body: format of the linears inside the layers, with the largest blocks they may have; None to keep theirs.
        head: format of the LM head and of the embedding; None to keep theirs.
        stored_format: returns the format nearest to how a checkpoint tensor is stored, by its name.

    Raises:
        InputError: the experts of a layer cannot have the format.
    """
    plan = {}
    for linear in fused_linears(config):
        requested = FP32 if linear.exact else head if linear.name in _VOCABULARY_LINEARS else body
        if requested is None:
            widest = max(map(stored_format, linear.weights), key=lambda each: (each.bits, each.offsets))
            # The embedding's operator has no offsets, and the head may share the embedding.
            requested = INT8 if widest.offsets and linear.name in _VOCABULARY_LINEARS else widest
        else:
            requested = with_fitting_blocks(linear, requested)
        require_expert_format(linear, requested)
        plan[linear.name] = requested
    return plan
