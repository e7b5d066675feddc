"""Measures which graph reads prompts: the model's own, or the int8 prompt graph, and keeps the result.

The int8 prompt graph computes prompts with coarser weights. It is used where it was measured to be faster on this
machine, and where the tokens after some prompts stay as probable as with the model's own graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import numpy as np

from ...models.json_file import Count, Positive
from ..graph.bound_graph import BoundGraph
from ..prefill import PREFILL_TOKENS
from .measurement_store import MeasurementStore
from .pass_timing import pad_cache
from .system_load import take_turns

LEAST_WIDTH: Final = 64
"""Tokens of the narrowest pass that the int8 prompt graph may run."""
INT8_WIDTHS: Final = (64, 128, 256)
"""Widths of the passes to measure of the int8 prompt graph. Wider ones are not faster, and take more memory."""
PLAIN_WIDTHS: Final = (64, PREFILL_TOKENS)
"""Widths of the passes to measure of the model's own graph, which runs none that are wider."""
LONGEST_PASS_S: Final = 1.0
"""Seconds that a pass may take: a prompt is cancelled, and its progress is shown, between two passes."""
UNMEASURED_WIDTH: Final = 256
"""Width of the int8 prompt graph's passes before it was measured."""
TOKENS_TO_LOAD: Final = 512
"""Prompt tokens from which on the int8 prompt graph saves more time than loading it takes: both grow with the weights,
so this is about the same for all models (570 measured at 0.5B, 500 on a machine without VNNI)."""
NOT_MADE: Final = "not made yet (edge-run tune makes it)"
"""Why there is no int8 prompt graph before it was made."""
_WORTH: Final = 1.05
"""How many times as fast the int8 prompt graph must be: it takes memory, disk and a little quality."""
_LEAST_TURNS, _MAX_TURNS = 1, 7
"""Turns after the first passes; those beyond the least number are taken while the time lasts."""
_SECONDS_BUDGET: Final = 3.0
_MAX_DISTURBED: Final = 3
"""Measurements at most if other programs disturb every one: a busy machine may always be busy."""
_SHORT, _LONG = 128, 1024
"""Numbers of cached tokens to measure after: attention takes longer after more."""


@dataclass(frozen=True)
class PromptChoice:
    """What was measured of a model's int8 prompt graph on a machine."""

    obstacle: str | None = None
    """Why the model cannot have one; None if it can, and then the other fields are set."""
    plain_s: Mapping[Count, Positive] = field(default_factory=dict)
    """Seconds of a pass of the model's own graph, by width."""
    int8_s: Mapping[Count, Positive] = field(default_factory=dict)
    """Seconds of a pass of the int8 prompt graph, by width."""
    attention_s: float = 0.0
    """Seconds that a cached token adds to a pass of the int8 prompt graph, for each new token."""
    mean_kl: float = 0.0
    """Mean KL divergence of the tokens after some prompts, from those with the model's own graph, in nats."""
    kl_limit: float = 0.0
    """Largest mean KL divergence that is acceptable."""
    disturbed: int = 0
    """Number of measurements, the latest and those just before it, during which other programs used the processor."""

    def __post_init__(self) -> None:
        if self.obstacle is None and not self.int8_s:
            raise ValueError("holds neither times nor a reason")

    @property
    def is_doubtful(self) -> bool:
        """Whether a later process should measure again, because other programs disturbed the measurement."""
        return 0 < self.disturbed < _MAX_DISTURBED

    def joined(self, earlier: PromptChoice | None) -> PromptChoice:
        """This measurement with the times of an earlier one, if both were disturbed: that makes passes slower, never
        faster."""
        if earlier is None or not (self.disturbed and earlier.disturbed):
            return self
        own, other = (
            {width: min(seconds, before.get(width, seconds)) for width, seconds in now.items()}
            for now, before in ((self.plain_s, earlier.plain_s), (self.int8_s, earlier.int8_s))
        )
        return replace(self, plain_s=own, int8_s=other, disturbed=self.disturbed + earlier.disturbed)

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
        """How many times as fast the int8 prompt graph reads a prompt, each graph with its best width; 0 unmeasured."""
        own, int8 = ([each / width for width, each in times.items()] for times in (self.plain_s, self.int8_s))
        return min(own) / min(int8) if own and int8 else 0.0

    @property
    def least_width(self) -> int:
        """Tokens of the narrowest pass from which on the int8 prompt graph is faster."""
        return next((n for n in sorted(self.int8_s) if self.int8_s[n] < self.plain_s.get(n, np.inf)), LEAST_WIDTH)

    def width(self, base: int) -> int:
        """Number of tokens of a pass of the int8 prompt graph after `base` cached ones: the one of highest speed.

        Passes that would take longer than `LONGEST_PASS_S` are left out, unless all do.
        """
        times = {width: seconds + self.attention_s * width * base for width, seconds in self.int8_s.items()}
        short = {width: seconds for width, seconds in times.items() if seconds <= LONGEST_PASS_S}
        chosen = short or {min(times): 1.0}
        return max(chosen, key=lambda width: width / chosen[width])


PROMPT_CHOICES: Final = MeasurementStore("prompt-graph", 2, PromptChoice)
"""Which graph reads prompts, by model, machine and number of threads."""


def measure_prompt_speed(
    plain: BoundGraph,
    int8: BoundGraph,
    threads: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> PromptChoice:
    """Time passes of both graphs in turns; the quality is left out.

    Args:
        plain: the model's own graph, whose cache contents are lost.
        int8: the int8 prompt graph, whose cache contents are lost.
        threads: number of threads of the sessions; 0 for the default.
        progress: receives the fraction done, 0 to 1, before every pass; it may wait.

    Returns:
        The times.

    Raises:
        EdgeError: ONNX Runtime failed.
    """
    limit = min(plain.arena.limit, int8.arena.limit)
    short = min(_SHORT, limit // 2)
    first: dict[tuple[BoundGraph, int], float] = {}
    for bound, widths in ((plain, PLAIN_WIDTHS), (int8, INT8_WIDTHS)):
        for width in widths:
            # Passes wider than one that takes too long take longer still, and are not used.
            if short + width <= limit and first.get((bound, width // 2), 0.0) <= LONGEST_PASS_S:
                progress(0.0)
                first[bound, width] = _pass_s(bound, width, short)
    if not first:
        return PromptChoice(f"a context of {limit} tokens is too short")
    turns, busy = take_turns(
        [partial(_pass_s, bound, width, short) for bound, width in first],
        threads,
        least=_LEAST_TURNS,
        most=_MAX_TURNS,
        seconds=_SECONDS_BUDGET,
        progress=progress,
    )
    times = {one: min(first[one], *seconds) for one, seconds in zip(first, turns, strict=True)}
    own, other = (
        {width: seconds for (each, width), seconds in times.items() if each is graph} for graph in (plain, int8)
    )
    width = min(other)
    attention_s = 0.0
    if _LONG + width <= limit:
        long_s = min(_pass_s(int8, width, _LONG) for _ in range(2))
        attention_s = max(long_s - other[width], 0.0) / (width * (_LONG - short))
    shortened = {each: seconds - attention_s * each * short for each, seconds in other.items()}
    return PromptChoice(None, own, shortened, attention_s, disturbed=int(busy))


def _pass_s(bound: BoundGraph, width: int, context: int) -> float:
    """Seconds of a pass that reads `width` tokens of a prompt after `context` cached ones."""
    bound.arena.rewind_to(0)
    bound.arena.reserve(context + width)
    pad_cache(bound, context)
    tokens = np.arange(width) % bound.graph_io.input_vocab
    seconds = []
    for _ in range(2):  # after passes of another graph, the first one maps the weights again
        started = time.perf_counter()
        bound.forward(tokens, logits_for=(width - 1,))
        seconds.append(time.perf_counter() - started)
    return min(seconds)
