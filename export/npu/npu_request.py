"""Which static graphs an export writes for NPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import InputError
from ..checkpoint.config import DecoderConfig

DEFAULT_WIDTHS: Final = (1, 4, 128)
DEFAULT_CONTEXTS: Final = (512, 2048, 8192)
WIDEST: Final = 1024
WIDEST_WITH_ALL_LOGITS: Final = 32
"""Wider graphs are for prefill: they give the logits of one token only."""


@dataclass(frozen=True)
class StaticShape:
    """The fixed sizes of a static graph."""

    width: int
    """Number of new tokens of a pass, W."""
    capacity: int
    """Number of cache slots, C."""

    @property
    def file(self) -> str:
        """Name of the graph's file in a bundle."""
        return f"model_npu_w{self.width}_c{self.capacity}.onnx"

    @property
    def logit_rows(self) -> int:
        """Number of tokens that get logits."""
        return self.width if self.width <= WIDEST_WITH_ALL_LOGITS else 1


@dataclass(frozen=True)
class NpuRequest:
    """Which static graphs to write: one of each width for each context.

    Raises:
        InputError: there is no width or context, one is named twice or is out of range, or width 1 is missing.
    """

    widths: tuple[int, ...] = DEFAULT_WIDTHS
    """Numbers of new tokens of a pass."""
    contexts: tuple[int, ...] | None = None
    """Numbers of cache slots; None for those of `DEFAULT_CONTEXTS` that the model reaches."""

    def __post_init__(self) -> None:
        _require_numbers("--widths", self.widths, f"numbers from 1 to {WIDEST}", WIDEST)
        if 1 not in self.widths:
            named = _listed(self.widths)
            raise InputError(
                f"--widths {named} lacks width 1, with which text is decoded token by token", f"give 1,{named}"
            )
        if self.contexts is not None:
            _require_numbers("--contexts", self.contexts, "numbers of tokens, 1 or more")

    def shapes(self, context: int) -> list[StaticShape]:
        """The static shapes for a model that serves `context` positions, in ascending order of context and width.

        Raises:
            InputError: a requested context is longer.
        """
        contexts = self.contexts
        if contexts is None:
            contexts = tuple(each for each in DEFAULT_CONTEXTS if each <= context) or (context,)
        if max(contexts) > context:
            raise InputError(
                f"--contexts {_listed(contexts)} is longer than the {context} positions that the model serves",
                f"give at most {context}, or a longer --context",
            )
        return [StaticShape(width, capacity) for capacity in sorted(contexts) for width in sorted(self.widths)]

    def require_expressible(self, config: DecoderConfig, context: int) -> None:
        """Check that a model that serves `context` positions can have these graphs.

        Raises:
            InputError: it has experts, of which a static graph would have to compute all, or a context is too long.
        """
        if config.experts is not None:
            raise InputError(
                f"--device npu does not support {config.family} models, which have mixtures of experts",
                "leave --device npu out",
            )
        self.shapes(context)


def _require_numbers(option: str, numbers: Sequence[int], expected: str, most: int | None = None) -> None:
    if not numbers or min(numbers) < 1 or (most is not None and max(numbers) > most):
        raise InputError(f"{option} {_listed(numbers)} is out of range", f"give {expected}")
    if len(set(numbers)) != len(numbers):
        raise InputError(f"{option} {_listed(numbers)} names a number twice", "name each once")


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
