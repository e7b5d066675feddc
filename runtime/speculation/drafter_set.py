"""The drafters and speculators that one answer uses at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from ...errors import InputError
from ..kv.arena import KVArena
from ..options import Request
from ..sampling.sampler import SamplingParams
from ..scheduling.work_thread import WorkThread
from ..strategies.lossy import LossySpeculator
from .choice import SOURCE_NAMES, DraftSampling, Speculation
from .draft_ahead import DraftAhead
from .draft_loading import NewDraftModel
from .drafters.draft_model import DraftModel
from .drafters.edit import EditDrafter
from .drafters.history_store import HistoryDrafter, HistoryStore
from .drafters.interface import Drafter, ModelDrafter
from .drafters.jacobi import JacobiDrafter
from .drafters.ngram import NgramDrafter, NgramTable
from .drafters.recycling import RecycledTable, RecyclingDrafter
from .drafters.sampled import DistributionSource, ModelDistributions
from .drafters.sparse_cache import LONG_CONTEXT
from .drafters.stochastic_ngram import NgramDistributions, TargetNgrams
from .drafters.suffix import SuffixDrafter
from .learned_rates import Mixer
from .pass_cost import PassCost
from .replay import OracleDrafter, OracleMode, Recording
from .sampled_speculator import SampledSpeculator
from .speculator import Speculator
from .tree import Source

_SpeculatorKey: TypeAlias = tuple[frozenset[Source], bool, bool, str]
"""The drafters; whether a recorded answer is replayed; whether near ties are recomputed; the rule of a lossy answer, or
how draft tokens are sampled."""


@dataclass(frozen=True)
class SharedDrafting:
    """What all drafter sets of an engine share, and learn together."""

    cost: PassCost
    """Cost of target passes."""
    vocab_size: int
    """Vocabulary size of the target."""
    trees: bool
    """Whether the target can verify trees."""
    recycled: RecycledTable
    table: NgramTable | None = None
    store: HistoryStore | None = None
    new_draft_model: NewDraftModel | None = None
    """None if there is no draft model."""
    new_sparse_draft: NewDraftModel | str = ""
    """Or why there is none."""
    thread: WorkThread | None = None
    """Where the draft model runs ahead; None to take turns with the target."""
    mixers: dict[_SpeculatorKey, Mixer] = field(default_factory=dict)
    ngrams: TargetNgrams = field(default_factory=TargetNgrams)


_HINTS: Final = {
    Source.MODEL: "give a draft model with --draft",
    Source.EAGLE: "export the model with an EAGLE-3 head: edge-run export SRC OUT --draft HEAD",
    Source.MTP: "export a checkpoint that has a multi-token-prediction module, such as Qwen3.5's",
    Source.MEDUSA: "export the model with Medusa heads: edge-run export SRC OUT --draft HEADS",
    Source.HISTORY: "keep conversations with --history",
    Source.NGRAM: "make a table with edge-run tune --text",
}
"""How to get a drafter that may not be available."""


class DrafterSet:
    """Drafters over one sequence at a time, and the speculators made of them.

    Args:
        shared: what is learned together with other sets.
    """

    def __init__(self, shared: SharedDrafting) -> None:
        # The cheapest and most reliable first. An edit drafter is silent in most texts; where it is sure of the next
        # token, no other one is asked.
        drafters: tuple[Drafter | None, ...] = (
            EditDrafter(),
            SuffixDrafter(),
            None if shared.store is None else HistoryDrafter(shared.store, shared.vocab_size),
            None if shared.table is None else NgramDrafter(shared.table),
            RecyclingDrafter(shared.recycled),
            JacobiDrafter(),
        )
        self._drafters: Final = {drafter.source: drafter for drafter in drafters if drafter is not None}
        self.model: Final = None if shared.new_draft_model is None else shared.new_draft_model()
        """The draft model; None for none."""
        self.ahead: Final = (
            DraftAhead(self.model, shared.thread)
            if isinstance(self.model, DraftModel) and shared.thread is not None
            else None
        )
        """Runs the draft model while the target verifies; None if they take turns."""
        self._sparse: ModelDrafter | None = None
        """The target over a part of its cache, once an answer has drafted with it."""
        self.prompt_ids: Sequence[int] = ()
        """The prompt of the latest answer."""
        self._shared = shared
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
        if recording is not None and recording.oracle_mode is not OracleMode.NONE:
            return self._oracle_speculator(recording, len(request.prompt_ids))
        self.prompt_ids = request.prompt_ids
        model = self._model_for(choice)
        if model is not None:
            model.attach(arena)
            model.start(sampling)
        if request.options.draft_sampling is not DraftSampling.OFF and recording is None and not sampling.greedy:
            return self._sampled_speculator(request.options.draft_sampling, sampling)
        available = frozenset(self._drafters) | (frozenset() if model is None else {model.source})
        if (missing := choice.sources - available) and not choice.automatic:
            hint = _HINTS.get(min(missing), "leave it out")
            if min(missing) is Source.SPARSE:
                raise InputError(f"the drafter sparse is not available: {self._shared.new_sparse_draft}", hint)
            raise InputError(f"the drafter {SOURCE_NAMES[min(missing)]} is not available", hint)
        chosen = choice.sources & available
        if recording is not None:
            # The graph's own logits do not belong to a recorded answer, so nothing can be learned from them.
            chosen -= {Source.RECYCLE, Source.JACOBI}
        if choice.automatic and not self._shared.cost.is_flat(len(request.prompt_ids)):
            chosen -= {Source.JACOBI}
        rule = request.options.lossy if recording is None else None
        if rule is not None:
            self._check_lossy(model, chosen)
        key = (chosen, recording is not None, request.options.exact, "" if rule is None else str(rule))
        return self._speculator(key, model) if chosen else None

    def _model_for(self, choice: Speculation) -> ModelDrafter | None:
        """What runs a model to draft for the present prompt; None for nothing.

        That is the draft model, or the target over a part of its cache: where that is asked for, and behind long
        prompts without a draft model.

        Raises:
            InputError: both are asked for.
        """
        named = Source.SPARSE in choice.sources and not choice.automatic
        if named and self.model is not None and self.model.source in choice.sources:
            both = f"{SOURCE_NAMES[self.model.source]} and sparse"
            raise InputError(f"the drafters {both} cannot draft the same answer", "leave one of them out")
        long = choice.automatic and self.model is None and len(self.prompt_ids) >= LONG_CONTEXT
        new = self._shared.new_sparse_draft
        if isinstance(new, str) or not (named or long):
            return self.model
        if self._sparse is None:
            self._sparse = new()
        return self._sparse

    def _oracle_speculator(self, recording: Recording, start: int) -> Speculator:
        """The speculator whose only drafter knows the recorded answer, which begins at index `start`."""
        if recording.oracle_mode not in self._oracles:
            drafter = OracleDrafter()
            speculator = Speculator([drafter], self._shared.cost, trees=self._shared.trees)
            self._oracles[recording.oracle_mode] = drafter, speculator
        drafter, speculator = self._oracles[recording.oracle_mode]
        drafter.set_answer(recording.oracle_draft(self._shared.vocab_size), start)
        return speculator

    def _speculator(self, key: _SpeculatorKey, model: ModelDrafter | None) -> Speculator:
        if key not in self._speculators:
            drafters = [drafter for source, drafter in self._drafters.items() if source in key[0]]
            model = model if model is not None and model.source in key[0] else None
            kind = LossySpeculator if key[3] else Speculator
            self._speculators[key] = made = kind(
                drafters,
                self._shared.cost,
                model=model,
                trees=self._shared.trees,
                mixer=self._shared.mixers.get(key),
                ahead=self.ahead if model is self.model and model is not None else None,
            )
            self._shared.mixers[key] = made.mixer
        return self._speculators[key]

    def _check_lossy(self, model: ModelDrafter | None, chosen: frozenset[Source]) -> None:
        """Check that there is a draft model whose choices depend on the text alone.

        Raises:
            InputError: there is none.
        """
        if model is None or model.source not in chosen:
            raise InputError("lossy decoding needs a draft model", _HINTS[Source.MODEL])
        if type(model) is not DraftModel:  # what others draft depends on what the target has computed
            raise InputError(
                "lossy decoding needs a draft model of its own, not a draft head or a draft of the model itself",
                _HINTS[Source.MODEL],
            )

    def _sampled_speculator(self, draft_sampling: DraftSampling, sampling: SamplingParams) -> SampledSpeculator:
        if draft_sampling not in self._sampled:
            distributions, mixers = self._distributions(draft_sampling), self._shared.mixers
            key: _SpeculatorKey = frozenset({distributions.source}), False, False, "sampled"
            made = SampledSpeculator(
                distributions, self._shared.cost, draft_sampling, trees=self._shared.trees, mixer=mixers.get(key)
            )
            self._sampled[draft_sampling], mixers[key] = made, made.mixer
        speculator = self._sampled[draft_sampling]
        speculator.start_answer(sampling)
        return speculator

    def _distributions(self, draft_sampling: DraftSampling) -> DistributionSource:
        if draft_sampling is DraftSampling.NGRAM:
            return NgramDistributions(self._shared.ngrams)
        if self.model is None:
            raise InputError("there is no draft model to sample draft tokens from", _HINTS[Source.MODEL])
        if not isinstance(self.model, DraftModel):
            raise InputError(
                "draft tokens cannot be sampled from Medusa heads, which propose a few tokens and no distribution",
                "leave --draft-sampling out",
            )
        return ModelDistributions(self.model)
