"""The fixed sizes of the static graphs that an export writes for NPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...errors import InputError

DEFAULT_WIDTHS: Final = (1, 4, 128)
DEFAULT_CONTEXTS: Final = (512, 2048, 8192)
WIDEST: Final = 1024
WIDEST_WITH_ALL_LOGITS: Final = 32
"""Wider graphs are for prefill: they give the logits of one token only."""

Sizes = tuple[int, ...] | str | None
"""Numbers, or as written with commas between them; None for the default."""


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


def parse_sizes(widths: Sizes, contexts: Sizes) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The numbers of new tokens, and of cache slots: None for the `DEFAULT_CONTEXTS` that the model reaches.

    Raises:
        InputError: there is no width or context, one is named twice or is out of range, or width 1 is missing.
    """
    numbers = DEFAULT_WIDTHS if widths is None else _numbers("--widths", widths, f"numbers from 1 to {WIDEST}", WIDEST)
    if 1 not in numbers:
        named = _listed(numbers)
        raise InputError(
            f"--widths {named} lacks width 1, with which text is decoded token by token", f"give 1,{named}"
        )
    return numbers, None if contexts is None else _numbers("--contexts", contexts, "numbers of tokens, 1 or more")


def require_block_width(widths: Sizes, size: int) -> None:
    """Check that there is a graph that gives the logits of a block of `size` tokens.

    Raises:
        InputError: there is none.
    """
    if not any(size <= width <= WIDEST_WITH_ALL_LOGITS for width in parse_sizes(widths, None)[0]):
        what = f"--widths has no graph for the logits of a block of {size} tokens"
        most = WIDEST_WITH_ALL_LOGITS
        raise InputError(what, f"give --widths 1,{size},128" if size <= most else f"blocks of {most} and fewer can run")


def static_shapes(widths: Sizes, contexts: Sizes, context: int) -> tuple[StaticShape, ...]:
    """The static shapes for a model that serves `context` positions, in ascending order of context and width.

    Raises:
        InputError: a requested context is longer, or as for `parse_sizes`.
    """
    wide, long = parse_sizes(widths, contexts)
    if long is None:
        long = tuple(each for each in DEFAULT_CONTEXTS if each <= context) or (context,)
    if max(long) > context:
        raise InputError(
            f"--contexts {_listed(long)} is longer than the {context} positions that the model serves",
            f"give at most {context}, or a longer --context",
        )
    return tuple(StaticShape(width, capacity) for capacity in sorted(long) for width in sorted(wide))


def _numbers(option: str, given: tuple[int, ...] | str, expected: str, most: int | None = None) -> tuple[int, ...]:
    """The numbers of a list such as `1,4,128`, each at least 1."""
    words = [word.strip() for word in given.split(",")] if isinstance(given, str) else map(str, given)
    if isinstance(given, str) and not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise InputError(
            f"{option} must be whole numbers with commas between them, not {given!r}", "give 1,4,128 or so"
        )
    numbers = tuple(map(int, words))
    if not numbers or min(numbers) < 1 or (most is not None and max(numbers) > most):
        raise InputError(f"{option} {_listed(numbers)} is out of range", f"give {expected}")
    if len(set(numbers)) != len(numbers):
        raise InputError(f"{option} {_listed(numbers)} names a number twice", "name each once")
    return numbers


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
