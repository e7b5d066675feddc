"""What to make of a checkpoint: how its weights are stored and how long a context the graph serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ..edge.errors import InputError
from ..models.manifest import SHORTEST_CONTEXT, GraphLayout, WeightFormat
from .config import DecoderConfig
from .layout import Unit, units_of

FP32: Final = WeightFormat(32)
INT8: Final = WeightFormat(8, 32)
INT4: Final = WeightFormat(4, 32)

BLOCKS: Final = (32, 64, 128)
QUANTIZED_BITS: Final = (4, 8)
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
    layout: GraphLayout = GraphLayout.EDGE
    """Whose inputs and outputs the graph has."""

    def __post_init__(self) -> None:
        for form in filter(None, (self.body, self.head_format)):
            if form.offsets:
                raise InputError("weights with offsets cannot be asked for", "they are kept where a GGUF file has them")
            plain = form.bits == FP32.bits and form.block == 0
            if not plain and (form.bits not in QUANTIZED_BITS or form.block not in BLOCKS):
                raise InputError(
                    f"weights of {form.bits} bits in blocks of {form.block} cannot be exported",
                    f"supported are fp32, and {' and '.join(map(str, QUANTIZED_BITS))} bits in blocks of "
                    + ", ".join(map(str, BLOCKS)),
                )
        if self.context is not None and self.context < SHORTEST_CONTEXT:
            raise InputError(
                f"a context of {self.context} positions cannot be exported", f"give at least {SHORTEST_CONTEXT}"
            )

    @property
    def head_format(self) -> WeightFormat | None:
        """Format of the LM head and of the embedding, None as in `body`."""
        return self.body if self.head is None else self.head

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
            InputError: the blocks do not divide the rows of experts.
        """
        plan = {}
        for unit in units_of(config):
            asked = self.head_format if unit.name in _OUTER else self.body
            form = FP32 if unit.exact else asked or _widest(unit, own_format)
            if unit.experts and form.block and unit.columns % form.block:
                raise InputError(
                    f"{unit.name} has experts of {unit.columns} columns, which are no whole blocks of {form.block}",
                    "choose smaller blocks, or fp32",
                )
            plan[unit.name] = form
        return plan


def _widest(unit: Unit, own_format: Callable[[str], WeightFormat]) -> WeightFormat:
    form = max(map(own_format, unit.weights), key=lambda form: (form.bits, form.offsets))
    # The embedding's operator has no offsets, and the head may be the embedding.
    return INT8 if form.offsets and unit.name in _OUTER else form
