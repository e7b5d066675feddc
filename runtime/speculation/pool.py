"""Everything an engine needs to draft, made when first needed: step cost, tables on disk, draft model, speculators."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...models.bundle import Bundle
from ...models.cache import cache_folder
from ...models.pairing import DraftPair
from ..graph.session import GraphSession, SessionConfig
from ..kv.arena import KVArena
from ..measure.exactness import EXACTNESS_REPORTS, ExactnessReport, measure_exactness
from ..measure.measurement_store import model_key
from ..measure.pass_timing import PASS_COSTS, load_or_measure_pass_cost, measure_pass_cost
from ..options import GenerationRequest, Persistence
from .choice import Speculation
from .draft_loading import load_draft, load_own_draft
from .drafters.draft_model import DraftModel
from .drafters.history import HistoryDrafter
from .drafters.history_store import HistoryStore
from .drafters.interface import Drafter
from .drafters.layer_skip import LayerSkipDraft
from .drafters.model import ModelDrafter
from .drafters.ngram import NgramDrafter
from .drafters.oracle import OracleDrafter
from .drafting import Drafting
from .growth import Grower
from .ngram_prior import open_prior
from .pass_cost import PassCost
from .replay import OracleMode
from .sampled_speculator import DraftSampling
from .speculator import Speculator

_HISTORY_BYTES: Final = 64 << 20
"""What the conversations kept of one model may take on disk, index included."""
_WORTH_SAVING: Final = 256
"""Passes observed from which a refined step cost is written back."""
_log: Final = logging.getLogger("edgerun")


class DrafterPool:
    """Drafting for one engine.

    Args:
        graph: the target's session.
        bundle: the target's.
        context: most tokens of a text.
        pair: the draft model; None for none.
        draft_config: how the draft model is run.
        persistence: what is read from disk and kept there.
    """

    def __init__(
        self,
        graph: GraphSession,
        bundle: Bundle,
        context: int,
        pair: DraftPair | None,
        draft_config: SessionConfig,
        persistence: Persistence,
    ) -> None:
        self._graph = graph
        self._bundle = bundle
        self._context = context
        self._pair = pair
        self._draft_config = draft_config
        self._cached = persistence.cache
        self._learned = persistence.cache and persistence.learned
        self._store = HistoryStore(self._history_folder, _HISTORY_BYTES, _log.warning) if persistence.history else None
        self._cost: PassCost | None = None
        self._exactness_report: ExactnessReport | None = None
        self._drafting: Drafting | None = None
        self._model: ModelDrafter | None = None
        self._foreseeing: dict[OracleMode, tuple[OracleDrafter, Speculator]] = {}
        self._kept = False

    def pass_cost(self) -> PassCost:
        """What passes cost: known from before, or measured now."""
        if self._cost is None:
            bound = self._graph.bind(self._graph.arena(self._context))
            self._cost = (
                load_or_measure_pass_cost(self._bundle, self._graph.config, bound)
                if self._cached
                else measure_pass_cost(bound)
            )
        return self._cost

    def draft_model(self) -> DraftModel | None:
        """The draft model, loaded if need be; None if there is none."""
        self._drafts()
        return None if self._model is None else self._model.model

    def exactness_report(self, text: Sequence[int]) -> ExactnessReport:
        """How exact speculation is: known from before, or its noise measured now over `text`."""
        if self._exactness_report is None:
            config = self._graph.config
            self._exactness_report = EXACTNESS_REPORTS.load(model_key(self._bundle, config)) if self._cached else None
            if self._exactness_report is None:
                self._exactness_report = measure_exactness(self._graph.bind(self._graph.arena(self._context)), text)
                if self._cached:
                    EXACTNESS_REPORTS.save(model_key(self._bundle, config), self._exactness_report)
        return self._exactness_report

    def store_exactness_report(self, exactness_report: ExactnessReport) -> None:
        """Take over what is known now, and keep it."""
        self._exactness_report = exactness_report
        if self._cached:
            EXACTNESS_REPORTS.save(model_key(self._bundle, self._graph.config), exactness_report)

    def speculator(self, request: GenerationRequest, arena: KVArena) -> Speculator | None:
        """The speculator for one answer, which is generated in `arena`; None for plain decoding.

        Raises:
            InputError: a drafter that was asked for is not available.
        """
        choice, recording, sampling = request.speculation, request.recording, request.sampling
        graph_io = self._graph.graph_io
        if choice == Speculation.OFF or (choice.automatic and not graph_io.supports_verification):
            return None
        trees = graph_io.supports_trees
        cost = self.pass_cost()
        if recording is not None and recording.oracle_mode is not OracleMode.NONE:
            if recording.oracle_mode not in self._foreseeing:
                predictor = OracleDrafter()
                self._foreseeing[recording.oracle_mode] = predictor, Speculator(Grower([predictor]), cost, trees=trees)
            predictor, speculator = self._foreseeing[recording.oracle_mode]
            predictor.expect(recording.believed(graph_io.vocab_size), len(request.prompt_ids))
            return speculator
        drafting = self._drafts()
        if self._model is not None:
            if isinstance(self._model.model, LayerSkipDraft):
                self._model.model.attach(arena)
            self._model.temperature = 1.0 if sampling.greedy else sampling.temperature
        if request.draft_sampling is not DraftSampling.OFF and recording is None and not sampling.greedy:
            return drafting.drawing(request.draft_sampling, sampling)
        return drafting.speculator(choice, recorded=recording is not None, exact=request.exact)

    def remember(self, tokens: Sequence[int]) -> None:
        """Keep what a finished text adds, for later conversations, where that was asked for."""
        if self._store is not None and self._store.append(tokens):
            self._kept = True

    def close(self) -> None:
        """Keep what was learned."""
        if self._drafting is not None:
            self._drafting.save()
        if self._cached and self._cost is not None and self._cost.observed >= _WORTH_SAVING:
            PASS_COSTS.save(model_key(self._bundle, self._graph.config), self._cost)
        if self._store is not None and (self._kept or not self._store.is_indexed()):
            self._store.reindex()
            self._kept = False

    def _drafts(self) -> Drafting:
        """All drafters at hand, made when first asked for."""
        if self._drafting is None:
            self._drafting = self._make_drafting(self.pass_cost(), trees=self._graph.graph_io.supports_trees)
        return self._drafting

    def _make_drafting(self, cost: PassCost, *, trees: bool) -> Drafting:
        vocab_size = self._graph.graph_io.vocab_size
        tables: list[Drafter] = []
        if self._store is not None:
            tables.append(HistoryDrafter(self._store, vocab_size))
        prior = open_prior(self._bundle, vocab_size) if self._cached else None
        if prior is not None:
            tables.append(NgramDrafter(prior))
        if self._pair is not None:
            self._model = ModelDrafter(self._load(self._pair))
        recycled = cache_folder() / "recycled" / self._model_key if self._learned else None
        return Drafting(cost, vocab_size, trees=trees, tables=tables, model=self._model, recycled=recycled)

    def _load(self, pair: DraftPair) -> DraftModel:
        config, graph_io, context, cache = self._draft_config, self._graph.graph_io, self._context, self._cached
        if pair.own:
            return load_own_draft(pair, config, self._bundle, graph_io, context, cache=cache)
        return load_draft(pair, config, graph_io.vocab_size, context, cache=cache)

    @property
    def _history_folder(self) -> Path:
        return cache_folder() / "history" / self._model_key

    @property
    def _model_key(self) -> str:
        return hashlib.sha256(self._bundle.fingerprint.encode()).hexdigest()[:32]
