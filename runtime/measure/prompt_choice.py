"""Measures which graph reads prompts: the model's own, or the int8 prompt graph, and keeps the result.

The int8 prompt graph computes prompts with coarser weights. It is used where it was measured to be faster on this
machine, and where the tokens after some prompts stay as probable as with the model's own graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from ..graph.bound_graph import BoundGraph
from ..prefill import PREFILL_TOKENS, prefill
from .measurement_store import MeasurementStore
from .pass_timing import pad_cache
from .system_load import GraphTimes

LEAST_WIDTH: Final = 64
"""Tokens of the narrowest pass that the int8 prompt graph may run."""
_WIDTHS: Final = (LEAST_WIDTH, 128, 256)
"""Widths of its passes to measure. Wider ones are not faster, and take more memory."""
LONGEST_PASS_S: Final = 1.0
"""Seconds that a pass after few tokens may take: a prompt is cancelled, and its progress is shown, between two."""
UNMEASURED_WIDTH: Final = 256
"""Width of the int8 prompt graph's passes before it was measured."""
TOKENS_TO_LOAD: Final = 512
"""Prompt tokens from which on the int8 prompt graph saves more time than loading it takes: both grow with the weights,
so this is about the same for all models (570 measured at 0.5B, 500 on a machine without VNNI)."""
NOT_MADE: Final = "not made yet (edge-run tune makes it)"
"""Why there is no int8 prompt graph before it was made."""
_WORTH: Final = 1.05
"""How many times as fast the int8 prompt graph must be: it takes memory, disk and a little quality."""
_CONTEXT: Final = 128
"""Cached tokens to measure after."""


@dataclass(frozen=True)
class PromptChoice:
    """What was measured of a model's int8 prompt graph on a machine."""

    obstacle: str | None = None
    """Why the model cannot have one; None if it can, and then the other fields are set."""
    times: GraphTimes = field(default_factory=GraphTimes)
    """Seconds in which both graphs read tokens of a prompt, by their number: the int8 prompt graph in one pass."""
    mean_kl: float = 0.0
    """Mean KL divergence of the tokens after some prompts, from those with the model's own graph, in nats."""
    kl_limit: float = 0.0
    """Largest mean KL divergence that is acceptable."""

    def __post_init__(self) -> None:
        if self.obstacle is None and not (self.times.seconds and all(map(str.isdecimal, self.times.seconds))):
            raise ValueError("holds neither times nor a reason")

    @property
    def seconds(self) -> dict[int, tuple[float, ...]]:
        """Seconds in the model's own graph and in the int8 prompt graph, by number of tokens, ascending."""
        return dict(sorted((int(width), each) for width, each in self.times.seconds.items()))

    @property
    def refusal(self) -> str | None:
        """Why prompts are read by the model's own graph; None if the int8 prompt graph reads them."""
        if self.obstacle is not None:
            return self.obstacle
        if not self.mean_kl <= self.kl_limit:
            return f"failed the quality check: KL {self.mean_kl:.2g} > {self.kl_limit:.2g}"
        if self.speedup < _WORTH:
            return f"not faster here: {self.speedup:.2f} times the speed"
        return None

    @property
    def speedup(self) -> float:
        """How many times as fast the int8 prompt graph reads a prompt, each graph with its best width."""
        own, int8 = (min(pair[which] / width for width, pair in self.seconds.items()) for which in (0, 1))
        return own / int8

    @property
    def least_width(self) -> int:
        """Tokens of the narrowest pass from which on the int8 prompt graph is faster."""
        return next((width for width, (own, int8) in self.seconds.items() if int8 < own), LEAST_WIDTH)

    @property
    def width(self) -> int:
        """Number of tokens of a pass of the int8 prompt graph: the fastest that is not too long, or the narrowest."""
        int8 = {width: each for width, (_, each) in self.seconds.items() if width >= self.least_width}
        return max(
            (width for width in int8 if int8[width] <= LONGEST_PASS_S), key=lambda n: n / int8[n], default=min(int8)
        )


PROMPT_CHOICES: Final = MeasurementStore("prompt-graph", 3, PromptChoice)
"""Which graph reads prompts, by model, machine and number of threads."""


def measure_prompt_speed(
    plain: BoundGraph,
    int8: BoundGraph,
    times: GraphTimes,
    threads: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> None:
    """Let both graphs read prompts in turns.

    Args:
        plain: the model's own graph, whose cache contents are lost.
        int8: the int8 prompt graph, whose cache contents are lost.
        times: gets the times, but for those that it has without a doubt; none if the context is too short.
        threads: number of threads of the sessions; 0 for the default.
        progress: receives the fraction done, 0 to 1, before every pass; it may wait.

    Raises:
        EdgeError: ONNX Runtime failed.
    """
    limit = min(plain.arena.limit, int8.arena.limit)
    context = min(_CONTEXT, limit // 2)
    for number, width in enumerate(_WIDTHS):
        if context + width > limit or times.seconds.get(str(width // 2), (0, 0))[1] > LONGEST_PASS_S:
            break  # a pass of twice the tokens would take longer still
        if str(width) in times.seconds.keys() - times.doubtful:
            continue

        def report(fraction: float, number: int = number) -> None:
            progress((number + fraction) / len(_WIDTHS))

        own, other = (partial(_read_s, each, width, context) for each in (plain, int8))
        times.measure(str(width), own, other, threads, report)


def _read_s(bound: BoundGraph, tokens: int, context: int) -> float:
    """Seconds in which `tokens` of a prompt are read after `context` cached ones."""
    seconds = []
    for _ in range(2):  # after passes of another graph, the first one maps the weights again
        bound.arena.rewind_to(0)
        pad_cache(bound, context)
        started = time.perf_counter()
        prefill(bound, [0] * (context + tokens), width=min(tokens, PREFILL_TOKENS) if bound.prefers_base else tokens)
        seconds.append(time.perf_counter() - started)
    return min(seconds)
