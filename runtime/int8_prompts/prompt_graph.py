"""The int8 prompt graph as a further graph: which passes it takes, and why it takes none.

It reads prompts where it was asked for by name, or where it was measured to be faster and its quality was checked
(docs/decisions/0062-int8-prompt-graph.md). Its weights are mapped from a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...models.bundle import Bundle
from ...models.user_text import format_bytes
from ..devices.processor import available_memory
from ..graph.bound_graph import NewTokens
from ..graph.graph_choice import FurtherGraph
from ..graph.session import GraphSession
from ..measure.measurement_store import model_key
from ..measure.prompt_choice import (
    LEAST_WIDTH,
    NOT_MADE,
    PROMPT_CHOICES,
    TOKENS_TO_LOAD,
    UNMEASURED_WIDTH,
    PromptChoice,
)
from ..prefill import INT8_GRAPH, PrefillMode

_WORTH_MAKING: Final = 512
"""Prompt tokens from which on it is made, or measured again, in the background."""


class PromptGraph(FurtherGraph):
    """The graph that reads prompts with int8 weights.

    Args:
        bundle: the model.
        own: its own graph.
        mode: `AUTO` or `INT8`.

    Attributes:
        mode: whether it was asked for by name.
        refusal: why the model's own graph reads prompts; None if this one does.
        choice: what was measured of it; None before that.
        prepare: called, and returns at once, when a prompt was too short to load the graph for it, or many tokens were
            read before the graph was made and measured well.
    """

    name = INT8_GRAPH
    is_copy = True

    def __init__(self, bundle: Bundle, own: GraphSession, mode: PrefillMode) -> None:
        self.mode: Final = mode
        self.refusal: str | None = NOT_MADE
        self.choice: PromptChoice | None = None
        self.prepare: Callable[[], None] = lambda: None
        self._measurable_tokens = 0
        """Number of prompt tokens that might have been read faster if it had been measured, or with less doubt."""
        self._is_loaded = False
        self._pays_to_load = True
        """Whether the prompt that is being read is long enough to load the graph for it."""
        self._unloaded_tokens = 0
        """Number of prompt tokens that it has not read because it was not loaded."""
        self._bundle: Final = bundle
        self._key: Final = model_key(bundle, own.config)
        stored = PROMPT_CHOICES.load(self._key)
        if stored is not None:
            self._adopt(stored)

    @property
    def is_unmeasured(self) -> bool:
        """Whether it is still to be made, or to be measured again, because other programs disturbed that."""
        return self.refusal == NOT_MADE or bool(self.choice and self.choice.times.doubtful)

    @property
    def was_declined(self) -> bool:
        """Whether it is not loaded, because the latest prompt was too short to load it for."""
        return not (self._is_loaded or self._pays_to_load)

    def fits(self, needed: int) -> bool:
        """Whether memory has room for a file of that many bytes; if not, and it was not asked for, it is refused."""
        free = available_memory()
        if self.mode is PrefillMode.INT8 or free >= needed:
            return True
        self.refusal = f"too little memory: {format_bytes(free)} are free, and its file has {format_bytes(needed)}"
        return False

    def keep(self, choice: PromptChoice) -> None:
        """Follow a measurement from now on, and keep it on disk."""
        self._adopt(choice)
        PROMPT_CHOICES.save(self._key, choice)

    def _adopt(self, choice: PromptChoice) -> None:
        self.choice = choice if choice.obstacle is None else None
        by_name = self.mode is PrefillMode.INT8 and choice.obstacle is None
        self.refusal = None if by_name else choice.refusal

    def takes(self, new: NewTokens, base: int) -> bool:
        """Whether it runs a pass: one that reads so much of a prompt that it is faster, and that wants its end only."""
        del base
        width = len(new.ids)
        if width < LEAST_WIDTH:
            return False
        if new.positions is not None or new.tree_mask is not None or new.wanted.tolist() not in ([], [width - 1]):
            return False
        if self.is_unmeasured:
            self._measurable_tokens += width
            if self._measurable_tokens >= _WORTH_MAKING:
                self.prepare()
        choice = None if self.mode is PrefillMode.INT8 else self.choice
        if self.refusal is not None or width < (LEAST_WIDTH if choice is None else choice.least_width):
            return False
        if not (self._is_loaded or self._pays_to_load):
            self._unloaded_tokens += width
            self.prepare()
            return False
        return True

    def prefill_width(self, preferred: int, remaining: int) -> int:
        """Number of prompt tokens to run in the next pass: as measured, so that no pass takes long."""
        if self.refusal is not None:
            return preferred
        if not self._is_loaded:
            # Prompts that were read without it count too: at worst, twice the time of the better choice is lost.
            by_name = self.mode is PrefillMode.INT8
            self._pays_to_load = by_name or self._unloaded_tokens + remaining >= TOKENS_TO_LOAD
            if not self._pays_to_load:
                return preferred
        return UNMEASURED_WIDTH if self.choice is None else self.choice.width

    def load(self, base: GraphSession) -> GraphSession | None:
        """Load the graph from its files; None if they are missing, or damaged, or need more memory than is free."""
        from .int8_graph_files import int8_graph_bytes, int8_graph_path  # noqa: PLC0415 -- importing protobuf takes 28 ms

        path = int8_graph_path(self._bundle, base.config, make=self.mode is PrefillMode.INT8)
        if path is None:
            self.refusal = NOT_MADE
            return None
        if not self.fits(int8_graph_bytes(path)):
            return None
        session = base.beside(path)
        self._is_loaded = True
        return session
