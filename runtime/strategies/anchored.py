"""Anchored decoding: a text that stays near a model that is known to be safe, by a bound on the divergence."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from ...errors import BundleError, InputError
from ...models.bundle import open_bundle
from ...models.find import find_model
from ...models.pairing import vocabulary_difference
from ...models.progress import Progress
from ..arguments.argument_types import option
from ..graph.open_graph import open_graph
from ..graph.session import SessionConfig
from ..kv.arena import KVArena
from ..kv.prefix_cache import CachedSequence, PrefixCache
from ..options import GenerateOptions
from ..sampling.logit_stage import Logits, LogitStage, Weights, log_softmax
from ..speculation.draft_loading import DraftTarget
from .second_reader import LEAST, NewSequence, ReaderStage
from .strategy import Strategy

if TYPE_CHECKING:
    from ..sampling.sampler import SamplingParams
    from ..text.tokenizer import TextTokenizer

_ROUNDING: Final = 1e-5
"""Nats of the budget that are left for the rounding of logits to float32."""
_CLOSE: Final = 0.999
"""Share of what may be spent with which the search for the best mixture ends."""


@dataclass(frozen=True)
class Anchored(Strategy):
    """Anchored decoding."""

    name: ClassVar[str] = "anchored"
    purpose: ClassVar[str] = "Stays near a safe model (`--anchor MODEL`), which does not know what must not be copied."
    source: ClassVar[str] = "He et al. 2026, Anchored Decoding: Provably Reducing Copyright Risk for Any Language Model"
    passes: ClassVar[str] = "1, and 1 of the anchor"
    has_reader: ClassVar[bool] = True
    reads_anchor: ClassVar[bool] = True
    budget: float = option(
        0.5,
        "Largest KL divergence from the anchor that a token adds, in nats; what it does not need is carried on.",
        least=0,
        most=1000,
    )

    def start(self, params: SamplingParams, vocab_size: int, tokenizer: TextTokenizer) -> LogitStage:
        """Begin a text.

        Raises:
            InputError: tokens are filtered after the bound is kept.
        """
        if not params.greedy and (params.top_k or params.top_p < 1 or params.min_p):
            what = "the strategy anchored is given with top-k, top-p or min-p, which leave the bound on the divergence"
            raise InputError(what, "give top-k 0, top-p 1 and min-p 0")
        return _Anchored(self.budget, params.temperature or 1.0)


class _Anchored(ReaderStage):
    """The mixture of both models, p^x a^(1 - x), with the largest x that the budget allows.

    It is the distribution nearest to the model's, p, of those whose divergence from the anchor's, a, is not larger.

    Args:
        budget: nats that every token of the answer adds to what is left.
        temperature: the model's distribution is that at this temperature, the anchor's that at 1.
    """

    magnifies = math.inf

    def __init__(self, budget: float, temperature: float) -> None:
        super().__init__()
        self._budget: Final = budget
        self._temperature: Final = temperature
        self._left = [0.0]
        """Nats that are left after each token of the answer, the first entry before all of them."""
        self._spent: dict[int, float] = {}
        """Divergence at the positions of the answer whose distributions were computed on the path."""

    def observe_prompt(self, tokens: list[int]) -> None:
        """Add tokens of the prompt, which have no budget."""
        super().observe_prompt(tokens)
        self._left, self._spent = [0.0], {}

    def observe(self, tokens: list[int]) -> None:
        """Add tokens of the answer; those that were not chosen here neither have a budget nor spend any."""
        super().observe(tokens)
        for _ in tokens:
            spent = self._spent.get(len(self._left) - 1, self._budget)
            self._left.append(self._left[-1] + self._budget - spent)

    def shorten(self, size: int) -> None:
        """Forget the tokens after the first `size`."""
        super().shorten(size)
        del self._left[1 + size - self.prompt_length :]
        self._spent = {at: spent for at, spent in self._spent.items() if at < len(self._left)}

    def compared(self, logits: Logits, others: Logits) -> Logits:
        """The mixture; where a grammar leaves tokens out, of both models without these."""
        ids = np.flatnonzero(logits != -np.inf)
        # Graphs of one vocabulary may be padded to different sizes.
        others = np.pad(others, (0, max(logits.size - others.size, 0)), constant_values=LEAST)
        own, anchor = log_softmax(logits[ids] / self._temperature), np.maximum(log_softmax(others[ids]), LEAST)
        most = self._left[-1] + self._budget - _ROUNDING
        mixture, divergence = _mixed(own, anchor, 1.0)
        if divergence > most:
            low, high, found = 0.0, 1.0, divergence
            while high - low > _ROUNDING and not _CLOSE * most <= found <= most:
                share = (low + high) / 2
                _, found = _mixed(own, anchor, share)
                low, high = (share, high) if found <= most else (low, share)
            mixture, divergence = _mixed(own, anchor, low)
        self._spent[len(self._left) - 1] = divergence
        scores = np.full_like(logits, -np.inf)
        scores[ids] = mixture * self._temperature
        return scores


def _mixed(own: Weights, anchor: Weights, share: float) -> tuple[Weights, float]:
    """Log-probabilities of a mixture, and its KL divergence from the anchor."""
    mixture = log_softmax(anchor + share * (own - anchor))
    return mixture, float(np.exp(mixture) @ (mixture - anchor))


def anchor_sequences(
    name: str | os.PathLike[str] | None, config: SessionConfig, target: DraftTarget, progress: Progress
) -> NewSequence | None:
    """Load an anchor; returns what makes sequences of it, with what earlier ones have of the prompt.

    Args:
        name: the model, as `load` finds it; None for none.
        config: how the model runs that it anchors.
        target: that model.
        progress: receives the progress of reading long prompts.

    Raises:
        BundleError: the anchor is missing or damaged, has other tokens or a shorter context, or cannot verify the
            drafts of the model.
    """
    if name is None:
        return None
    bundle, anchored = open_bundle(find_model(name)), target.bundle.folder
    if difference := vocabulary_difference(anchored, bundle.folder):
        what = f"the anchor {bundle.folder} has another vocabulary than {anchored}: {difference}"
        raise BundleError(what, "give an anchor with the same tokens")
    if (most := bundle.context or target.context) < target.context:
        what = f"the anchor {bundle.folder} has a context of {most} tokens, and {anchored} has {target.context}"
        raise BundleError(what, f"add --context {most}")
    graph = open_graph(bundle, replace(config, kv_scales=None), cache=target.cache)
    if target.graph_io.supports_trees and not graph.graph_io.supports_trees:
        what = f"the anchor {bundle.folder} takes no tree mask, and {anchored} does"
        raise BundleError(what, "export the anchor with edge-run")

    def new_arena() -> KVArena:
        return graph.arena(target.context)

    prefixes = (target.prefixes or PrefixCache(new_arena, 0)).beside(new_arena)

    def sequence(prompt_ids: Sequence[int], options: GenerateOptions) -> CachedSequence:
        arena = prefixes.take(() if options.exact else prompt_ids)
        return CachedSequence(graph.bind(arena), [*prompt_ids[: arena.length]], progress, prefixes)

    return sequence
