"""What to make of a checkpoint: how its weights are stored and how long a context the graph serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..errors import InputError
from ..models.manifest import SHORTEST_CONTEXT, GraphLayout, Method, WeightFormat
from .checkpoint.config import DecoderConfig
from .checkpoint.layout import FusedLinear, fused_linears
from .requests import CalibrationRequest, DraftRequest, MixRequest

FP32: Final = WeightFormat(32)
INT8: Final = WeightFormat(8, 32)
INT4: Final = WeightFormat(4, 32)
INT2: Final = WeightFormat(2, 32)

BLOCKS: Final = (32, 64, 128)
QUANTIZED_BITS: Final = (2, 4, 8)
USUAL_METHODS: Final[Mapping[int, Method]] = {2: Method.K_QUANT, 4: Method.K_QUANT, 8: Method.RTN}
"""By bits. Of 8 bits, rounding to nearest loses next to nothing, and takes least time."""
OBSERVED_METHODS: Final[Mapping[int, Method]] = {2: Method.GPTQ, 4: Method.GPTQ, 8: Method.K_QUANT}
"""By bits, where the inputs of the linears are known."""
_OUTER: Final = ("embedding", "head")
DEFAULT_CONTEXT_LIMIT: Final = 32768
"""Longest context exported unasked: the rotary table costs 4 * head_dim bytes a position."""
LONGEST_CONTEXT: Final = 1 << 20
"""Longest context exported at all, unless the checkpoint itself has a longer one."""


def _float_format(name: str) -> WeightFormat:  # noqa: ARG001 -- the same for every matrix
    return FP32


@dataclass(frozen=True)
class ExportRecipe:
    """The choices of one export.

    Raises:
        InputError: a format or the context is not one that can be exported.
    """

    body: WeightFormat | None = INT4
    """Format of the linears inside the layers; None stands for the nearest to what each is stored as."""
    head: WeightFormat | None = None
    """Format of the LM head and of the embedding; None stands for the body's."""
    context: int | None = None
    """Positions the graph serves; None stands for the checkpoint's usual ones, at most `DEFAULT_CONTEXT_LIMIT`."""
    method: Method | None = None
    """How codes and scales are chosen; None stands for `USUAL_METHODS`."""
    layout: GraphLayout = GraphLayout.EDGE
    """Whose inputs and outputs the graph has."""
    calibration: CalibrationRequest | None = None
    """Text on which the model is observed first; None for none, or for the usual one where something needs it."""
    folded: bool = False
    """Whether columns that matter are scaled up before they are rounded, and their inputs down (AWQ)."""
    mix: MixRequest | None = None
    """Formats chosen unit by unit, in place of `body` and `head`."""
    draft: DraftRequest | None = None
    """A draft model to go with it; None for none."""
    report: bool = False
    """Whether to write a report even where formats are given and nothing is observed."""
    work: Path | None = None
    """Folder for what is found out on the way, which is kept; None for one in the cache, removed in the end."""

    def __post_init__(self) -> None:
        if self.layout is not GraphLayout.EDGE and (self.mix or self.draft or self.observed):
            raise InputError(
                "calibration, mixed weights and drafts are for edge-run's own layout", "leave --layout out"
            )
        for form in filter(None, (self.body, self.head_format)):
            if form.offsets:
                raise InputError("weights with offsets cannot be asked for", "they are kept where a GGUF file has them")
            if form.rank:
                raise InputError(
                    "repairs cannot be asked for", "mixed weights choose where they pay: set a mix's `repair`"
                )
            plain = form.bits == FP32.bits and form.block == 0
            if not plain and (form.bits not in QUANTIZED_BITS or form.block not in BLOCKS):
                raise InputError(
                    f"weights of {form.bits} bits in blocks of {form.block} cannot be exported",
                    "supported are fp32, and 2, 4 and 8 bits in blocks of " + ", ".join(map(str, BLOCKS)),
                )
        if self.method is not None and {self.body, self.head_format} == {FP32}:
            raise InputError("fp32 weights are not rounded, so there is no method to choose", "leave --method out")
        if self.context is not None and self.context < SHORTEST_CONTEXT:
            raise InputError(
                f"a context of {self.context} positions cannot be exported", f"give at least {SHORTEST_CONTEXT}"
            )

    @property
    def observed(self) -> bool:
        """Whether weights are rounded by what is known of their inputs."""
        return bool(self.calibration or self.folded or self.mix) or self.method is Method.GPTQ

    @property
    def methods(self) -> Mapping[int, Method]:
        """How codes and scales are chosen, by bits, where a plan does not say."""
        if self.method is not None:
            return dict.fromkeys(QUANTIZED_BITS, self.method)
        return OBSERVED_METHODS if self.observed else USUAL_METHODS

    @property
    def plain(self) -> bool:
        """Whether formats and methods say it all, and no text is needed."""
        return not (self.observed or self.mix or self.draft or self.report)

    @property
    def head_format(self) -> WeightFormat | None:
        """Format of the LM head and of the embedding, None as in `body`."""
        return self.body if self.head is None else self.head

    def require_usual_scales(self, source: str) -> None:
        """Refuse zero points and powers of two for a kind of source, such as "GGUF file".

        Raises:
            InputError: they are asked for.
        """
        for form in filter(None, (self.body, self.head_format)):
            if form.zero_points or form.powers_of_two:
                option = "--zero-points" if form.zero_points else "--powers-of-two"
                raise InputError(f"{option} is not for a {source}", f"leave {option} out")

    def context_for(self, config: DecoderConfig) -> int:
        """Positions the graph of that model serves.

        Raises:
            InputError: more are asked for than can be exported.
        """
        if self.context is None:
            return min(config.usual_positions, DEFAULT_CONTEXT_LIMIT)
        longest = max(config.max_positions, LONGEST_CONTEXT)
        if self.context > longest:
            raise InputError(f"a context of {self.context} positions cannot be exported", f"give at most {longest}")
        return self.context

    def plan_for(
        self, config: DecoderConfig, own_format: Callable[[str], WeightFormat] = _float_format
    ) -> dict[str, WeightFormat]:
        """Weight format by unit of that model; a unit that keeps its own takes the widest of its matrices.

        Args:
            config: the model's numbers.
            own_format: the format nearest to how a checkpoint's matrix is stored, by its name.

        Raises:
            InputError: the blocks do not divide the rows of experts, or those are to have zero points.
        """
        plan = {}
        for linear in fused_linears(config):
            asked = self.head_format if linear.name in _OUTER else self.body
            form = FP32 if linear.exact else asked or _widest(linear, own_format)
            if linear.experts and form.block and linear.columns % form.block:
                raise InputError(
                    f"{linear.name} has experts of {linear.columns} columns, which are no whole blocks of {form.block}",
                    "choose smaller blocks, or fp32",
                )
            if linear.experts and form.zero_points:
                raise InputError(
                    f"{linear.name} has experts, whose operator does not take zero points", "leave --zero-points out"
                )
            plan[linear.name] = form
        return plan


def with_methods(plan: Mapping[str, WeightFormat], methods: Mapping[int, Method]) -> dict[str, WeightFormat]:
    """A plan that says for each unit of few bits how its codes are chosen: as before, or by `methods` of bits."""
    return {
        linear: form if form.bits == FP32.bits else replace(form, method=form.method or methods.get(form.bits))
        for linear, form in plan.items()
    }


def _widest(linear: FusedLinear, own_format: Callable[[str], WeightFormat]) -> WeightFormat:
    form = max(map(own_format, linear.weights), key=lambda form: (form.bits, form.offsets))
    # The embedding's operator has no offsets, and the head may be the embedding.
    return INT8 if form.offsets and linear.name in _OUTER else form
