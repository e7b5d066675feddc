"""The drafters and speculators that one answer uses at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ...errors import InputError
from ..kv.arena import KVArena
from ..options import Request
from ..sampling.sampler import SamplingParams
from ..scheduling.work_thread import WorkThread
from .choice import SOURCE_NAMES, DraftSampling
from .draft_ahead import DraftAhead
from .draft_loading import NewDraftModel
from .drafters.draft_model import DraftModel
from .drafters.interface import Drafter
from .drafters.model import ModelDrafter
from .drafters.ngram import NgramTable
from .drafters.recycling import RecycledTable
from .drafters.sampled import AcceptanceEstimate
from .learned_rates import LearnedRates
from .pass_cost import PassCost
from .replay import OracleDrafter, OracleMode, Recording
from .sampled_speculator import SampledSpeculator
from .speculator import Speculator
from .tree import Source

_SpeculatorKey: TypeAlias = tuple[frozenset[Source], bool, bool]
"""The drafters; whether a recorded answer is replayed; whether near ties are recomputed."""

_HINTS: Final = {
    Source.MODEL: "give a draft model with --draft",
    Source.EAGLE: "export the model with an EAGLE-3 head: edge-run export SRC OUT --draft HEAD",
    Source.MTP: "export a checkpoint that has a multi-token-prediction module, such as Qwen3.5's",
    Source.MEDUSA: "export the model with Medusa heads: edge-run export SRC OUT --draft HEADS",
    Source.HISTORY: "keep conversations with --history",
    Source.NGRAM: "make a table with edge-run tune --text",
    Source.SUFFIX: "leave it out",
    Source.EDIT: "leave it out",
    Source.RECYCLED: "leave it out",
}
"""How to get a drafter that is not available."""


@dataclass(frozen=True)
class SharedDrafting:
    """What all drafter sets of an engine share, and learn together."""

    cost: PassCost
    """Cost of target passes."""
    recycled: RecycledTable
    table: NgramTable | None = None
    new_draft_model: NewDraftModel | None = None
    """None if there is no draft model."""
    rates: dict[_SpeculatorKey, LearnedRates] = field(default_factory=dict)
    estimate: AcceptanceEstimate = field(default_factory=AcceptanceEstimate)
    """Acceptance of sampled draft tokens."""


class DrafterSet:
    """Drafters over one sequence at a time, and the speculators made of them.

    Args:
        drafters: the free drafters by source, the cheapest and most reliable first.
        model: the draft model; None for none.
        shared: what is learned together with other sets.
        vocab_size: vocabulary size of the target.
        trees: whether the target can verify trees.
        thread: where the draft model runs ahead; None to take turns with the target.
    """

    def __init__(
        self,
        drafters: Mapping[Source, Drafter],
        model: ModelDrafter | None,
        shared: SharedDrafting,
        *,
        vocab_size: int,
        trees: bool,
        thread: WorkThread | None = None,
    ) -> None:
        self.model: Final = model
        self.ahead: Final = None if model is None or thread is None else DraftAhead(model, thread)
        """Runs the draft model while the target verifies; None if they take turns."""
        self.prompt_ids: Sequence[int] = ()
        """The prompt of the latest answer."""
        self._drafters = drafters
        self._shared = shared
        self._vocab_size = vocab_size
        self._trees = trees
        self._speculators: dict[_SpeculatorKey, Speculator] = {}
        self._sampled: dict[DraftSampling, SampledSpeculator] = {}
        self._oracles: dict[OracleMode, tuple[OracleDrafter, Speculator]] = {}

    def speculator(self, request: Request, arena: KVArena) -> Speculator | None:
        """The speculator for one answer; None if there are no drafters for it.

        Exact answers have speculators of their own: near ties are recomputed there, so other drafts pay.

        Args:
            request: the answer's prompt, sampling parameters and choice of drafters.
            arena: KV cache that the answer is generated in.

        Raises:
            InputError: a drafter that was asked for is not available.
        """
        choice, recording, sampling = request.options.speculation, request.recording, request.sampling
        self.prompt_ids = request.prompt_ids
        if self.model is not None:
            self.model.model.attach(arena)
            self.model.temperature = 1.0 if sampling.greedy else sampling.temperature
        if request.options.draft_sampling is not DraftSampling.OFF and recording is None and not sampling.greedy:
            return self._sampled_speculator(request.options.draft_sampling, sampling)
        available = frozenset(self._drafters) | (frozenset() if self.model is None else {self.model.source})
        if (missing := choice.sources - available) and not choice.automatic:
            raise InputError(f"the drafter {SOURCE_NAMES[min(missing)]} is not available", _HINTS[min(missing)])
        chosen = choice.sources & available
        if recording is not None:
            # The graph's own logits do not belong to a recorded answer, so nothing can be learned from them.
            chosen -= {Source.RECYCLED}
        return self._speculator((chosen, recording is not None, request.options.exact)) if chosen else None

    def end_answer(self) -> None:
        """Wait until the draft model is free again: the answer has ended."""
        if self.ahead is not None:
            self.ahead.end()

    def oracle_speculator(self, recording: Recording, start: int) -> Speculator:
        """The speculator whose only drafter knows the recorded answer, which begins at index `start`."""
        if recording.oracle_mode not in self._oracles:
            drafter = OracleDrafter()
            speculator = Speculator([drafter], self._shared.cost, trees=self._trees)
            self._oracles[recording.oracle_mode] = drafter, speculator
        drafter, speculator = self._oracles[recording.oracle_mode]
        drafter.set_answer(recording.oracle_draft(self._vocab_size), start)
        return speculator

    def _speculator(self, key: _SpeculatorKey) -> Speculator:
        if key not in self._speculators:
            drafters = [drafter for source, drafter in self._drafters.items() if source in key[0]]
            model = self.model if self.model is not None and self.model.source in key[0] else None
            if key not in self._shared.rates:
                everyone = [*drafters, *([] if model is None else [model])]
                self._shared.rates[key] = LearnedRates(everyone)
            self._speculators[key] = Speculator(
                drafters,
                self._shared.cost,
                model=model,
                trees=self._trees,
                learned=self._shared.rates[key],
                ahead=None if model is None else self.ahead,
            )
        return self._speculators[key]

    def _sampled_speculator(self, draft_sampling: DraftSampling, sampling: SamplingParams) -> SampledSpeculator:
        if self.model is None:
            raise InputError("there is no draft model to sample draft tokens from", _HINTS[Source.MODEL])
        if not isinstance(self.model.model, DraftModel):
            raise InputError(
                "draft tokens cannot be sampled from Medusa heads, which propose a few tokens and no distribution",
                "leave --draft-sampling out",
            )
        if draft_sampling not in self._sampled:
            self._sampled[draft_sampling] = SampledSpeculator(
                self.model.model,
                self._shared.cost,
                draft_sampling,
                trees=self._trees,
                estimate=self._shared.estimate,
                ahead=self.ahead,
            )
        speculator = self._sampled[draft_sampling]
        speculator.start_answer(sampling)
        return speculator
