"""The drafters of one engine, with their persistent state, and the speculators made of them.

Everything is made when it is first needed. What drafters learn about a model lasts as long as its engine; the pass cost
and the recycled candidates are saved to the cache folder when the engine closes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Final

from ...errors import EdgeError, InputError
from ...models.bundle import Bundle
from ...models.cache import cache_folder
from ...models.pairing import DraftPair
from ...models.progress import Progress, silent
from ..graph.bound_session import BoundSession
from ..graph.session import GraphSession, SessionConfig
from ..kv.arena import KVArena
from ..measure.exactness import EXACTNESS_REPORTS, ExactnessReport, measure_exactness
from ..measure.measurement_store import model_key
from ..measure.measuring_time import MeasuringTime
from ..measure.pass_timing import MEASURING_SPEED, PASS_COSTS, load_or_measure_pass_cost, measure_pass_cost
from ..measure.system_load import LoadMeter
from ..options import GenerationRequest, Persistence
from ..sampling.sampler import SamplingParams
from .choice import SOURCE_NAMES, Speculation
from .draft_loading import load_draft, load_layer_skip_draft
from .drafters.draft_model import DraftModel
from .drafters.history import HistoryDrafter
from .drafters.history_indexing import HistoryIndexer
from .drafters.history_store import HistoryStore
from .drafters.interface import Drafter
from .drafters.layer_skip import LayerSkipDraft
from .drafters.model import ModelDrafter
from .drafters.ngram import NgramDrafter
from .drafters.ngram_table import open_bundle_table
from .drafters.oracle import OracleDrafter
from .drafters.recycling import RecyclingDrafter
from .drafters.suffix import SuffixDrafter
from .pass_cost import PassCost
from .replay import OracleMode, Recording
from .sampled_speculator import DraftSampling, SampledSpeculator
from .speculator import Speculator
from .tree import Source

_HISTORY_BYTES: Final = 64 << 20
"""Maximum size on disk of the stored conversations of one model, index included."""
_MIN_OBSERVED: Final = 256
"""Number of observed passes from which a refined pass cost is saved."""
_HINTS: Final = {
    Source.MODEL: "give a draft model with --draft",
    Source.HISTORY: "keep conversations with --history",
    Source.NGRAM: "make a table with edge-run tune --text",
    Source.SUFFIX: "leave it out",
    Source.RECYCLED: "leave it out",
}
"""How to get a drafter that is not available."""
_log: Final = logging.getLogger("edgerun")


class DrafterPool:
    """Owns the drafters of one engine and hands out a speculator for each answer.

    Args:
        graph: session of the target.
        bundle: bundle of the target.
        context: maximum number of tokens of a sequence.
        pair: the draft model; None for none.
        draft_config: configuration of the draft model's session.
        persistence: what is read from disk and kept there.
        progress: receives the progress of measurements.
    """

    def __init__(
        self,
        graph: GraphSession,
        bundle: Bundle,
        context: int,
        pair: DraftPair | None,
        draft_config: SessionConfig,
        persistence: Persistence,
        progress: Progress = silent,
    ) -> None:
        self._open_graph: GraphSession | None = graph
        self._bundle = bundle
        self._context = context
        self._pair = pair
        self._draft_config = draft_config
        self._persistence = persistence
        self.measuring: Final = MeasuringTime(progress)
        """The time that measurements took."""
        self._model_key = hashlib.sha256(bundle.fingerprint.encode()).hexdigest()[:32]
        history_folder = cache_folder() / "history" / self._model_key
        self._store = HistoryStore(history_folder, _HISTORY_BYTES, _log.warning) if persistence.history else None
        self._indexer = None if self._store is None else HistoryIndexer(self._store)
        self._pass_cost: PassCost | None = None
        self._meter = LoadMeter(graph.config.threads)
        """The load of other programs since the model was loaded, then since the answer began."""
        self._disturbed = False
        """Whether other programs disturbed an answer, and what was learned from its passes."""
        self._exactness_report: ExactnessReport | None = None
        self._free: dict[Source, Drafter] | None = None
        self._recycling: RecyclingDrafter | None = None
        self._model: ModelDrafter | None = None
        self._speculators: dict[tuple[frozenset[Source], bool, bool], Speculator] = {}
        self._sampled: dict[DraftSampling, SampledSpeculator] = {}
        self._oracles: dict[OracleMode, tuple[OracleDrafter, Speculator]] = {}

    def pass_cost(self) -> PassCost:
        """Cost of target passes: stored by an earlier engine, or measured now."""
        if self._pass_cost is None:
            bound = self._bind()
            config = self._graph.config
            if self._persistence.cache:
                self._pass_cost = load_or_measure_pass_cost(
                    self._bundle, config, bound, self.measuring, meter=self._meter
                )
            else:
                with self.measuring.stage(MEASURING_SPEED) as progress:
                    self._pass_cost = measure_pass_cost(bound, threads=config.threads, progress=progress)
        return self._pass_cost

    def draft_model(self) -> DraftModel | None:
        """The draft model, loaded if necessary; None if there is none."""
        self._make_drafters()
        return None if self._model is None else self._model.model

    def exactness_report(self, token_ids: Sequence[int]) -> ExactnessReport:
        """The exactness report of this model and machine: stored, or its noise measured now over `token_ids`."""
        if self._exactness_report is None:
            key = model_key(self._bundle, self._graph.config)
            self._exactness_report = EXACTNESS_REPORTS.load(key) if self._persistence.cache else None
            if self._exactness_report is None:
                with self.measuring.stage("measuring how far passes differ"):
                    self.store_exactness_report(measure_exactness(self._bind(), token_ids))
        assert self._exactness_report is not None  # noqa: S101  stored or measured
        return self._exactness_report

    def store_exactness_report(self, exactness_report: ExactnessReport) -> None:
        """Use an exactness report from now on, and save it to the cache folder."""
        self._exactness_report = exactness_report
        if self._persistence.cache:
            EXACTNESS_REPORTS.save(model_key(self._bundle, self._graph.config), exactness_report)

    def speculator(self, request: GenerationRequest, arena: KVArena) -> Speculator | None:
        """The speculator for one answer; None for plain decoding.

        Exact answers have speculators of their own: near ties are recomputed there, so other drafts pay.

        Args:
            request: the answer's prompt, sampling parameters and choice of drafters.
            arena: KV cache that the answer is generated in.

        Raises:
            InputError: a drafter that was asked for is not available.
        """
        choice, recording, sampling = request.speculation, request.recording, request.sampling
        graph_io = self._graph.graph_io
        if choice == Speculation.OFF or (choice.automatic and not graph_io.supports_verification):
            return None
        if recording is not None and recording.oracle_mode is not OracleMode.NONE:
            return self._oracle_speculator(recording, len(request.prompt_ids))
        free = self._make_drafters()
        self._meter = LoadMeter(self._graph.config.threads)
        if self._model is not None:
            if isinstance(self._model.model, LayerSkipDraft):
                self._model.model.attach(arena)
            self._model.temperature = 1.0 if sampling.greedy else sampling.temperature
        if request.draft_sampling is not DraftSampling.OFF and recording is None and not sampling.greedy:
            return self._sampled_speculator(request.draft_sampling, sampling)
        available = frozenset(free) | (frozenset() if self._model is None else {self._model.source})
        if (missing := choice.sources - available) and not choice.automatic:
            raise InputError(f"the drafter {SOURCE_NAMES[min(missing)]} is not available", _HINTS[min(missing)])
        chosen = choice.sources & available
        if recording is not None:
            # The graph's own logits do not belong to a recorded answer, so nothing can be learned from them.
            chosen -= {Source.RECYCLED}
        if not chosen:
            return None
        key = (chosen, recording is not None, request.exact)
        if key not in self._speculators:
            drafters = [drafter for source, drafter in free.items() if source in chosen]
            model = self._model if Source.MODEL in chosen else None
            self._speculators[key] = Speculator(drafters, self.pass_cost(), model=model, trees=graph_io.supports_trees)
        return self._speculators[key]

    def generating(self) -> AbstractContextManager[None]:
        """A context for generating an answer: work in the background waits."""
        return nullcontext() if self._indexer is None else self._indexer.answering()

    def end_answer(self) -> None:
        """Doubt the pass cost if the passes of an answer contradict it, unless other programs disturbed them."""
        cost = self._pass_cost
        if cost is None:
            return
        if self._meter.is_busy:
            self._disturbed = True
            cost.forget_strays()
        elif cost.is_contradicted:
            cost.distrust()
            self._save_pass_cost(cost)

    def store_conversation(self, token_ids: Sequence[int]) -> None:
        """Store the new tokens of a finished answer in the history, if one is kept, to be indexed soon."""
        if self._store is not None and self._indexer is not None and self._store.append(token_ids):
            self._indexer.conversation_stored()

    def close(self) -> None:
        """Save what was learned and free the memory; calling it again does nothing."""
        if self._open_graph is None:
            return
        if self._recycling is not None and self._keeps_recycled and self._recycling.changed:
            with suppress(OSError):
                self._recycling.save(self._recycled_file)
        cost = self._pass_cost
        if cost is not None and cost.observed >= _MIN_OBSERVED and not self._disturbed:
            self._save_pass_cost(cost)
        if self._indexer is not None:
            self._indexer.close()
        self._open_graph = self._free = self._model = self._recycling = None
        for speculators in (self._speculators, self._sampled, self._oracles):
            speculators.clear()

    def _save_pass_cost(self, cost: PassCost) -> None:
        if self._persistence.cache:
            PASS_COSTS.save(model_key(self._bundle, self._graph.config), cost)

    @property
    def _graph(self) -> GraphSession:
        if self._open_graph is None:
            raise EdgeError("this engine is closed", "load the model again")
        return self._open_graph

    def _bind(self) -> BoundSession:
        """The target's session over a new arena."""
        return self._graph.bind(self._graph.arena(self._context))

    @property
    def _keeps_recycled(self) -> bool:
        return self._persistence.cache and self._persistence.learned

    @property
    def _recycled_file(self) -> Path:
        return cache_folder() / "recycled" / self._model_key

    def _make_drafters(self) -> dict[Source, Drafter]:
        """The free drafters by source; they and the draft model are made on the first call."""
        if self._free is None:
            vocab_size = self._graph.graph_io.vocab_size
            self.pass_cost()
            drafters: list[Drafter] = [SuffixDrafter()]
            if self._store is not None:
                drafters.append(HistoryDrafter(self._store, vocab_size))
            table = open_bundle_table(self._bundle, vocab_size, _log.warning) if self._persistence.cache else None
            if table is not None:
                drafters.append(NgramDrafter(table))
            if self._pair is not None:
                self._model = ModelDrafter(self._load_draft_model(self._pair))
            self._recycling = RecyclingDrafter(vocab_size)
            if self._keeps_recycled:
                self._recycling.load(self._recycled_file)
            self._free = {drafter.source: drafter for drafter in (*drafters, self._recycling)}
        return self._free

    def _load_draft_model(self, pair: DraftPair) -> DraftModel:
        graph_io, config = self._graph.graph_io, self._draft_config
        cache, measuring, context = self._persistence.cache, self.measuring, self._context
        if pair.layer_skip:
            return load_layer_skip_draft(
                pair, config, self._bundle, graph_io, context, cache=cache, measuring=measuring
            )
        tokens = self._persistence.prefix_bytes // sum(tensor_type.slot_bytes for tensor_type in graph_io.tensor_types)
        return load_draft(
            pair, config, graph_io.vocab_size, context, cache=cache, measuring=measuring, prefix_tokens=tokens
        )

    def _sampled_speculator(self, draft_sampling: DraftSampling, sampling: SamplingParams) -> SampledSpeculator:
        if self._model is None:
            raise InputError("there is no draft model to sample draft tokens from", _HINTS[Source.MODEL])
        if draft_sampling not in self._sampled:
            trees = self._graph.graph_io.supports_trees
            self._sampled[draft_sampling] = SampledSpeculator(
                self._model.model, self.pass_cost(), draft_sampling, trees=trees
            )
        speculator = self._sampled[draft_sampling]
        speculator.start_answer(sampling)
        return speculator

    def _oracle_speculator(self, recording: Recording, start: int) -> Speculator:
        graph_io = self._graph.graph_io
        if recording.oracle_mode not in self._oracles:
            drafter = OracleDrafter()
            self._oracles[recording.oracle_mode] = (
                drafter,
                Speculator([drafter], self.pass_cost(), trees=graph_io.supports_trees),
            )
        drafter, speculator = self._oracles[recording.oracle_mode]
        drafter.set_answer(recording.oracle_draft(graph_io.vocab_size), start)
        return speculator
